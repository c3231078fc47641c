"""Everything but inference over REST, asked by Triton's client and by curl."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tests.support.names import new_name
from tests.support.servers import AnyServer, client_of, serving, serving_process, write_model, write_probe
from tritonclient.utils import InferenceServerException, shared_memory

NUMBER = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        value = pb_utils.Tensor("OUT", np.array([VALUE], np.int32))
        return [pb_utils.InferenceResponse([value]) for _ in requests]
"""
NUMBER_PBTXT = """
    backend: "python"
    input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] optional: true }
    output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""
NUMBER_CONFIG: dict[str, Any] = {
    "backend": "python",
    "input": [{"name": "IN", "data_type": "TYPE_INT32", "dims": [1], "optional": True}],
    "output": [{"name": "OUT", "data_type": "TYPE_INT32", "dims": [1]}],
}


@pytest.fixture(scope="module")
def explicit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnyServer]:
    """A server whose clients say what is loaded: it has a model `probe`, and there is `number` to load."""
    repository = tmp_path_factory.mktemp("models")
    write_probe(repository)
    write_model(repository, "number", NUMBER_PBTXT, {"model.py": NUMBER.replace("VALUE", "1")})
    flags = ["--model-control-mode=explicit", "--load-model=probe", "--allow-model-upload"]
    with serving(repository, flags=flags) as server:
        # gRPC and gevent keep some file descriptors and threads from their first call on.
        with client_of(server) as grpc, closing(triton.InferenceServerClient(server.http_address)) as client:
            assert grpc.is_server_ready()
            assert client.is_server_ready()
        yield server


@pytest.fixture
def client(explicit: AnyServer) -> Iterator[triton.InferenceServerClient]:
    with closing(triton.InferenceServerClient(explicit.http_address)) as client:
        yield client


def curl(server: AnyServer, path: str, *more: str) -> tuple[int, str]:
    """The status and the body that curl gets."""
    command = [
        "curl",
        "-sS",
        "-m",
        "20",
        "-w",
        "\n%{http_code}",
        *more,
        f"http://{server.http_address}{path}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    body, _, status = done.stdout.rpartition("\n")
    return int(status), body


def number(client: triton.InferenceServerClient) -> int:
    """Answer of the model `number` now."""
    return int(client.infer("number", []).as_numpy("OUT")[0])


def test_health(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("probe")
    assert client.is_model_ready("probe", "1")
    assert not client.is_model_ready("probe", "2")
    assert not client.is_model_ready("none")


def test_metadata_and_config_say_what_grpc_says(
    explicit: AnyServer, client: triton.InferenceServerClient
) -> None:
    with client_of(explicit) as grpc:
        server = grpc.get_server_metadata(as_json=True)
        assert client.get_server_metadata() == server
        metadata = grpc.get_model_metadata("probe", as_json=True)
        shapes = [tensor.pop("shape") for tensor in metadata["inputs"] + metadata["outputs"]]
        ours = client.get_model_metadata("probe")
        assert [tensor.pop("shape") for tensor in ours["inputs"] + ours["outputs"]] == [
            [int(dim) for dim in shape] for shape in shapes
        ]
        assert ours == metadata
        config = client.get_model_config("probe", "1")
        assert config["name"] == "probe"
        assert config["input"][0]["dims"] == [-1]
        assert config["input"][0]["data_type"] == "TYPE_FP32"
        assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 0
        assert config["instance_group"][0]["kind"] == "KIND_CPU"
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'none' is not found"):
        client.get_model_metadata("none")


def test_statistics(client: triton.InferenceServerClient) -> None:
    tensor = triton.InferInput("IN", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 4), np.float32))

    def count() -> int:
        (one,) = client.get_inference_statistics("probe", "1")["model_stats"]
        assert one["inference_stats"]["success"]["count"] == one["inference_count"]
        return int(one["inference_count"])

    before = count()
    client.infer("probe", [tensor])
    assert count() == before + 1
    names = [each["name"] for each in client.get_inference_statistics()["model_stats"]]
    assert "probe" in names
    with pytest.raises(InferenceServerException, match="requested model 'none' is not available"):
        client.get_inference_statistics("none")


def test_models_are_loaded_and_unloaded(client: triton.InferenceServerClient) -> None:
    def states() -> dict[str, Any]:
        return {each["name"]: each for each in client.get_model_repository_index()}

    assert states()["probe"] == {"name": "probe", "version": "1", "state": "READY"}
    client.load_model("number")
    assert number(client) == 1
    config = json.dumps(NUMBER_CONFIG)
    other = NUMBER.replace("VALUE", "7").encode()
    client.load_model("number", config=config, files={"file:1/model.py": other})
    assert number(client) == 7
    client.unload_model("number", unload_dependents=True)
    assert not client.is_model_ready("number")
    assert states()["number"]["state"] in ("UNAVAILABLE", "UNLOADING")
    with pytest.raises(InferenceServerException, match="failed to load 'none', failed to poll"):
        client.load_model("none")
    client.unload_model("none")


def test_a_control_mode_without_clients_refuses_loads(server: AnyServer) -> None:
    with closing(triton.InferenceServerClient(server.http_address)) as client:
        with pytest.raises(
            InferenceServerException, match="explicit model load / unload is not allowed"
        ) as caught:
            client.load_model("simple")
        assert caught.value.status() == "503"
        assert client.get_model_repository_index()


def test_system_regions(client: triton.InferenceServerClient, explicit: AnyServer) -> None:
    key = f"/{new_name()}"
    region = shared_memory.create_shared_memory_region("mine", key, 64)
    try:
        client.register_system_shared_memory("mine", key, 64)
        expected = {"name": "mine", "key": key, "offset": 0, "byte_size": 64}
        assert client.get_system_shared_memory_status() == [expected]
        assert client.get_system_shared_memory_status("mine") == [expected]
        with client_of(explicit) as grpc:  # one and the same for all front ends
            assert "mine" in grpc.get_system_shared_memory_status(as_json=True)["regions"]
        with pytest.raises(InferenceServerException, match="shared memory region 'mine' already in manager"):
            client.register_system_shared_memory("mine", key, 64)
        client.unregister_system_shared_memory("mine")
        client.unregister_system_shared_memory()
        assert client.get_system_shared_memory_status() == []
        with pytest.raises(
            InferenceServerException, match="Unable to find system shared memory region: 'mine'"
        ):
            client.get_system_shared_memory_status("mine")
    finally:
        shared_memory.destroy_shared_memory_region(region)


def test_cuda_regions(client: triton.InferenceServerClient) -> None:
    assert client.get_cuda_shared_memory_status() == []
    with pytest.raises(InferenceServerException, match="must be a valid base64 encoded cudaIpcMemHandle_t"):
        client.register_cuda_shared_memory("mine", base64.b64encode(b"short"), 0, 64)
    client.unregister_cuda_shared_memory()


@pytest.mark.process
def test_log_settings(tmp_path: Path) -> None:
    write_probe(tmp_path)
    with (
        serving_process(tmp_path) as server,
        closing(triton.InferenceServerClient(server.http_address)) as client,
    ):
        before = client.get_log_settings()
        changed = client.update_log_settings({"log_verbose_level": 1})
        assert changed == {**before, "log_verbose_level": 1}
        assert client.update_log_settings({"log_verbose_level": before["log_verbose_level"]}) == before
        with pytest.raises(
            InferenceServerException, match="invalid argument for --log_format, got: x"
        ) as caught:
            client.update_log_settings({"log_format": "x"})
        assert caught.value.status() == "503"


def test_trace_settings(client: triton.InferenceServerClient) -> None:
    before = client.get_trace_settings()
    assert before["trace_level"] == ["OFF"]
    assert client.get_trace_settings("probe") == before
    assert client.update_trace_settings("probe", {"trace_rate": "5"})["trace_rate"] == "5"
    assert client.update_trace_settings("probe", {"trace_rate": None}) == before
    with pytest.raises(InferenceServerException, match="Request for unknown model : none"):
        client.get_trace_settings("none")


@pytest.mark.process
@pytest.mark.parametrize(
    ("path", "more", "status", "body"),
    [
        ("/v2/health/live", [], 200, '{"live":true}'),
        ("/v2/models/none/ready", [], 400, '{"name":"none","ready":false}'),
        ("/v2/", [], 404, '{"error":"Not Found"}'),
        ("/v2/models/%70robe/ready", [], 200, '{"name":"probe","ready":true}'),
        ("/v2/models/probe/", [], 404, '{"error":"Not Found"}'),
        ("/v2/health/live", ["-X", "POST"], 405, '{"error":"Method Not Allowed"}'),
        ("/v2/repository/index", [], 405, '{"error":"Method Not Allowed"}'),
        ("/v2/repository/index", ["-d", '{"ready": 1}'], 400,
         '{"error":"Invalid value for \'ready\': expected a boolean"}'),
        ("/v2/repository/here/models/m/load", ["-d", ""], 501,
         '{"error":"\'repository_name\' specification is not supported"}'),
        ("/v2/logging", ["-d", "{"], 500,
         '{"error":"failed to parse the request JSON buffer: Missing a name for object member. at 1"}'),
    ],
)  # fmt: skip
def test_curl(explicit: AnyServer, path: str, more: list[str], status: int, body: str) -> None:
    assert curl(explicit, path, *more) == (status, body)


@pytest.mark.process
def test_there_is_no_head(explicit: AnyServer) -> None:
    status, _ = curl(explicit, "/v2/health/live", "-I")
    assert status == 405


@pytest.mark.process
def test_a_large_body_is_refused_and_the_next_request_answered(tmp_path: Path, explicit: AnyServer) -> None:
    large = tmp_path / "body"
    with large.open("wb") as file:
        file.truncate((64 << 20) + 1)
    status, body = curl(explicit, "/v2/repository/index", "--data-binary", f"@{large}")
    assert (status, body[:41]) == (400, '{"error":"request JSON size of 67108865 b')
    assert curl(explicit, "/v2/health/ready") == (200, '{"ready":true}')
