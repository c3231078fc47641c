"""Seldon Core's calls: v1's container with the operator's arguments, and v2's agent, which loads models."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.metrics import get
from tests.support.platforms import SIMPLE_JSON, check_json, manifests, post
from tests.support.servers import (
    EXAMPLES,
    WAIT_S,
    check_simple,
    client_of,
    copy_example,
    free_port,
    serving,
    serving_process,
    simple_inputs,
    simple_request,
    started,
)
from tritonclient.grpc import service_pb2, service_pb2_grpc


def test_the_example_manifests() -> None:
    (triton,) = manifests("seldon/seldon-deployment-v1.yaml")
    (custom,) = manifests("seldon/seldon-custom-v1.yaml")
    for deployment in (triton, custom):
        assert deployment["spec"]["protocol"] == "v2"
        (predictor,) = deployment["spec"]["predictors"]
        (component,) = predictor["componentSpecs"]
        (container,) = component["spec"]["containers"]
        assert container["name"] == predictor["graph"]["name"], "or Seldon adds a container"
    assert triton["spec"]["predictors"][0]["graph"]["implementation"] == "TRITON_SERVER"
    (server,) = manifests("seldon/server-v2.yaml")
    (container,) = server["spec"]["podSpec"]["containers"]
    assert container["name"] == server["spec"]["serverConfig"], "it replaces the container of that config"
    assert "--model-control-mode=explicit" in container["args"]
    assert "onnx" in server["spec"]["capabilities"]


@pytest.mark.process
def test_v1_as_tritons_prepackaged_server(tmp_path: Path) -> None:
    """The operator's arguments and probes, with one model instead of a repository."""
    shutil.copytree(EXAMPLES / "simple", tmp_path / "models")
    http, rpc = free_port(), free_port()
    environment = {
        "PREDICTIVE_UNIT_ID": "classifier",
        "PREDICTIVE_UNIT_HTTP_SERVICE_PORT": str(http),
        "PREDICTIVE_UNIT_GRPC_SERVICE_PORT": str(rpc),
        "SELDON_DEPLOYMENT_ID": "d",
    }
    flags = [
        f"--grpc-port={rpc}",
        f"--http-port={http}",
        f"--model-repository={tmp_path / 'models'}",
        "--strict-model-config=false",
    ]
    with started(*flags, environment=environment) as server:
        server.wait_ready()
        assert get(f"http://127.0.0.1:{http}/v2/health/ready")[0] == 200
        assert get(f"http://127.0.0.1:{http}/v2/health/live")[0] == 200
        check_json(post(f"http://127.0.0.1:{http}/v2/models/classifier/infer", SIMPLE_JSON)[2])
        with client_of(server) as client:
            check_simple(client.infer("classifier", simple_inputs()))
        assert server.stop() == 0


def test_v2s_agent(tmp_path: Path) -> None:
    """The agent writes a model's files, loads it by gRPC and lists; files may go before the unload."""
    flags = ["--model-control-mode=explicit"]
    with serving(tmp_path, flags=flags) as server, grpc.insecure_channel(server.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def call(name: str, request: Any) -> Any:
            return getattr(stub, name)(request, timeout=WAIT_S)

        assert call("ServerLive", service_pb2.ServerLiveRequest()).live
        load = service_pb2.RepositoryModelLoadRequest(model_name="simple_1")
        with pytest.raises(grpc.RpcError) as refused:
            call("RepositoryModelLoad", load)
        assert refused.value.code() is grpc.StatusCode.INTERNAL
        directory = copy_example(tmp_path, "simple", "simple_1")
        call("RepositoryModelLoad", load)
        call("RepositoryModelLoad", load)
        index = call("RepositoryIndex", service_pb2.RepositoryIndexRequest())
        assert [(each.name, each.state) for each in index.models] == [("simple_1", "READY")]
        assert call("ModelInfer", simple_request(model_name="simple_1")).model_name == "simple_1"
        shutil.rmtree(directory)
        unload = service_pb2.RepositoryModelUnloadRequest(model_name="simple_1")
        call("RepositoryModelUnload", unload)
        call("RepositoryModelUnload", unload)
        with pytest.raises(grpc.RpcError):
            call("ModelInfer", simple_request(model_name="simple_1"))


@pytest.mark.process
def test_v1_as_a_server_of_ones_own(tmp_path: Path) -> None:
    copy_example(tmp_path, "simple")
    environment = {
        "PREDICTIVE_UNIT_ID": "digits",
        "PREDICTIVE_UNIT_HTTP_SERVICE_PORT": "1",
        "PREDICTIVE_UNIT_PARAMETERS": '[{"name": "model_uri", "value": "/nowhere", "type": "STRING"}]',
    }
    with serving_process(tmp_path, environment=environment) as server:
        assert "this is Seldon Core, as PREDICTIVE_UNIT_HTTP_SERVICE_PORT tells" in server.errors
        assert "'digits' names none" in server.errors, "the repository's models keep their names"
        check_json(post(f"http://{server.http_address}/v2/models/simple/infer", SIMPLE_JSON)[2])
