"""CUDA shared memory over REST: tritonclient, a real server, and a driver whose devices' memory is files."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import tritonclient.http as triton
from numpy.typing import NDArray
from tests.support.cuda import FakeCuda, build
from tests.support.raw_http import raw_http, request
from tests.support.servers import (
    WAIT_S,
    ServerProcess,
    client_of,
    copy_example,
    eventually,
    serving_process,
    write_probe,
)
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.process

VALUES = np.arange(64, dtype=np.float32).reshape(4, 16)
Client: TypeAlias = triton.InferenceServerClient


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> FakeCuda:
    return FakeCuda(build(tmp_path_factory.mktemp("driver")), tmp_path_factory.mktemp("memory"))


@pytest.fixture(scope="module")
def server(cuda: FakeCuda, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("models")
    copy_example(repository, "simple")
    write_probe(repository)
    with serving_process(repository, environment=cuda.environment) as server:
        with client_of(server) as grpc, closing(Client(server.http_address)) as client:
            assert grpc.is_server_ready() and client.is_server_ready()
        yield server


@pytest.fixture
def client(server: ServerProcess, cuda: FakeCuda) -> Iterator[Client]:
    with closing(Client(server.http_address, network_timeout=WAIT_S)) as client:
        yield client
        client.unregister_cuda_shared_memory()
    eventually(lambda: not cuda.open_handles, "no handle is left open")


def register(
    client: Client, cuda: FakeCuda, name: str, values: NDArray[Any], device: int = 0
) -> NDArray[Any]:
    """Registers memory on a device with what is in it, as tritonclient's utilities give it."""
    allocation = cuda.allocate(values, device)
    client.register_cuda_shared_memory(name, base64.b64encode(allocation.handle), device, values.nbytes)
    return allocation.array


def given(name: str, region: str, values: NDArray[Any], offset: int = 0, kind: str = "FP32") -> Any:
    made = triton.InferInput(name, list(values.shape), kind)
    made.set_shared_memory(region, values.nbytes, offset)
    return made


def wanted(name: str, region: str, size: int, offset: int = 0) -> Any:
    made = triton.InferRequestedOutput(name)
    made.set_shared_memory(region, size, offset)
    return made


def test_regions_are_listed(client: Client, cuda: FakeCuda) -> None:
    register(client, cuda, "one", VALUES, 1)
    register(client, cuda, "two", VALUES[:1])
    one = {"name": "one", "device_id": 1, "byte_size": 256}
    assert client.get_cuda_shared_memory_status() == [one, {"name": "two", "device_id": 0, "byte_size": 64}]
    assert client.get_cuda_shared_memory_status("one") == [one]
    for ask, text in (
        (client.get_cuda_shared_memory_status, "Unable to find cuda shared memory region: 'three'"),
        (client.get_system_shared_memory_status, "Unable to find system shared memory region: 'three'"),
    ):
        with pytest.raises(InferenceServerException, match=text):
            ask("three")
    with pytest.raises(InferenceServerException, match="registered as CUDA shared memory, not system"):
        client.get_system_shared_memory_status("one")
    client.unregister_cuda_shared_memory("one")
    client.unregister_cuda_shared_memory("one")
    assert [region["name"] for region in client.get_cuda_shared_memory_status()] == ["two"]


@pytest.mark.parametrize("device", [0, 1])
def test_tensors_in_place(client: Client, cuda: FakeCuda, device: int) -> None:
    register(client, cuda, "in", VALUES, device)
    theirs = register(client, cuda, "out", np.zeros(72, np.float32), device)
    outputs = [wanted("OUT", "out", 128, 32), triton.InferRequestedOutput("SEEN")]
    result = client.infer("probe", [given("IN", "in", VALUES[1:3], 64)], outputs=outputs)
    assert result.get_output("OUT") == {"name": "OUT", "datatype": "FP32", "shape": [2, 16]}
    assert result.as_numpy("SEEN").size
    assert theirs[8:40].tolist() == VALUES[1:3].ravel().tolist()
    assert not theirs[:8].any() and not theirs[40:].any()


def test_from_a_region_to_the_body_and_back(client: Client, cuda: FakeCuda) -> None:
    register(client, cuda, "in", VALUES)
    result = client.infer("probe", [given("IN", "in", VALUES)])
    assert result.as_numpy("OUT").tolist() == VALUES.tolist()
    theirs = register(client, cuda, "out", np.zeros(64, np.float32))
    inputs = triton.InferInput("IN", [4, 16], "FP32")
    inputs.set_data_from_numpy(VALUES)
    client.infer("probe", [inputs], outputs=[wanted("OUT", "out", 256)])
    assert theirs.tolist() == VALUES.ravel().tolist()


def test_an_onnx_model(client: Client, cuda: FakeCuda) -> None:
    numbers = np.arange(16, dtype=np.int32).reshape(1, 16)
    register(client, cuda, "in", numbers, 1)
    theirs = register(client, cuda, "out", np.zeros((2, 16), np.int32), 0)
    client.infer(
        "simple",
        [given(name, "in", numbers, kind="INT32") for name in ("INPUT0", "INPUT1")],
        outputs=[wanted("OUTPUT0", "out", 64), wanted("OUTPUT1", "out", 64, 64)],
    )
    assert theirs.tolist() == [(2 * numbers[0]).tolist(), [0] * 16]


def test_what_can_not_be_registered(client: Client, cuda: FakeCuda) -> None:
    allocation = cuda.allocate(VALUES, 1)
    handle = base64.b64encode(allocation.handle)
    start = "failed to register shared memory region 'n': "
    opening = "failed to register CUDA shared memory region 'n': failed to open CUDA IPC handle: "
    for arguments, text in (
        ((base64.b64encode(b"x" * 64), 0, 256), opening + "invalid argument"),
        ((b"", 0, 0), "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"),
        (
            (base64.b64encode(b"x" * 63), 0, 8),
            "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t",
        ),
        ((handle, 2, 256), opening + "invalid device ordinal"),
        ((handle, 2**64 - 1, 256), opening + "invalid device ordinal"),
        ((handle, 0, 256), opening + "the memory is on device 1, not on device 0"),
        ((handle, 1, 257), start + "invalid args"),
        ((handle, 1, 2**64 - 1), start + "invalid args"),
    ):
        with pytest.raises(InferenceServerException) as raised:
            client.register_cuda_shared_memory("n", *arguments)
        assert (raised.value.status(), raised.value.message()) == ("400", text)
    eventually(lambda: allocation.name not in cuda.open_handles, "nothing of it is open")
    client.register_cuda_shared_memory("n", handle, 1, 256)
    with pytest.raises(InferenceServerException, match="shared memory region 'n' already in manager"):
        client.register_cuda_shared_memory("n", handle, 1, 256)


def test_copies_that_fail_are_the_requests_errors(client: Client, cuda: FakeCuda) -> None:
    register(client, cuda, "r", VALUES)
    with cuda.failing("cuMemcpyAsync", 700), pytest.raises(InferenceServerException) as raised:
        client.infer("probe", [given("IN", "r", VALUES)])
    assert raised.value.status() == "500"
    assert (
        "a copy on CUDA device 0 failed: an illegal memory access was encountered" in raised.value.message()
    )
    assert client.infer("probe", [given("IN", "r", VALUES)]).as_numpy("OUT").tolist() == VALUES.tolist()


@pytest.mark.parametrize("stays", [True, False])
def test_a_region_that_is_unregistered_while_it_is_used(
    client: Client, cuda: FakeCuda, server: ServerProcess, tmp_path: Path, stays: bool
) -> None:
    """Its handle is closed after the answer, and also if its client is gone."""
    theirs = register(client, cuda, "r", np.concatenate([VALUES, VALUES * 0]))
    started, go = tmp_path / "started", tmp_path / "go"
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 256}
    body = {
        "inputs": [{"name": "IN", "datatype": "FP32", "shape": [4, 16], "parameters": place}],
        "outputs": [{"name": "OUT", "parameters": {**place, "shared_memory_offset": 256}}],
        "parameters": {"started": str(started), "wait_for": str(go)},
    }
    with raw_http(server.http_address) as raw:
        raw.send(request("POST", "/v2/models/probe/infer", json.dumps(body).encode()))
        eventually(started.exists, "the model runs")
        client.unregister_cuda_shared_memory("r")
        assert client.get_cuda_shared_memory_status() == []
        assert len(cuda.open_handles) == 1
        if stays:
            go.touch()
            answer = raw.response()
            assert answer is not None and answer.status == 200
            assert theirs[4:].tolist() == VALUES.tolist()
    go.touch()
    eventually(lambda: not cuda.open_handles, "the handle is closed")


def test_a_hundred_regions_come_and_go(client: Client, cuda: FakeCuda, server: ServerProcess) -> None:
    descriptors = Path(f"/proc/{server.process.pid}/fd")
    allocation = cuda.allocate(VALUES)
    handle = base64.b64encode(allocation.handle)
    before = None
    for _ in range(100):
        client.register_cuda_shared_memory("r", handle, 0, 256)
        client.infer("probe", [given("IN", "r", VALUES)], outputs=[wanted("OUT", "r", 256)])
        client.unregister_cuda_shared_memory("r")
        before = before or len(list(descriptors.iterdir()))
    eventually(lambda: len(list(descriptors.iterdir())) <= (before or 0), "no descriptor is left")
