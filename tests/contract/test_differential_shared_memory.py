"""The same regions and requests for a real Triton and for conch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
from tests.support.peers import NEEDS_TRITON, Both, compare, outcomes, serving_both
from tests.support.servers import write_model
from tests.support.sharing import SharedObject, register_request, shared_object
from tritonclient.grpc import service_pb2

pytestmark = NEEDS_TRITON

SIZE = 8192
ADDING = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        values = [request.inputs()[0].as_numpy() + 1 for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]) for value in values]
"""
CONFIG = """
    backend: "python"
    input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
    output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""
_names = count()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    repository = tmp_path_factory.mktemp("both")
    write_model(repository, "adding", CONFIG, {"model.py": ADDING})
    with serving_both(repository) as both:
        yield both


@pytest.fixture
def memory() -> Iterator[SharedObject]:
    with shared_object(SIZE) as memory:
        memory.write(np.arange(16, dtype=np.float32))
        yield memory


@pytest.fixture
def region(both: Both, memory: SharedObject) -> Iterator[str]:
    name = f"region{next(_names)}"
    compare(both, "SystemSharedMemoryRegister", register_request(name, memory.key, SIZE))
    yield name
    compare(both, "SystemSharedMemoryUnregister", service_pb2.SystemSharedMemoryUnregisterRequest(name=name))


def request_of(inputs: dict[str, Any] | None, outputs: dict[str, Any] | None, raw: bytes = b"") -> Any:
    message = service_pb2.ModelInferRequest(model_name="adding", raw_input_contents=[raw] if raw else [])
    for tensors, name, values in ((message.inputs, "IN", inputs), (message.outputs, "OUT", outputs)):
        if tensors is message.outputs and values is None:
            continue
        tensor = tensors.add(name=name)
        for key, value in (values or {}).items():
            kind = "string_param" if isinstance(value, str) else "int64_param"
            setattr(tensor.parameters[key], kind, value)
    message.inputs[0].datatype = "FP32"
    message.inputs[0].shape[:] = [16]
    return message


def part(region: Any, byte_size: Any = 64, offset: Any = None) -> dict[str, Any]:
    values = {"shared_memory_region": region, "shared_memory_byte_size": byte_size}
    return values if offset is None else {**values, "shared_memory_offset": offset}


def test_tensors_in_regions(both: Both, region: str, memory: SharedObject) -> None:
    compare(both, "ModelInfer", request_of(part(region), None))
    compare(both, "ModelInfer", request_of(part(region), None, b"surplus"))
    compare(both, "ModelInfer", request_of(part(region), part(region, 64, 4096)))
    assert memory.read(16, 4096).tolist() == list(range(1, 17))
    compare(both, "ModelInfer", request_of(None, part(region, 100, 4096), bytes(64)))
    assert memory.read(16, 4096).tolist() == [1] * 16


@pytest.mark.parametrize(
    "values",
    [
        {"offset": SIZE},
        {"offset": SIZE - 32},
        {"offset": -4},
        {"offset": -(2**63)},
        {"byte_size": -64},
        {"byte_size": 0},
        {"byte_size": 2**63 - 1},
        {"byte_size": 63},
        {"byte_size": 128},
        {"region": "nowhere"},
        {"region": ""},
        {"region": 3},
        {"byte_size": "x"},
        {"offset": "x"},
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["input", "output"])
def test_parts_that_are_wrong(both: Both, region: str, values: dict[str, Any], where: str) -> None:
    wrong = part(**{"region": region, **values})
    good = part(region)
    message = request_of(wrong, good) if where == "input" else request_of(good, wrong)
    compare(both, "ModelInfer", message)


@pytest.mark.parametrize("missing", ["region", "byte_size", "region and byte_size"])
def test_parameters_that_are_missing(both: Both, region: str, missing: str) -> None:
    values = part(region, 64, 0)
    for each in missing.split(" and "):
        del values[f"shared_memory_{each}"]
    compare(both, "ModelInfer", request_of(values, None))
    compare(both, "ModelInfer", request_of(part(region), values))
    compare(both, "ModelInfer", request_of(part(region), {**part(region), "classification": 1}))


def test_status_and_names(both: Both, region: str, memory: SharedObject) -> None:
    for name in (region, "nowhere", ""):
        compare(both, "SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest(name=name))
        compare(both, "CudaSharedMemoryStatus", service_pb2.CudaSharedMemoryStatusRequest(name=name))
    compare(both, "SystemSharedMemoryRegister", register_request(region, memory.key, SIZE))
    compare(both, "SystemSharedMemoryRegister", register_request(region, "nowhere", SIZE))
    compare(
        both,
        "CudaSharedMemoryRegister",
        service_pb2.CudaSharedMemoryRegisterRequest(name=region, raw_handle=bytes(64), byte_size=1),
    )
    for name in ("nowhere", region):
        compare(both, "CudaSharedMemoryUnregister", service_pb2.CudaSharedMemoryUnregisterRequest(name=name))
    compare(both, "SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest())


def test_what_can_not_be_registered(both: Both, memory: SharedObject) -> None:
    for key in ("nowhere", "/nowhere"):
        compare(both, "SystemSharedMemoryRegister", register_request("bad", key, 1))
    compare(both, "SystemSharedMemoryRegister", register_request("bad", memory.key, SIZE + 1))
    for key in ("/", "", ".", "..", "a/b", "../etc/passwd", "x" * 300):
        theirs, ours = outcomes(both, "SystemSharedMemoryRegister", register_request("bad", key, 1))
        assert (theirs, ours) == (
            ("INTERNAL", f"Unable to open shared memory region: '{key}'"),
            ("INVALID_ARGUMENT", f"cannot register shared memory region 'bad' - invalid shm key '{key}'"),
        )
