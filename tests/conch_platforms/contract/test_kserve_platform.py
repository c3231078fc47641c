"""KServe's calls: manifests by its rules, late and single models, probes, its agent, graphs and canaries."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.metrics import get, samples
from tests.support.platforms import (
    DEPLOY,
    SIMPLE_JSON,
    accepts_connections,
    check_containers,
    check_json,
    manifests,
    post,
)
from tests.support.servers import (
    EXAMPLES,
    IN_PROCESS,
    ServerProcess,
    check_simple,
    client_of,
    copy_example,
    eventually,
    free_port,
    serving,
    simple_inputs,
    started,
    write_probe,
)

_PROTOCOLS = {"v1", "v2", "grpc-v1", "grpc-v2"}
_TEMPLATE = re.compile(r"{{\s*\.(\w+(?:\.\w+)*)\s*}}")


def rendered(argument: str, values: Mapping[str, str]) -> str:
    """An argument of a runtime as KServe's controller fills it in; KeyError: it has no such value."""
    return _TEMPLATE.sub(lambda found: values[found[1]], argument)


def runtime(file: str = "kserve/serving-runtime.yaml") -> dict[str, Any]:
    """The ClusterServingRuntime of a file."""
    (found,) = (each for each in manifests(file) if each["kind"] == "ClusterServingRuntime")
    return found


def arguments(service: str, replaced: Mapping[str, str]) -> list[str]:
    """The arguments of the runtime for a service, with paths and ports replaced, without the command."""
    (container,) = runtime()["spec"]["containers"]
    command, *given = (rendered(each, {"Name": service}) for each in container["args"])
    assert command == "tritonserver"
    for old, new in replaced.items():
        assert any(old in each for each in given), old
        given = [each.replace(old, new) for each in given]
    return given


@pytest.mark.parametrize("file", ["kserve/serving-runtime.yaml", "kserve/trained-model.yaml"])
def test_runtimes_keep_kserves_rules(file: str) -> None:
    spec = runtime(file)["spec"]
    (container,) = spec["containers"]
    assert container["name"] == "kserve-container"
    assert set(spec["protocolVersions"]) == {"v2", "grpc-v2"} <= _PROTOCOLS
    assert all(each["name"] for each in spec["supportedModelFormats"])
    first = container["ports"][0]
    assert first["containerPort"] == 8080, "the service takes the first port"
    assert "grpc" not in first["name"] and "h2c" not in first["name"], "or the service speaks HTTP/2"
    for port in container["ports"]:
        assert re.fullmatch(r"[a-z0-9-]{1,15}", port["name"])
    annotations = spec.get("annotations", {})
    assert annotations.get("prometheus.kserve.io/port", "8002") == "8002"
    assert container["readinessProbe"]["httpGet"] == {"path": "/v2/health/ready", "port": 8080}
    assert container["livenessProbe"]["httpGet"] == {"path": "/v2/health/live", "port": 8080}
    assert container["securityContext"]["runAsNonRoot"] is True
    check_containers(spec["containers"])


def test_services_name_what_there_is() -> None:
    runtimes = {runtime()["metadata"]["name"], runtime("kserve/trained-model.yaml")["metadata"]["name"]}
    services = []
    for path in sorted((DEPLOY / "kserve").glob("*.yaml")):
        for each in manifests(f"kserve/{path.name}"):
            assert each["apiVersion"] in ("serving.kserve.io/v1alpha1", "serving.kserve.io/v1beta1")
            if each["kind"] == "InferenceService":
                services.append(each)
    for service in services:
        model = service["spec"]["predictor"]["model"]
        assert model["runtime"] in runtimes and model["protocolVersion"] in _PROTOCOLS
        for port in model.get("ports", ()):
            assert (port["name"], model["protocolVersion"]) == ("h2c", "grpc-v2")
    (graph,) = manifests("kserve/inference-graph.yaml")
    nodes = graph["spec"]["nodes"]
    assert "root" in nodes
    for node in nodes.values():
        if node["routerType"] == "Splitter":
            assert sum(step["weight"] for step in node["steps"]) == 100
        assert all(("nodeName" in step) != ("serviceName" in step) for step in node["steps"])
        assert {step["nodeName"] for step in node["steps"] if "nodeName" in step} <= nodes.keys()


@contextmanager
def kserve(
    models: Path, service: str = "digits", environment: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """The runtime's container for a service; its environment has nothing else that tells of KServe."""
    ports = {f"-port={port}": f"-port={free_port()}" for port in (8080, 9000, 8002)}
    given = arguments(service, {**ports, "/mnt/models": str(models)})
    with started(*given, environment={"MODEL_INIT_MODE": "sync", **(environment or {})}) as server:
        yield server


def read_only(directory: Path) -> None:
    """Takes the right to write from all of a directory, as KServe's mounts have none."""
    for path in (directory, *directory.rglob("*")):
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))


@pytest.mark.process
def test_a_modelcar_links_its_model_late(tmp_path: Path) -> None:
    """A link that leads nowhere at the start; no probe succeeds before the model is there."""
    files, mount = tmp_path / "files", tmp_path / "mnt" / "models"
    copy_example(files, "simple")
    read_only(files)
    mount.parent.mkdir()
    mount.symlink_to(tmp_path / "proc" / "7" / "root" / "models")
    with kserve(mount, environment={"MODEL_INIT_MODE": "async"}) as server:
        eventually(lambda: "which is not there yet" in server.errors, "it waits")
        port = int(re.findall(r"http-port=(\d+)", " ".join(map(str, server.process.args)))[0])  # type: ignore[arg-type]
        assert not accepts_connections(port), "KServe's default probe is a connection"
        (tmp_path / "proc" / "7" / "root").mkdir(parents=True)
        (tmp_path / "proc" / "7" / "root" / "models").symlink_to(files)
        server.wait_ready()
        assert accepts_connections(port)
        assert get(f"http://127.0.0.1:{port}/v2/health/ready")[0] == 200
        check_json(post(f"http://127.0.0.1:{port}/v2/models/simple/infer", SIMPLE_JSON)[2])
        with client_of(server) as client:
            check_simple(client.infer("simple", simple_inputs()))
        found = samples(get(server.metrics_url)[2].decode())
        labels = frozenset({("model", "simple"), ("version", "1")})
        assert found["nv_inference_request_success", labels] == 2
        assert server.stop() == 0


@pytest.mark.process
def test_a_stop_ends_the_wait(tmp_path: Path) -> None:
    with kserve(tmp_path / "never", environment={"MODEL_INIT_MODE": "async"}) as server:
        eventually(lambda: "which is not there yet" in server.errors, "it waits")
        server.stop()
        assert "Traceback" not in server.errors


def _repository(mount: Path) -> str:
    copy_example(mount, "simple")
    return "simple"


def _model(mount: Path) -> str:
    shutil.copytree(EXAMPLES / "simple", mount)
    return "isvc"


def _versions_only(mount: Path) -> str:
    shutil.copytree(EXAMPLES / "simple" / "1", mount / "1")
    return "isvc"


def _file(mount: Path) -> str:
    mount.mkdir(parents=True)
    shutil.copy(EXAMPLES / "simple" / "1" / "model.onnx", mount / "resnet-50.onnx")
    return "isvc"


def _file_with_config(mount: Path) -> str:
    shutil.copytree(EXAMPLES / "simple" / "1", mount)
    shutil.copy(EXAMPLES / "simple" / "config.pbtxt", mount)
    return "isvc"


@pytest.mark.parametrize("layout", [_repository, _model, _versions_only, _file, _file_with_config])
def test_what_a_storage_uri_may_hold(layout: Callable[[Path], str], tmp_path: Path) -> None:
    mount = tmp_path / "models"
    name = layout(mount)
    read_only(mount)
    before = sorted(os.listdir(mount))
    with serving(mount, flags=["--model-name=isvc"]) as server:
        status, _, body = post(f"http://{server.http_address}/v2/models/{name}/infer", SIMPLE_JSON)
        assert status == 200, body
        check_json(body)
        assert json.loads(body)["model_name"] == name
    assert sorted(os.listdir(mount)) == before


_FEATURES = 4
_TREES = {
    "xgboost": ("fraud.bst", "model.json", "model.ubj"),
    "lightgbm": ("fraud.bst", "model.bst"),
}
"""Files of formats that KServe may choose conch for, as its own runtimes take them."""


def _save_booster(kind: str, path: Path) -> None:
    rows = np.random.default_rng(1).normal(size=(64, _FEATURES))
    library = pytest.importorskip(kind)
    if kind == "xgboost":
        booster = library.train({"nthread": 1}, library.DMatrix(rows, rows.sum(1)), 3)
        named = path if path.suffix == ".json" else path.with_suffix(".ubj")
        booster.save_model(named)  # of the suffix .bst, which it writes as UBJSON too, it warns
        named.rename(path)
    else:
        booster = library.train({"num_threads": 1, "verbose": -1}, library.Dataset(rows, rows.sum(1)), 3)
        booster.save_model(path)


@pytest.mark.parametrize(("kind", "file"), [(kind, file) for kind in _TREES for file in _TREES[kind]])
def test_tree_models_as_kserve_lays_them_out(kind: str, file: str, tmp_path: Path) -> None:
    mount = tmp_path / "models"
    mount.mkdir()
    _save_booster(kind, mount / file)
    datatype = {"xgboost": "FP32", "lightgbm": "FP64"}[kind]
    row = {"name": "input", "shape": [1, _FEATURES], "datatype": datatype, "data": [0.5] * _FEATURES}
    with serving(mount, flags=["--model-name=isvc"]) as server:
        url = f"http://{server.http_address}/v2/models/isvc"
        status, _, body = post(f"{url}/infer", json.dumps({"inputs": [row]}).encode())
        assert status == 200, body
        assert json.loads(get(url)[2])["platform"] == kind
        assert json.loads(body)["outputs"][0]["name"] == "predict"


def test_kserve_chooses_conch_only_for_files_that_it_serves() -> None:
    formats = [each["name"] for each in runtime()["spec"]["supportedModelFormats"] if each.get("autoSelect")]
    assert set(formats) == {"triton", "onnx", *_TREES}


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ([], "is empty: make it a repository"),
        (["a.onnx", "b.onnx"], "has several files that could be the model, 'a.onnx', 'b.onnx': name one"),
        (["model.joblib"], "has no model file of a known name, only 'model.joblib': make it a repository"),
    ],
)
def test_what_can_not_be_told(files: list[str], text: str, tmp_path: Path) -> None:
    mount = tmp_path / "models"
    mount.mkdir()
    for name in files:
        (mount / name).touch()
    with pytest.raises(Exception, match=re.escape(text)), serving(mount, flags=["--model-name=isvc"]):
        pass


def test_kserves_agent(tmp_path: Path) -> None:
    """The agent of TrainedModels: only 200 counts, and it deletes the files before the unload."""
    with serving(tmp_path, flags=["--model-control-mode=explicit", IN_PROCESS]) as server:
        base = f"http://{server.http_address}/v2/repository/models"
        assert post(f"{base}/digits/load", b"{}")[0] != 200, "its files are not there yet"
        directory = copy_example(tmp_path, "simple", "digits")
        assert post(f"{base}/digits/load", b"{}", Content_Type="application/json")[0] == 200
        check_json(post(f"http://{server.http_address}/v2/models/digits/infer", SIMPLE_JSON)[2])
        shutil.rmtree(directory)
        assert post(f"{base}/digits/unload", b"{}")[0] == 200
        assert post(f"{base}/digits/unload", b"{}")[0] == 200, "again"
        assert post(f"http://{server.http_address}/v2/models/digits/infer", SIMPLE_JSON)[0] == 404


def call_service(url: str, body: bytes) -> tuple[bool, bytes]:
    """A step of KServe's router: JSON in and out, and a status that is not 2xx ends a hard dependency."""
    status, headers, answer = post(url, body, Content_Type="application/json")
    if not 200 <= status < 300:
        assert "error" in json.loads(answer)
        return False, answer
    assert headers["content-type"] == "application/json"
    return True, answer


def test_the_router_of_a_graph(tmp_path: Path) -> None:
    copy_example(tmp_path, "simple")
    write_probe(tmp_path, "check")
    check = {"inputs": [{"name": "IN", "shape": [1, 4], "datatype": "FP32", "data": [1, 1, 1, 1]}]}
    with serving(tmp_path) as server:
        base = f"http://{server.http_address}/v2/models"

        def sequence(first: bytes) -> tuple[list[str], bytes]:
            """The graph of the example: a hard dependency, then a model with the original request."""
            done = []
            passed, answer = call_service(f"{base}/check/infer", first)
            if passed:
                done.append("check")
                passed, answer = call_service(f"{base}/simple/infer", SIMPLE_JSON)
                if passed:
                    done.append("model")
            return done, answer

        done, answer = sequence(json.dumps(check).encode())
        assert done == ["check", "model"]
        check_json(answer)
        for wrong in (b"{", b"{}", b'{"inputs": []}', json.dumps({"inputs": [{"name": "X"}]}).encode()):
            assert sequence(wrong)[0] == [], "the sequence ends"


def test_a_canary_shows_by_its_version(tmp_path: Path) -> None:
    """Two revisions are two processes; what tells them apart in the metrics is the label `version`."""
    for number in (1, 2):
        write_probe(tmp_path / str(number), "net", versions=(number,))
    seen = []
    body = json.dumps(
        {"inputs": [{"name": "IN", "shape": [1, 4], "datatype": "FP32", "data": [1, 1, 1, 1]}]}
    ).encode()
    for version in ("1", "2"):
        with serving(tmp_path / version) as server:
            assert (
                json.loads(post(f"http://{server.http_address}/v2/models/net/infer", body)[2])[
                    "model_version"
                ]
                == version
            )
            found = samples(get(server.metrics_url)[2].decode())
            seen += [
                dict(labels)["version"]
                for (name, labels), value in found.items()
                if name == "nv_inference_request_success" and value
            ]
    assert seen == ["1", "2"]
