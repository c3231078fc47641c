"""ModelInferRequest bytes to an `InferenceRequest`.

The one copy of a tensor's bytes on the way in is the C core's. Small messages go through protobuf, which
is faster than any scan in Python; from `_SCAN_FROM` bytes on, the raw contents are cut out first, so that
protobuf never copies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from conch.core.errors import InvalidArgumentError
from conch.core.request import InferenceRequest, Responder
from conch.core.tensor import NUMPY_DTYPES, Buffer, Tensor, encode_bytes
from conch.frontends.grpc.parameters import check_regions, read_output_parameters, read_parameters
from conch.frontends.grpc.wire import split_repeated_bytes
from conch.protocol import inference_pb2

_SCAN_FROM = 16 * 1024
_RAW_INPUT_CONTENTS = 7

_CONTENTS_FIELD = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_FIELD_DATATYPE = {
    "bool_contents": "BOOL",
    "int_contents": "INT32",
    "int64_contents": "INT64",
    "uint_contents": "UINT32",
    "uint64_contents": "UINT64",
    "fp32_contents": "FP32",
    "fp64_contents": "FP64",
    "bytes_contents": "BYTES",
}


def decode_request(message: bytes, responder: Responder, received_ns: int) -> InferenceRequest:
    """Reads a ModelInferRequest.

    Args:
        message: The serialised message; the request's tensors keep views of it.
        responder: Takes the responses.
        received_ns: When the message arrived, in monotonic nanoseconds.

    Raises:
        InvalidArgumentError: The message is malformed or contradicts itself; texts are Triton's.
        NotFoundError: It names a shared-memory region.
    """
    raw: Any
    try:
        if len(message) < _SCAN_FROM:
            wire = inference_pb2.ModelInferRequest.FromString(message)
            raw = wire.raw_input_contents
        else:
            head, raw = split_repeated_bytes(message, _RAW_INPUT_CONTENTS)
            wire = inference_pb2.ModelInferRequest.FromString(head)
    except DecodeError as error:
        raise InvalidArgumentError(f"the request message is malformed: {error}") from None
    model_name = wire.model_name
    inputs = _raw_inputs(wire, raw) if raw else _typed_inputs(wire)
    requested: tuple[str, ...] | None = None
    outputs = wire.outputs
    if outputs:
        requested = tuple([output.name for output in outputs])
        if len(requested) > 1 and len(set(requested)) != len(requested):
            raise _twice("output", requested)
    request = InferenceRequest(
        model_name, wire.model_version, inputs, responder, received_ns, wire.id, requested
    )
    for output in outputs:
        if output.parameters:
            read_output_parameters(request, output)
    if wire.parameters:
        read_parameters(request, wire.parameters)
    return request


def _raw_inputs(wire: Any, raw: Any) -> dict[str, Tensor]:
    """The inputs whose bytes come in ``raw_input_contents``, in the same order."""
    inputs: dict[str, Tensor] = {}
    contents = iter(raw)
    for tensor in wire.inputs:
        name = tensor.name
        if tensor.HasField("contents"):
            raise InvalidArgumentError(
                f"contents field must not be specified when using raw_input_contents for '{name}' for "
                f"model '{wire.model_name}'"
            )
        if tensor.parameters:
            check_regions(tensor)
        data = next(contents, None)
        if data is None:
            raise _no_data(name, wire.model_name)
        inputs[name] = Tensor(name, tensor.datatype, tuple(tensor.shape), data)
    if len(inputs) != len(wire.inputs):
        raise _twice("input", [tensor.name for tensor in wire.inputs])
    return inputs


def _typed_inputs(wire: Any) -> dict[str, Tensor]:
    """The inputs whose elements come in their own ``contents``."""
    inputs: dict[str, Tensor] = {}
    for tensor in wire.inputs:
        if tensor.parameters:
            check_regions(tensor)
        inputs[tensor.name] = _typed_tensor(tensor, wire.model_name)
    if len(inputs) != len(wire.inputs):
        raise _twice("input", [tensor.name for tensor in wire.inputs])
    return inputs


def _twice(kind: str, names: Sequence[str]) -> InvalidArgumentError:
    name = next(name for name in names if names.count(name) > 1)
    return InvalidArgumentError(f"{kind} '{name}' already exists in request")


def _no_data(name: str, model_name: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"unable to find data for input tensor '{name}' for model '{model_name}' in request."
    )


def _typed_tensor(tensor: Any, model_name: str) -> Tensor:
    """A tensor whose elements came in the typed ``contents`` of its input."""
    name, datatype = tensor.name, tensor.datatype
    shape = tuple(tensor.shape)
    if not tensor.HasField("contents"):
        if 0 in shape:
            return Tensor(name, datatype, shape, b"")
        raise _no_data(name, model_name)
    filled = [field.name for field, _ in tensor.contents.ListFields()]
    expected = _CONTENTS_FIELD.get(datatype)
    for field in filled:
        if field != expected:
            raise InvalidArgumentError(
                f"unexpected explicit tensor data for input tensor '{name}' for model '{model_name}' of type "
                f"'{_FIELD_DATATYPE[field]}', expected datatype '{datatype}'"
                + (", binary data was already supplied." if len(filled) > 1 else "")
            )
    if expected is None:
        raise _no_data(name, model_name)
    elements = getattr(tensor.contents, expected)
    data: Buffer
    if datatype == "BYTES":
        data = encode_bytes(elements)
    else:
        # Through the field's own width: values that do not fit the datatype are cut, as Triton does.
        wide = np.array(elements, dtype=NUMPY_DTYPES[_FIELD_DATATYPE[expected]])
        data = wide.astype(NUMPY_DTYPES[datatype]).tobytes()
    return Tensor(name, datatype, shape, data)
