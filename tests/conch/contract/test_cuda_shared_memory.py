"""CUDA shared memory over gRPC: real clients, a real server, and a driver whose devices' memory is files.

tritonclient's own utilities need cuda-python, which needs a GPU; what they send is what is sent here.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from numpy.typing import NDArray
from tests.support.cuda import FakeCuda, build
from tests.support.servers import (
    WAIT_S,
    ServerProcess,
    client_of,
    copy_example,
    eventually,
    serving_process,
    tensor,
    write_model,
)
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

pytestmark = pytest.mark.process

ECHO = """
import time
from pathlib import Path

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.echo(request)]) for request in requests]

    def echo(self, request):
        (tensor,) = request.inputs()
        if request.request_id():
            Path(request.request_id() + ".started").touch()
            while not Path(request.request_id() + ".go").exists():
                time.sleep(0.005)
        return pb_utils.Tensor.from_dlpack("OUT", tensor) if WHERE_IT_IS else pb_utils.Tensor(
            "OUT", tensor.as_numpy()
        )
"""
CONFIG = """
    backend: "python"
    input {{ name: "IN" data_type: TYPE_{kind} dims: [ -1 ] }}
    output {{ name: "OUT" data_type: TYPE_{kind} dims: [ -1 ] }}
    instance_group {{ kind: KIND_CPU }}
    parameters {{ key: "FORCE_CPU_ONLY_INPUT_TENSORS" value {{ string_value: "{cpu}" }} }}
"""
VALUES = np.arange(64, dtype=np.float32)


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> FakeCuda:
    return FakeCuda(build(tmp_path_factory.mktemp("driver")), tmp_path_factory.mktemp("memory"))


@pytest.fixture(scope="module")
def server(cuda: FakeCuda, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("models")
    copy_example(repository, "simple")
    for name, kind, cpu in (("host", "FP32", "yes"), ("near", "FP32", "no"), ("texts", "STRING", "no")):
        code = ECHO.replace("WHERE_IT_IS", str(name == "near"))
        write_model(repository, name, CONFIG.format(kind=kind, cpu=cpu), {"model.py": code})
    with serving_process(repository, environment=cuda.environment) as server:
        with client_of(server) as client:
            assert client.is_server_ready()
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[triton.InferenceServerClient]:
    with client_of(server) as client:
        yield client
        client.unregister_cuda_shared_memory()


def register(
    client: triton.InferenceServerClient, cuda: FakeCuda, name: str, values: NDArray[Any], device: int = 0
) -> NDArray[Any]:
    """Registers memory on a device with what is in it, as tritonclient's utilities give it."""
    allocation = cuda.allocate(values, device)
    raw_handle = base64.b64encode(allocation.handle)
    client.register_cuda_shared_memory(name, raw_handle, device, values.nbytes)
    return allocation.array


def in_region(
    name: str, region: str, values: NDArray[Any], offset: int = 0, kind: str = "FP32"
) -> triton.InferInput:
    made = triton.InferInput(name, list(values.shape), kind)
    made.set_shared_memory(region, values.nbytes, offset)
    return made


def to_region(name: str, region: str, size: int, offset: int = 0) -> triton.InferRequestedOutput:
    made = triton.InferRequestedOutput(name)
    made.set_shared_memory(region, size, offset)
    return made


def same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return bool((one == other).all())


def refusal(call: object, *arguments: object) -> tuple[str, str]:
    assert callable(call)
    with pytest.raises(InferenceServerException) as refused:
        call(*arguments)
    return refused.value.status().removeprefix("StatusCode."), refused.value.message()


def test_regions_are_listed(client: triton.InferenceServerClient, cuda: FakeCuda) -> None:
    register(client, cuda, "one", VALUES, 1)
    register(client, cuda, "two", VALUES[:8])
    status = client.get_cuda_shared_memory_status(as_json=True)
    assert status == {
        "regions": {
            "one": {"name": "one", "device_id": "1", "byte_size": "256"},
            "two": {"name": "two", "byte_size": "32"},
        }
    }
    assert list(client.get_cuda_shared_memory_status("two").regions) == ["two"]
    assert refusal(client.get_cuda_shared_memory_status, "three") == (
        "NOT_FOUND",
        "Unable to find cuda shared memory region: 'three'",
    )
    assert refusal(client.get_system_shared_memory_status, "one") == (
        "NOT_FOUND",
        "The region named 'one' is registered as CUDA shared memory, not system shared memory",
    )
    client.unregister_cuda_shared_memory("one")
    assert list(client.get_cuda_shared_memory_status().regions) == ["two"]


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("model", ["host", "near"])
def test_tensors_in_place(
    client: triton.InferenceServerClient, cuda: FakeCuda, model: str, device: int
) -> None:
    register(client, cuda, "in", VALUES, device)
    theirs = register(client, cuda, "out", np.zeros(72, np.float32), device)
    inputs = [in_region("IN", "in", VALUES[16:48], 64)]
    result = client.infer(model, inputs, outputs=[to_region("OUT", "out", 128, 32)])
    output = result.get_output("OUT")
    assert (list(output.shape), output.datatype) == ([32], "FP32")
    assert list(result.get_response().raw_output_contents) == [b""]
    assert theirs[8:40].tolist() == VALUES[16:48].tolist()
    assert not theirs[:8].any() and not theirs[40:].any()


@pytest.mark.parametrize("model", ["host", "near"])
def test_from_a_region_to_the_message_and_back(
    client: triton.InferenceServerClient, cuda: FakeCuda, model: str
) -> None:
    register(client, cuda, "in", VALUES)
    result = client.infer(model, [in_region("IN", "in", VALUES)])
    assert result.as_numpy("OUT").tolist() == VALUES.tolist()
    theirs = register(client, cuda, "out", np.zeros(64, np.float32))
    client.infer("host", [tensor("IN", VALUES)], outputs=[to_region("OUT", "out", 256)])
    assert theirs.tolist() == VALUES.tolist()


def test_strings(client: triton.InferenceServerClient, cuda: FakeCuda) -> None:
    strings = serialize_byte_tensor(np.array([b"abc", b"", b"d"], dtype=object)).item()
    content = np.frombuffer(strings, np.uint8)
    register(client, cuda, "in", content)
    theirs = register(client, cuda, "out", np.zeros(32, np.uint8))
    made = triton.InferInput("IN", [3], "BYTES")
    made.set_shared_memory("in", len(strings))
    client.infer("texts", [made], outputs=[to_region("OUT", "out", 32)])
    assert theirs[: len(strings)].tobytes() == strings


def test_a_batch_from_regions_of_several_clients(
    client: triton.InferenceServerClient, cuda: FakeCuda
) -> None:
    """`simple` is an ONNX model on the CPU, so inputs are copied there and joined, and outputs back."""
    numbers = np.arange(16, dtype=np.int32).reshape(1, 16)
    register(client, cuda, "in", numbers, 1)
    outs = [register(client, cuda, f"out{n}", np.zeros((2, 16), np.int32), n % 2) for n in range(4)]
    calls = [
        client.async_infer(
            "simple",
            [
                in_region("INPUT0", "in", numbers, kind="INT32"),
                in_region("INPUT1", "in", numbers, kind="INT32"),
            ],
            lambda result, error: None,
            outputs=[to_region("OUTPUT0", f"out{n}", 64), to_region("OUTPUT1", f"out{n}", 64, 64)],
        )
        for n in range(4)
    ]
    assert len(calls) == 4
    for out in outs:
        eventually(partial(same, out[0], numbers * 2), "the sum is there")
        assert not out[1].any()


def test_an_output_that_does_not_fit(client: triton.InferenceServerClient, cuda: FakeCuda) -> None:
    register(client, cuda, "in", VALUES)
    theirs = register(client, cuda, "out", np.zeros(64, np.float32))
    outputs = [to_region("OUT", "out", 255)]
    assert refusal(lambda: client.infer("host", [in_region("IN", "in", VALUES)], outputs=outputs)) == (
        "INTERNAL",
        "shared memory size specified with the request for output 'OUT' (255 bytes) should be at least 256 "
        "bytes to hold the results",
    )
    assert not theirs.any()


def test_inputs_that_are_not_there(client: triton.InferenceServerClient, cuda: FakeCuda) -> None:
    register(client, cuda, "in", VALUES)
    for made, expected in (
        (in_region("IN", "no", VALUES), ("NOT_FOUND", "Unable to find shared memory region: 'no'")),
        (
            in_region("IN", "in", VALUES, 4),
            ("INVALID_ARGUMENT", "Invalid offset + byte size for shared memory region: 'in'"),
        ),
        (
            in_region("IN", "in", VALUES, 256),
            ("INVALID_ARGUMENT", "Invalid offset for shared memory region: 'in'"),
        ),
    ):
        assert refusal(client.infer, "host", [made]) == expected
    made = triton.InferInput("IN", [16], "FP32")
    made.set_shared_memory("in", 128)
    code, text = refusal(client.infer, "host", [made])
    assert (code, "Expected 64, got 128" in text) == ("INVALID_ARGUMENT", True)


def test_what_can_not_be_registered(client: triton.InferenceServerClient, cuda: FakeCuda) -> None:
    allocation = cuda.allocate(VALUES, 1)
    handle = base64.b64encode(allocation.handle)
    start = "failed to register shared memory region 'n': "
    opening = "failed to register CUDA shared memory region 'n': failed to open CUDA IPC handle: "
    for arguments, text in (
        ((base64.b64encode(b"x" * 64), 0, 256), opening + "invalid argument"),
        ((b"", 0, 0), opening + "invalid argument"),
        ((handle, 2, 256), opening + "invalid device ordinal"),
        ((handle, -(2**63), 256), opening + "invalid device ordinal"),
        ((handle, 0, 256), opening + "the memory is on device 1, not on device 0"),
        ((handle, 1, 257), start + "invalid args"),
        ((handle, 1, 2**64 - 1), start + "invalid args"),
    ):
        assert refusal(client.register_cuda_shared_memory, "n", *arguments) == ("INVALID_ARGUMENT", text)
    assert refusal(client.register_cuda_shared_memory, "", handle, 1, 256) == (
        "INVALID_ARGUMENT",
        "'region name' is necessary to register cuda shared memory region",
    )
    eventually(lambda: allocation.name not in cuda.open_handles, "nothing of it is open")
    client.register_cuda_shared_memory("n", handle, 1, 256)
    assert refusal(client.register_cuda_shared_memory, "n", handle, 1, 256) == (
        "ALREADY_EXISTS",
        "shared memory region 'n' already in manager",
    )


def test_an_unregistered_region_is_closed(client: triton.InferenceServerClient, cuda: FakeCuda) -> None:
    register(client, cuda, "in", VALUES)
    client.infer("near", [in_region("IN", "in", VALUES)])
    assert cuda.open_handles
    client.unregister_cuda_shared_memory("in")
    assert not client.get_cuda_shared_memory_status().regions
    eventually(lambda: not cuda.open_handles, "the handle is closed")


@pytest.mark.parametrize("model", ["host", "near"])
def test_a_region_that_is_unregistered_while_it_is_used(
    client: triton.InferenceServerClient, cuda: FakeCuda, tmp_path: Path, model: str
) -> None:
    theirs = register(client, cuda, "r", np.concatenate([VALUES, VALUES * 0]))
    hold = tmp_path / "hold"
    done: list[object] = []
    client.async_infer(
        model,
        [in_region("IN", "r", VALUES)],
        lambda result, error: done.append(error),
        outputs=[to_region("OUT", "r", 256, 256)],
        request_id=str(hold),
    )
    eventually(Path(f"{hold}.started").exists, "the model runs")
    client.unregister_cuda_shared_memory("r")
    assert not client.get_cuda_shared_memory_status().regions
    assert len(cuda.open_handles) == 1
    Path(f"{hold}.go").touch()
    eventually(lambda: done, "the request is answered", WAIT_S)
    assert done == [None]
    assert theirs[64:].tolist() == VALUES.tolist()
    eventually(lambda: not cuda.open_handles, "the handle is closed")


def test_copies_that_fail_are_the_requests_errors(
    client: triton.InferenceServerClient, cuda: FakeCuda
) -> None:
    register(client, cuda, "r", VALUES)
    for made, outputs in (
        (in_region("IN", "r", VALUES), None),
        (tensor("IN", VALUES), [to_region("OUT", "r", 256)]),
    ):
        with cuda.failing("cuMemcpyAsync", 700):
            code, text = refusal(
                lambda made=made, outputs=outputs: client.infer("host", [made], outputs=outputs)
            )
        assert code == "INTERNAL"
        assert "a copy on CUDA device 0 failed: an illegal memory access was encountered" in text
    assert client.infer("host", [in_region("IN", "r", VALUES)]).as_numpy("OUT").tolist() == VALUES.tolist()


def test_without_cuda_and_when_clients_may_not(tmp_path: Path) -> None:
    handle = base64.b64encode(b"x" * 64)
    copy_example(tmp_path / "models", "simple")
    empty = {"LD_LIBRARY_PATH": str(tmp_path)}
    (tmp_path / "libcuda.so.1").write_text("no library")
    with serving_process(tmp_path / "models", environment=empty) as server, client_of(server) as client:
        assert refusal(client.register_cuda_shared_memory, "n", handle, 0, 64) == (
            "INVALID_ARGUMENT",
            "failed to register CUDA shared memory region: 'n', GPUs not supported",
        )
        assert not client.get_cuda_shared_memory_status().regions
        client.unregister_cuda_shared_memory("n")
    flags = ["--allow-client-shm=false"]
    with serving_process(tmp_path / "models", flags=flags) as server, client_of(server) as client:
        text = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
        assert refusal(client.register_cuda_shared_memory, "n", handle, 0, 64) == ("UNIMPLEMENTED", text)
        assert refusal(client.unregister_cuda_shared_memory, "n") == ("UNIMPLEMENTED", text)
        assert not client.get_cuda_shared_memory_status().regions
