"""Requests, models and readers of manifests for the suites of hosting platforms."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import kubernetes_validate
import numpy as np
import yaml
from tests.support.metrics import get
from tests.support.servers import ROOT, write_model
from tests.support.waiting import PATIENCE_S

DEPLOY = ROOT / "deploy"
_KUBERNETES = "1.30"
_NUMBERS = np.arange(16, dtype=np.int32)

NO_PORTS = {"CONCH_HTTP_PORT": None, "CONCH_METRICS_PORT": None}
"""For the environment of a container, which opens each port that is given."""

SIMPLE_JSON = json.dumps(
    {
        "inputs": [
            {"name": name, "shape": [1, 16], "datatype": "INT32", "data": _NUMBERS.tolist()}
            for name in ("INPUT0", "INPUT1")
        ]
    }
).encode()
"""A request for the example model `simple` in JSON."""


def simple_binary() -> tuple[int, bytes]:
    """Length of the JSON, and a request for `simple` with binary tensors both ways."""
    head = json.dumps(
        {
            "inputs": [
                {"name": name, "shape": [1, 16], "datatype": "INT32", "parameters": {"binary_data_size": 64}}
                for name in ("INPUT0", "INPUT1")
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    return len(head), head + _NUMBERS.tobytes() * 2


def check_json(body: bytes) -> None:
    """Checks an answer to `SIMPLE_JSON`."""
    outputs = {each["name"]: each["data"] for each in json.loads(body)["outputs"]}
    assert outputs == {"OUTPUT0": (2 * _NUMBERS).tolist(), "OUTPUT1": [0] * 16}


def check_binary(content_type: str, prefix: str, body: bytes) -> None:
    """Checks an answer to `simple_binary`, whose Content-Type has the length of its JSON."""
    assert content_type.startswith(prefix)
    head = int(content_type.removeprefix(prefix))
    assert [each["name"] for each in json.loads(body[:head])["outputs"]] == ["OUTPUT0", "OUTPUT1"]
    assert struct.unpack("<32i", body[head:]) == (*(2 * _NUMBERS).tolist(), *[0] * 16)


def post(url: str, body: bytes = b"", **headers: str) -> tuple[int, Mapping[str, str], bytes]:
    """Status, headers and body of an answer to a POST."""
    return get(url, "POST", body, **headers)


def accepts_connections(port: int) -> bool:
    """KServe's default probe: whether a port can be connected to."""
    try:
        with closing(socket.create_connection(("127.0.0.1", port), PATIENCE_S)):
            return True
    except OSError:
        return False


def manifests(name: str) -> Iterator[dict[str, Any]]:
    """The documents of a YAML file in deploy/."""
    found = [each for each in yaml.safe_load_all((DEPLOY / name).read_text()) if each]
    assert found
    yield from found


def check_containers(containers: list[dict[str, Any]]) -> None:
    """Checks containers by the schema of Kubernetes, as those of a pod."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": {"containers": containers}}
    kubernetes_validate.validate(pod, _KUBERNETES, strict=True)


MEMORY_MODEL = """
import json
import os
from pathlib import Path

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    '''Takes one of the places in a directory, as a model takes memory of a GPU.'''

    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self._place = Path(parameters["places"]["string_value"]) / str(os.getpid())
        if len(list(self._place.parent.iterdir())) >= int(parameters["most"]["string_value"]):
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self._place.touch()

    def execute(self, requests):
        return [self._answer(each.inputs()[0].as_numpy()) for each in requests]

    def _answer(self, array):
        if array[0] >= 0:
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)])
        return pb_utils.InferenceResponse(error=pb_utils.TritonError("MemoryError: no room for a batch"))

    def finalize(self):
        self._place.unlink()
"""
MEMORY_CONFIG = """
    backend: "python"
    input {{ name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }}
    output {{ name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }}
    instance_group {{ count: 1 kind: KIND_CPU }}
    parameters {{ key: "places" value {{ string_value: "{places}" }} }}
    parameters {{ key: "most" value {{ string_value: "{most}" }} }}
"""


def write_memory_model(repository: Path, name: str, places: Path, most: int) -> Path:
    """Writes a model that takes one of so many places in a directory."""
    config = MEMORY_CONFIG.format(places=places, most=most)
    return write_model(repository, name, config, {"model.py": MEMORY_MODEL})


def memory_request(value: int = 1) -> bytes:
    """A request for it; a negative value has it run out of memory."""
    tensor = {"name": "IN", "shape": [1], "datatype": "INT32", "data": [value]}
    return json.dumps({"inputs": [tensor]}).encode()
