"""The Helm chart of deploy/, rendered by the program in tests/support/helm, and its tests' tools."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "conch"
NAMESPACE = "prod"
RELEASE = "r"
FULL_NAME = "r-conch"
"""Name of the chart's objects in this release."""

Object = dict[str, Any]
"""An object of Kubernetes."""

_TOOLS = Path(os.environ.get("CONCH_DEPLOY_TOOLS", Path.home() / ".cache" / "conch-tests" / "deploy"))
_SOURCES = Path(__file__).with_name("helm")
_LIBRARIES = Path("/usr/share/gocode")
_HINT = "run tests/setup_deploy.sh"

LOCAL: dict[str, Any] = {"modelRepository": {"pvc": {"claimName": "models"}}}
"""The values that an installation has at least."""
KEDA: dict[str, Any] = {"keda": {"enabled": True, "prometheusAddress": "http://prometheus:9090"}}
VARIANTS: dict[str, dict[str, Any]] = {
    "least": LOCAL,
    "gpu": LOCAL
    | {
        "gpu": {"count": 2, "runtimeClassName": "nvidia", "nodeSelector": {"nvidia.com/gpu.product": "H100"}},
        "resources": {"limits": {"memory": "64Gi"}},
        "nodeSelector": {"pool": "a"},
        "tolerations": [{"key": "pool", "operator": "Exists"}],
        "updateStrategy": {"maxSurge": 0, "maxUnavailable": "50%"},
    },
    "pvc": {
        "modelRepository": {"pvc": {"claimName": "models", "subPath": "prod"}},
        "fullnameOverride": "own",
    },
    "object store": {
        "modelRepository": {
            "objectStore": {"urls": ["s3://bucket/models", "gs://b"], "secretName": "credentials"}
        },
        "settings": {
            "model-control-mode": "poll",
            "repository-poll-secs": 60,
            "model-cache-byte-size": 20_000_000_000,
            "min-supported-compute-capability": 7.5,
            "strict-readiness": False,
            "backend-config": ["python,shm-default-byte-size=1", "onnxruntime,x=1"],
        },
        "cache": {"sizeLimit": "50Gi"},
        "serviceAccount": {"name": "reader", "annotations": {"eks.amazonaws.com/role-arn": "arn"}},
    },
    "init container": {
        "modelRepository": {
            "initContainer": {
                "image": "amazon/aws-cli:2",
                "args": ["s3", "cp", "--recursive", "s3://b", "/models"],
                "env": [{"name": "AWS_REGION", "value": "eu-west-1"}],
                "envFrom": [{"secretRef": {"name": "credentials"}}],
                "resources": {"requests": {"cpu": 1}},
            }
        },
        "serviceAccount": {"create": False},
        "podDisruptionBudget": {"enabled": False},
    },
    "hpa": LOCAL | {"autoscaling": {"hpa": {"enabled": True}}},
    "keda": LOCAL | {"autoscaling": KEDA | {"queueSeconds": 0.25}},
    "tls": LOCAL | {"tls": {"secretName": "certificate"}},
    "mutual tls": LOCAL | {"tls": {"secretName": "certificate", "requireClientCertificates": True}},
    "access policy": LOCAL
    | {
        "accessPolicy": {"secretName": "policy"},
        "podMonitor": {"enabled": True, "authorization": {"secretName": "scraper", "key": "key"}},
    },
    "mutual tls with access policy": LOCAL
    | {
        "tls": {"secretName": "certificate", "requireClientCertificates": True},
        "accessPolicy": {"secretName": "policy"},
    },
    "network policy": LOCAL | {"networkPolicy": {"enabled": True}},
    "grpc only": LOCAL | {"http": {"enabled": False}, "networkPolicy": {"enabled": True}},
    "grpc only with tls": LOCAL | {"http": {"enabled": False}, "tls": {"secretName": "certificate"}},
    "monitoring": LOCAL
    | {
        "podMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboard": {"enabled": True},
    },
    "headless": LOCAL
    | {"service": {"headless": True, "grpcPort": 80}, "volumes": [{"name": "v", "emptyDir": {}}]},
}


class ChartError(Exception):
    """Error of Helm about values that the chart refuses."""


@functools.cache
def _renderer() -> Path:
    """The program, built when its sources have changed."""
    if not shutil.which("go") or not _LIBRARIES.is_dir():
        pytest.skip(f"Go and the libraries that Helm uses are not installed; {_HINT}")
    sources = b"".join(path.read_bytes() for path in sorted(_SOURCES.glob("*.go")))
    program = _TOOLS / f"render-{hashlib.sha256(sources).hexdigest()[:16]}"
    if not program.exists():
        built = program.with_suffix(f".{os.getpid()}")
        variables = {"GO111MODULE": "off", "GOPATH": str(_LIBRARIES), "GOFLAGS": ""}
        subprocess.run(
            ["go", "build", "-o", built, "."], cwd=_SOURCES, env=os.environ | variables, check=True
        )
        built.replace(program)
    return program


def helm_template(arguments: Sequence[str], directory: Path) -> str:
    """Output of `helm template` for a command line, run in a directory."""
    ended = subprocess.run(
        [_renderer(), *arguments], cwd=directory, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise ChartError(ended.stderr)
    return ended.stdout


def render(values: Mapping[str, Any], *flags: str) -> list[Object]:
    """The objects that the chart makes of values."""
    return list(yaml.safe_load_all(render_text(values, *flags)))


def render_text(values: Mapping[str, Any], *flags: str) -> str:
    """The manifests of values, or with --notes what Helm prints after an installation."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(values, file)
        file.flush()
        arguments = [*flags, "--namespace", NAMESPACE, "--values", file.name, RELEASE, str(CHART)]
        return helm_template(arguments, CHART)


def of_kind(objects: Sequence[Object], kind: str) -> Object:
    """The one object of a kind."""
    (found,) = [each for each in objects if each["kind"] == kind]
    return found


def server_container(objects: Sequence[Object]) -> Object:
    """The container that the server runs in."""
    (found,) = of_kind(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def promtool() -> Path:
    """Prometheus' tool, which evaluates queries over series of a file."""
    found = _TOOLS / "promtool" if (_TOOLS / "promtool").exists() else shutil.which("promtool")
    if found is None:
        pytest.skip(f"promtool is not installed; {_HINT}")
    return Path(found)
