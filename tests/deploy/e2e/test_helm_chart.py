"""The Helm chart: its objects are right, fit together, and start a server that answers its probes."""

from __future__ import annotations

import copy
import functools
import json
import re
import shlex
import signal
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from tests.support.certificates import Authority
from tests.support.charts import (
    CHART,
    FULL_NAME,
    KEDA,
    LOCAL,
    ROOT,
    VARIANTS,
    ChartError,
    Object,
    helm_template,
    of_kind,
    render,
    render_text,
    server_container,
)
from tests.support.draining import SERVING, Client
from tests.support.servers import ServerProcess, eventually, started

from conch.cli.settings.settings_reader import read_flags
from conch.server_settings import SETTINGS

DEFAULTS: Object = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMAS = {
    schema["properties"]["kind"]["const"]: schema
    for schema in map(
        json.loads, (p.read_text() for p in (ROOT / "tests/support/crd_schemas").glob("*.json"))
    )
}
OLDEST = "1.27"
"""The Kubernetes that Chart.yaml demands."""

rendered = functools.cache(lambda variant: render(VARIANTS[variant]))


@functools.cache
def checked(text: str) -> None:
    """Checks an object's JSON by the schemas of the oldest and the newest Kubernetes, or its kind's own."""
    each = json.loads(text)
    if each["kind"] in SCHEMAS:
        jsonschema.validate(each, SCHEMAS[each["kind"]])
        return
    for version in (OLDEST, kubernetes_validate.latest_version()):
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_objects_are_what_kubernetes_expects(variant: str) -> None:
    assert f">={OLDEST}." in yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"]
    for each in rendered(variant):
        checked(json.dumps(each))


@pytest.mark.parametrize("variant", VARIANTS)
def test_objects_fit_together(variant: str) -> None:
    objects = rendered(variant)
    assert len({(each["kind"], each["metadata"]["name"]) for each in objects}) == len(objects)
    deployment = of_kind(objects, "Deployment")
    template = deployment["spec"]["template"]
    pod, labels = template["spec"], template["metadata"]["labels"]
    container = server_container(objects)
    ports = {port["name"] for port in container["ports"]}
    assert ports >= {"grpc", "metrics"}

    selectors = [deployment["spec"]["selector"]["matchLabels"]]
    named: list[str] = [
        probe["httpGet"]["port"]
        for probe in (container[f"{name}Probe"] for name in ("startup", "readiness", "liveness"))
        if "httpGet" in probe
    ]
    for each in objects:
        spec = each.get("spec", {})
        match each["kind"]:
            case "Service":
                selectors.append(spec["selector"])
                named += [port["targetPort"] for port in spec["ports"]]
            case "PodDisruptionBudget" | "PodMonitor":
                selectors.append(spec["selector"]["matchLabels"])
                named += [endpoint["port"] for endpoint in spec.get("podMetricsEndpoints", ())]
                assert spec.get("jobLabel", "app.kubernetes.io/name") in labels
            case "NetworkPolicy":
                selectors.append(spec["podSelector"]["matchLabels"])
                named += [port["port"] for rule in spec["ingress"] for port in rule["ports"]]
            case "HorizontalPodAutoscaler" | "ScaledObject":
                assert spec["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
                assert "replicas" not in deployment["spec"]  # an upgrade would undo what load has chosen
    for selector in selectors:
        assert selector.items() <= labels.items()
    assert set(named) <= ports

    accounts = [each["metadata"]["name"] for each in objects if each["kind"] == "ServiceAccount"]
    assert pod["serviceAccountName"] in (accounts or ["default"])
    volumes = {volume["name"] for volume in pod["volumes"]}
    every = [*pod.get("initContainers", ()), *pod["containers"]]
    mounted = [mount["name"] for each in every for mount in each["volumeMounts"]]
    assert set(mounted) <= volumes <= {*mounted, "v"}  # v is a value of the test
    for each in every:
        assert each["securityContext"]["readOnlyRootFilesystem"]
        assert len({mount["mountPath"] for mount in each["volumeMounts"]}) == len(each["volumeMounts"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_server_accepts_its_flags_and_has_time_to_drain(variant: str) -> None:
    objects = rendered(variant)
    container = server_container(objects)
    settings = read_flags(container["args"], {})
    paths = [mount["mountPath"] for mount in container["volumeMounts"]]
    for key in (
        "grpc_server_cert",
        "grpc_server_key",
        "grpc_root_cert",
        "http_server_cert",
        "http_root_cert",
    ):
        assert settings[key] is None or str(settings[key].parent) in paths
    locations = settings["model_repository"]
    assert all("://" in str(each) or str(each) in paths for each in locations)
    grace = of_kind(objects, "Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > settings["drain_delay"] + settings["exit_timeout_secs"]
    assert settings["drain_delay"] > 0
    assert settings["grpc_max_connection_age"] == 1_800_000
    assert settings["grpc_max_connection_age_grace"] == 300_000
    assert settings["front_ends"] == "auto"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["grpc"] == settings["grpc_port"]
    assert ports["metrics"] == settings["metrics_port"]
    assert ports.get("http") == (settings["http_port"] if settings["allow_http"] else None)


def test_flags_of_settings_reach_the_server_as_they_are() -> None:
    settings = read_flags(server_container(rendered("object store"))["args"], {})
    assert [str(each) for each in settings["model_repository"]] == ["s3://bucket/models", "gs://b"]
    assert settings["model_cache_byte_size"] == 20_000_000_000
    assert settings["min_supported_compute_capability"] == 7.5
    assert settings["strict_readiness"] is False
    assert len(settings["backend_config"]) == 2


def test_gpus_are_asked_for_on_their_nodes() -> None:
    objects = rendered("gpu")
    pod = of_kind(objects, "Deployment")["spec"]["template"]["spec"]
    resources = server_container(objects)["resources"]
    assert resources["limits"] == {"nvidia.com/gpu": 2, "memory": "64Gi"}
    assert resources["requests"] == {"cpu": "1", "memory": "2Gi"}
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "H100", "pool": "a"}
    assert [each["key"] for each in pod["tolerations"]] == ["nvidia.com/gpu", "pool"]
    assert pod["runtimeClassName"] == "nvidia"


def test_both_autoscalers_have_the_same_targets() -> None:
    values = LOCAL | {"autoscaling": {"hpa": {"enabled": True}, "queueSeconds": 0.25}}
    metrics = of_kind(render(values), "HorizontalPodAutoscaler")["spec"]["metrics"]
    by_hpa = {each["pods"]["metric"]["name"]: each["pods"]["target"] for each in metrics}
    assert by_hpa == {
        "conch_queue_seconds_per_request": {"type": "AverageValue", "averageValue": "250m"},
        "conch_pod_saturation": {"type": "AverageValue", "averageValue": "800m"},
    }
    triggers = of_kind(rendered("keda"), "ScaledObject")["spec"]["triggers"]
    by_keda = {each["name"]: (each["metricType"], each["metadata"]["threshold"]) for each in triggers}
    assert by_keda == {
        "conch-queue-seconds-per-request": ("AverageValue", "0.25"),
        "conch-pod-saturation": ("AverageValue", "0.8"),
    }
    adapter = yaml.safe_load((CHART / "files/prometheus/adapter.yml").read_text())
    assert {rule["name"]["as"] for rule in adapter["rules"]["custom"]} == set(by_hpa)


def test_the_dashboard_and_the_alerts_are_those_of_the_files() -> None:
    objects = rendered("monitoring")
    dashboard = of_kind(objects, "ConfigMap")["data"]["conch.json"]
    assert dashboard == (CHART / "files/grafana/conch.json").read_text()
    alerts = yaml.safe_load((CHART / "files/prometheus/alerts.yml").read_text())
    assert of_kind(objects, "PrometheusRule")["spec"] == alerts


REFUSED: dict[str, tuple[Object, str]] = {
    "no models": ({}, "set one of modelRepository.pvc.claimName"),
    "two sources of models": (
        {"modelRepository": {"pvc": {"claimName": "m"}, "objectStore": {"urls": ["s3://b"]}}},
        "modelRepository.pvc.claimName and modelRepository.objectStore.urls are both set",
    ),
    "two autoscalers": (
        LOCAL | {"autoscaling": KEDA | {"hpa": {"enabled": True}}},
        "autoscaling.hpa.enabled and autoscaling.keda.enabled are both true",
    ),
    "no Prometheus": (
        LOCAL | {"autoscaling": {"keda": {"enabled": True}}},
        "autoscaling.keda.prometheusAddress is empty",
    ),
    "fewer than the fewest": (
        LOCAL | {"autoscaling": {"minReplicas": 20}},
        r"autoscaling.minReplicas (20) is more than autoscaling.maxReplicas (10)",
    ),
    "client certificates without TLS": (
        LOCAL | {"tls": {"requireClientCertificates": True}},
        "tls.requireClientCertificates needs tls.secretName",
    ),
    "a headless load balancer": (
        LOCAL | {"service": {"headless": True, "type": "LoadBalancer"}},
        "service.headless needs service.type ClusterIP, not LoadBalancer",
    ),
    "a flag of the chart's own": (
        LOCAL | {"settings": {"grpc-port": 9000}},
        "settings.grpc-port: the chart sets",
    ),
    "a flag with dashes": (LOCAL | {"settings": {"--log-verbose": 1}}, "--log-verbose"),
    "no scaling to nothing": (LOCAL | {"autoscaling": {"minReplicas": 0}}, "autoscaling.minReplicas"),
    "too many front processes": (LOCAL | {"grpc": {"frontEnds": 65}}, "grpc.frontEnds"),
    "half a pod": (LOCAL | {"replicas": 1.5}, "replicas"),
    "a repository that is none": (
        {"modelRepository": {"objectStore": {"urls": ["http://b"]}}},
        "modelRepository.objectStore.urls.0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_can_not_be(case: str) -> None:
    values, text = REFUSED[case]
    with pytest.raises(ChartError, match=re.escape(text)):
        render(values)


def leaves(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values that are no maps, or empty ones, by their path."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def replaced(values: Object, path: tuple[str, ...], value: Any) -> Object:
    """Values with another one at a path."""
    changed = copy.deepcopy(values)
    at = changed
    for key in path[:-1]:
        at = at.setdefault(key, {})
    at[path[-1]] = value
    return changed


LEAVES = dict(leaves(DEFAULTS))
FREE = ("podSecurityContext", "affinity")
"""Maps that Kubernetes checks."""
CONTEXTS: tuple[Object, ...] = (
    {
        "modelRepository": {"pvc": {"claimName": "m"}},
        "gpu": {"count": 1},
        "autoscaling": KEDA,
        "networkPolicy": {"enabled": True},
        "podMonitor": {"enabled": True, "authorization": {"secretName": "s"}},
        "prometheusRule": {"enabled": True},
        "dashboard": {"enabled": True},
        "tls": {"secretName": "t"},
        "accessPolicy": {"secretName": "a"},
    },
    {
        "modelRepository": {"initContainer": {"image": "i"}},
        "serviceAccount": {"create": False},
        "autoscaling": {"keda": {"prometheusAddress": "http://prometheus"}},
    },
    {"modelRepository": {"objectStore": {"urls": ["s3://b"]}}, "podDisruptionBudget": {"enabled": False}},
    {},
)
"""Values with which others have an effect."""
OTHERS: Object = {
    "image.pullPolicy": "Always",
    "service.type": "NodePort",
    "modelRepository.objectStore.urls": ["s3://other"],
    "tmp.sizeLimit": "1Gi",
    "cache.sizeLimit": "1Gi",
    "grpc.frontEnds": 2,
    "gpu.resourceName": "nvidia.com/mig-1g.5gb",
    "autoscaling.keda.prometheusAddress": "http://other",
    "autoscaling.saturation": 0.5,
    "resources.requests.cpu": "2",
    "resources.requests.memory": "4Gi",
    "settings": {"log-verbose": 1},
    "affinity": {"nodeAffinity": {}},
    "autoscaling.behavior.scaleUp.policies": [],
    "autoscaling.behavior.scaleDown.policies": [],
    "modelRepository.initContainer.resources": {"requests": {"cpu": 2}},
}


def other(path: tuple[str, ...], value: Any) -> Any:
    """Another value of the same kind."""
    name = ".".join(path)
    if name in OTHERS:
        return OTHERS[name]
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return "other"
        case list():
            texts = path[-1] in ("command", "args")
            return [*value, "more" if texts else {"name": "more"}]
    return {"more": "yes"}


in_context = functools.cache(lambda number: render_text(CONTEXTS[number]))


def has_effect(number: int, path: tuple[str, ...], value: Any) -> bool:
    """True if another value at a path changes the manifests; some values contradict those of a context."""
    try:
        return in_context(number) != render_text(replaced(CONTEXTS[number], path, value))
    except ChartError as error:
        assert "schema" not in str(error), error
        return False


@pytest.mark.parametrize("path", LEAVES, ids=".".join)
def test_each_value_has_an_effect_and_its_type_is_checked(path: tuple[str, ...]) -> None:
    changed = other(path, LEAVES[path])
    assert any(has_effect(number, path, changed) for number in range(len(CONTEXTS))), changed
    if path[0] not in FREE:
        wrong: Any = ["wrong"] if isinstance(LEAVES[path], dict) else {"wrong": True}
        with pytest.raises(ChartError, match=r"schema[^-]*\n- " + re.escape(".".join(path))):
            render(replaced(LOCAL, path, wrong))


MAPS = [(), *sorted({path[:end] for path in LEAVES for end in range(1, len(path)) if path[0] not in FREE})]
OPEN = ("requests", "labels", "matchLabels")
"""Maps whose keys are the user's."""


@pytest.mark.parametrize("path", [each for each in MAPS if not each or each[-1] not in OPEN], ids=".".join)
def test_an_unknown_key_is_refused(path: tuple[str, ...]) -> None:
    with pytest.raises(ChartError, match="Additional property unheard is not allowed"):
        render(replaced(LOCAL, (*path, "unheard"), 1))


def test_the_readme_has_each_value_with_its_default() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \| .+ \|$", (CHART / "README.md").read_text(), re.MULTILINE)
    documented = [(key, "" if default == "" else json.loads(default.strip("`"))) for key, default in rows]
    described = {key for key, _ in documented}
    assert len(described) == len(documented)
    for key, default in documented:
        value: Any = DEFAULTS
        for part in key.split("."):
            value = value[part]
        assert value == default, key
    missing = {
        ".".join(path)
        for path in LEAVES
        if not described & {".".join(path[:n]) for n in range(1, len(path) + 1)}
    }
    assert not missing


@pytest.mark.parametrize("page", ["docs/kubernetes.md", "deploy/helm/conch/README.md"])
def test_commands_of_the_documentation_render(page: str, tmp_path: Path) -> None:
    text = (ROOT / page).read_text()
    for name, content in re.findall(r"^```yaml\n# (\S+\.yaml)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(content)
    commands = re.findall(r"^helm install (?:[^\\\n]|\\\n)*", text, re.MULTILINE)
    assert commands
    for command in commands:
        _, _, *arguments = shlex.split(command.replace("\\\n", " "))
        assert "deploy/helm/conch" in arguments
        helm_template([str(CHART) if each == "deploy/helm/conch" else each for each in arguments], tmp_path)


def test_notes_say_what_an_autoscaler_needs() -> None:
    notes = render_text(VARIANTS["hpa"], "--notes")
    assert f"conch serves at {FULL_NAME}.prod: gRPC on port 8001, REST on port 8000." in notes
    assert "files/prometheus/adapter.yml" in notes
    assert "podMonitor.enabled is false" in notes
    assert "adapter" not in render_text(LOCAL, "--notes")


def test_flags_that_the_chart_keeps_to_itself_exist() -> None:
    helpers = (CHART / "templates/_helpers.tpl").read_text()
    (names,) = re.findall(r'\$own := splitList " " "(.*?)"', helpers)
    assert set(names.split()) <= {each.flag.removeprefix("--") for each in SETTINGS}


class Kubelet:
    """Does what a node does with the probes of a container; without certificates of its own."""

    def __init__(self, container: Object, server: ServerProcess) -> None:
        self._container = container
        self._server = server
        self._context = ssl.create_default_context()
        self._context.check_hostname = False
        self._context.verify_mode = ssl.CERT_NONE

    def asks(self, name: str) -> bool:
        """True if a probe succeeds now."""
        probe = self._container[f"{name}Probe"]
        if "httpGet" in probe:
            get = probe["httpGet"]
            url = self._server.metrics_url.removesuffix("/metrics")
            if get["port"] == "http":
                url = f"{get['scheme'].lower()}://{self._server.http_address}"
            try:
                with urllib.request.urlopen(
                    url + get["path"], timeout=probe["timeoutSeconds"], context=self._context
                ) as reply:
                    return bool(200 <= reply.status < 400)
            except urllib.error.URLError:
                return False
        with closing(Client(self._server.address)) as client:
            return bool(client.health() == SERVING)


PROBED = ("least", "tls", "grpc only", "mutual tls with access policy", "grpc only with tls", "access policy")


@pytest.mark.parametrize("variant", PROBED)
def test_the_server_answers_its_probes(variant: str, repository: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    key, certificate = authority.issue("tls")
    policy = tmp_path / "policy.toml"
    policy.write_text(f'[[principal]]\nname = "a"\nkey_sha256 = "{"0" * 64}"\ninfer = ["*"]\n')
    files = {"tls/tls.key": key, "tls/tls.crt": certificate, "tls/ca.crt": authority.root}
    files["access/policy.toml"] = policy
    container = server_container(render(VARIANTS[variant] | {"drain": {"delaySeconds": 3600}}))
    flags = [each.replace("=/models", f"={repository}") for each in container["args"]]
    for name, path in files.items():
        flags = [each.replace(f"/etc/conch/{name}", str(path)) for each in flags]
    with started(*flags, "--grpc-port=0") as server:
        server.wait_ready()
        kubelet = Kubelet(container, server)
        assert [kubelet.asks(each) for each in ("startup", "readiness", "liveness")] == [True] * 3
        server.signal(signal.SIGTERM)
        eventually(lambda: not kubelet.asks("readiness"), "the server is not ready while it drains")
        assert kubelet.asks("liveness")
        server.signal(signal.SIGTERM)
        assert server.wait() == 143
        assert not kubelet.asks("liveness")
