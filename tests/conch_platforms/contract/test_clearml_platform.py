"""ClearML Serving's calls: a repository that its helper writes while conch polls, and typed gRPC requests."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import grpc
import numpy as np
import pytest
from tests.support.metrics import get
from tests.support.platforms import manifests
from tests.support.servers import EXAMPLES, START_S, WAIT_S, eventually, serving_process
from tritonclient.grpc import service_pb2, service_pb2_grpc

# As the helper writes configs: from HOCON, with lists in brackets and a colon behind each name.
CONFIG = """

input: [
  {
    dims: [16]
    data_type: TYPE_INT32
    name: "INPUT0"
  },
  {
    dims: [16]
    data_type: TYPE_INT32
    name: "INPUT1"
  }
]
output: [
  {
    dims: [16]
    data_type: TYPE_INT32
    name: "OUTPUT0"
  },
  {
    dims: [16]
    data_type: TYPE_INT32
    name: "OUTPUT1"
  }
]
platform: "onnxruntime_onnx"
max_batch_size: 4
"""
METRIC = re.compile(r"(\w+){(gpu_uuid=\"[\w\W]*\",)?model=\"(\w+)\",\s*version=\"(\d+)\"}\s*([0-9.]*)")
"""Pattern with which the helper reads a line of the metrics."""


def test_the_example_composition() -> None:
    (composition,) = manifests("clearml/docker-compose.yml")
    services = composition["services"]
    assert services["conch"]["command"][0] == "tritonserver"
    address = services["clearml-serving-inference"]["environment"]["CLEARML_DEFAULT_TRITON_GRPC_ADDR"]
    assert address == "conch:8001", "the engine's service and its gRPC port"


def write_endpoint(repository: Path, name: str) -> None:
    """Writes a model as the helper does: the config first, then the file, which is moved to its place."""
    version = repository / name / "1"
    version.mkdir(parents=True, exist_ok=True)
    (repository / name / "config.pbtxt").write_text(CONFIG)
    target, copy = version / "model.onnx", repository.parent / "download"
    shutil.copy(EXAMPLES / "simple" / "1" / "model.onnx", copy)
    old = version / ".old.model.onnx"
    if target.exists():
        target.replace(old)
    shutil.move(copy, target)
    old.unlink(missing_ok=True)


@pytest.mark.process
def test_the_helper_and_its_client(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    repository.mkdir()
    (composition,) = manifests("clearml/docker-compose.yml")
    _, *flags = composition["services"]["conch"]["command"]
    flags = [each for each in flags if "--model-repository" not in each and "port" not in each]
    flags = [each.replace("60.0", "0.2") for each in flags]
    with serving_process(repository, flags=[*flags, "--repository-settle-secs=0.2"]) as server:
        with grpc.insecure_channel(server.address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

            def infer() -> list[int]:
                """One request as the inference service sends it: typed contents, gzip, version 1."""
                request = service_pb2.ModelInferRequest(model_name="digits_1", model_version="1")
                for name in ("INPUT0", "INPUT1"):
                    tensor = request.InferInputTensor(name=name, datatype="INT32", shape=[1, 16])
                    tensor.contents.int_contents[:] = range(16)
                    request.inputs.append(tensor)
                request.outputs.append(request.InferRequestedOutputTensor(name="OUTPUT0"))
                response = stub.ModelInfer(request, compression=grpc.Compression.Gzip, timeout=WAIT_S)
                data = np.frombuffer(response.raw_output_contents[0], np.int32)
                return list(np.resize(data, list(response.outputs[0].shape))[0].tolist())

            def served() -> list[int] | None:
                try:
                    return infer()
                except grpc.RpcError:
                    return None

            write_endpoint(repository, "digits_1")
            assert eventually(served, "the endpoint is served", START_S) == [2 * each for each in range(16)]
            write_endpoint(repository, "digits_1")  # an update
            assert infer() == [2 * each for each in range(16)], "it serves meanwhile"
        lines = get(server.metrics_url)[2].decode().splitlines()
        found = [match.groups() for line in lines if (match := METRIC.match(line))]
        assert ("nv_inference_request_success", "digits_1", "1") in {
            (name, model, version) for name, _, model, version, _ in found
        }
