"""Calls on shared memory and tensors in it, for servers with a system region `r` of `SIZE` bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.cases import Case, refusal
from tests.support.servers import write_model
from tests.support.sharing import register_request
from tritonclient.grpc import service_pb2

SIZE = 64 * 1024
_ADDING = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        values = [request.inputs()[0].as_numpy() + 1 for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]) for value in values]
"""
_CONFIG = """
    backend: "python"
    input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
    output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""


def write_adding(repository: Path) -> None:
    """Writes the model of the requests, which adds 1 to 16 numbers."""
    write_model(repository, "adding", _CONFIG, {"model.py": _ADDING})


def part(region: Any = "r", byte_size: Any = 64, offset: Any = None) -> dict[str, Any]:
    """Parameters of a tensor that lies in a region; None leaves one out."""
    values = {"region": region, "byte_size": byte_size, "offset": offset}
    return {f"shared_memory_{key}": value for key, value in values.items() if value is not None}


def request_of(inputs: dict[str, Any] | None, outputs: dict[str, Any] | None, raw: bytes = b"") -> Any:
    """A request whose input, and output if it names one, have these parameters."""
    message = service_pb2.ModelInferRequest(model_name="adding", raw_input_contents=[raw] if raw else [])
    message.inputs.add(name="IN", datatype="FP32", shape=[16])
    if outputs is not None:
        message.outputs.add(name="OUT")
    for tensors, values in ((message.inputs, inputs), (message.outputs, outputs)):
        for key, value in (values or {}).items():
            kind = "string_param" if isinstance(value, str) else "int64_param"
            setattr(tensors[0].parameters[key], kind, value)
    return message


ANSWER = {
    "model_name": "adding",
    "model_version": "1",
    "outputs": [{"name": "OUT", "datatype": "FP32", "shape": ["16"]}],
    "raw_output_contents": [""],
}
"""To a request whose output lies in a region."""

NO_ID = "[request id: <id_unknown>] "
REQUESTS: dict[str, Case] = {
    "surplus contents": Case(request_of(part(), part(offset=4096), b"surplus"), ANSWER),
    "a larger part for the output": Case(request_of(part(), part(byte_size=128)), ANSWER),
    "an input in less than it needs": refusal(
        request_of(part(byte_size=63), part()),
        NO_ID + "input byte size mismatch for input 'IN' for model 'adding'. Expected 64, got 63",
    ),
    "an input in more than it needs": refusal(
        request_of(part(byte_size=128), part()),
        NO_ID + "input byte size mismatch for input 'IN' for model 'adding'. Expected 64, got 128",
    ),
    "an output in less than it needs": refusal(
        request_of(part(), part(byte_size=63)),
        "shared memory size specified with the request for output 'OUT' (63 bytes) should be at least 64 "
        "bytes to hold the results",
        "INTERNAL",
    ),
    "classes in a region": refusal(
        request_of(part(), {**part(), "classification": 1}),
        "output can't set both 'shared_memory_region' and 'classification'",
    ),
}
_OFFSET = "Invalid offset for shared memory region: 'r'"
_END = "Invalid offset + byte size for shared memory region: 'r'"
_TYPE = "invalid value type for 'shared_memory_{}' parameter for tensor '{{}}', expected {}."
_BARE = "'shared_memory_offset' can not be specified without 'shared_memory_region' parameter for tensor '{}'"
for _values, _text in (
    (part(offset=SIZE), _OFFSET),
    (part(offset=-4), _OFFSET),
    (part(offset=-(2**63)), _OFFSET),
    (part(offset=SIZE - 32), _END),
    (part(byte_size=-64), _END),
    (part(byte_size=0), _END),
    (part(byte_size=2**63 - 1), _END),
    (part("nowhere"), "Unable to find shared memory region: 'nowhere'"),
    (part(""), "Unable to find shared memory region: ''"),
    (part(3), _TYPE.format("region", "string_param")),
    (part(byte_size="x"), _TYPE.format("byte_size", "int64_param")),
    (part(offset="x"), _TYPE.format("offset", "int64_param")),
    (part(None, offset=0), _BARE),
    (part(None, None, 0), _BARE),
    (
        part(byte_size=None, offset=0),
        "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor "
        "'{}'",
    ),
):
    _code = "NOT_FOUND" if _text.startswith("Unable") else "INVALID_ARGUMENT"
    _given = ", ".join(f"{key.removeprefix('shared_memory_')}={value!r}" for key, value in _values.items())
    REQUESTS[f"input, {_given}"] = refusal(request_of(_values, part()), _text.format("IN"), _code)
    REQUESTS[f"output, {_given}"] = refusal(request_of(part(), _values), _text.format("OUT"), _code)

_TAKEN = "shared memory region 'r' already in manager"
_Status, _CudaStatus = service_pb2.SystemSharedMemoryStatusRequest, service_pb2.CudaSharedMemoryStatusRequest
_CudaRegister = service_pb2.CudaSharedMemoryRegisterRequest
CALLS: dict[str, Case] = {
    "status": refusal(
        _Status(name="nowhere"), "Unable to find system shared memory region: 'nowhere'", "NOT_FOUND"
    ),
    "status of no CUDA region": Case(_CudaStatus(), {}),
    "CUDA status": refusal(
        _CudaStatus(name="nowhere"), "Unable to find cuda shared memory region: 'nowhere'", "NOT_FOUND"
    ),
    "CUDA status of a system region": refusal(
        _CudaStatus(name="r"),
        "The region named 'r' is registered as system shared memory, not CUDA shared memory",
        "NOT_FOUND",
    ),
    "a name that is taken": refusal(register_request("r", "nowhere", SIZE), _TAKEN, "ALREADY_EXISTS"),
    "a name that is taken, CUDA": refusal(
        _CudaRegister(name="r", raw_handle=bytes(64), byte_size=1), _TAKEN, "ALREADY_EXISTS"
    ),
    "unregister of no region": Case(service_pb2.CudaSharedMemoryUnregisterRequest(name="nowhere"), {}),
    "CUDA unregister of a system region": Case(service_pb2.CudaSharedMemoryUnregisterRequest(name="r"), {}),
    **{
        f"key {key}": refusal(
            register_request("bad", key, 1), f"Unable to open shared memory region: '{key}'", "INTERNAL"
        )
        for key in ("nowhere", "/nowhere")
    },
}
BAD_KEYS = ("/", "", ".", "..", "a/b", "../etc/passwd", "x" * 300)
