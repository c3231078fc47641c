"""ModelInferRequest bytes to an `InferenceRequest`.

The one copy of a tensor's bytes on the way in is the C core's. Plain requests are taken apart by hand and
recognised by what they have in common with earlier ones. All others are parsed by protobuf, large ones
after their raw contents have been cut out, so that protobuf never copies those.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from conch.core.errors import InvalidArgumentError
from conch.core.request import InferenceRequest, InferenceResponse, Responder
from conch.core.tensor import NUMPY_DTYPES, Buffer, Tensor, encode_bytes
from conch.frontends.grpc.parameters import (
    EMPTY_FINAL,
    check_regions,
    read_output_parameters,
    read_parameters,
)
from conch.frontends.grpc.wire import split_infer_request, split_repeated_bytes
from conch.protocol import inference_pb2

_SCAN_FROM = 16 * 1024
_MOST_TEMPLATES = 4096
_LONGEST_KEY = 4096
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


class _Template:
    """What requests that differ only in their id and their bytes have in common; compared by identity."""

    __slots__ = ("inputs", "model_name", "model_version", "requested", "settings")

    def __init__(
        self,
        model_name: str,
        model_version: str,
        inputs: tuple[tuple[str, str, tuple[int, ...]], ...],
        requested: tuple[str, ...] | None,
        settings: tuple[tuple[str, object], ...],
    ) -> None:
        self.settings = settings
        self.model_name = model_name
        self.model_version = model_version
        self.inputs = inputs
        self.requested = requested


class RequestDecoder:
    """Reads ModelInferRequest messages.

    What a plain request has besides its id and its raw contents is parsed when it is first seen and
    remembered by its bytes.
    """

    def __init__(self) -> None:
        self._templates: dict[bytes, _Template] = {}

    def __call__(self, message: bytes, responder: Responder, received_ns: int) -> InferenceRequest:
        """Reads a request.

        Args:
            message: The serialised message; the request's tensors keep views of it.
            responder: Takes the responses.
            received_ns: When the message arrived, in monotonic nanoseconds.

        Raises:
            InvalidArgumentError: The message is malformed or contradicts itself; texts are Triton's.
            NotFoundError: It names a shared-memory region.
        """
        parts = split_infer_request(message)
        if parts is not None:
            key, request_id, raw = parts
            template = self._templates.get(key) or self._learn(key)
            if template is not None and len(template.inputs) == len(raw):
                request = InferenceRequest(
                    template.model_name,
                    template.model_version,
                    {
                        name: Tensor(name, datatype, shape, data)
                        for (name, datatype, shape), data in zip(template.inputs, raw, strict=True)
                    },
                    responder,
                    received_ns,
                    _text(request_id) if request_id else "",
                    template.requested,
                )
                request.signature = template
                for attribute, value in template.settings:
                    setattr(request, attribute, value)
                return request
        return _parse(message, responder, received_ns)

    def _learn(self, key: bytes) -> _Template | None:
        """Remembers what a plain request has in common with others; None if it is not that plain."""
        if len(key) > _LONGEST_KEY:
            return None
        try:
            wire = inference_pb2.ModelInferRequest.FromString(key)
        except DecodeError:
            return None
        names = [tensor.name for tensor in wire.inputs]
        requested = tuple(output.name for output in wire.outputs)
        if (
            len(set(names)) != len(names)
            or len(set(requested)) != len(requested)
            or any(tensor.parameters or tensor.HasField("contents") for tensor in wire.inputs)
            or any(output.parameters for output in wire.outputs)
            or not all(_repeats(name, value) for name, value in wire.parameters.items())
        ):
            return None
        template = _Template(
            wire.model_name,
            wire.model_version,
            tuple((tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in wire.inputs),
            requested or None,
            _settings(wire),
        )
        if len(self._templates) >= _MOST_TEMPLATES:
            self._templates.clear()  # requests that never repeat must not fill the memory
        self._templates[key] = template
        return template


def _repeats(name: str, value: Any) -> bool:
    """Whether a request parameter is likely to be the same in many requests, and is well-formed."""
    kind = value.WhichOneof("parameter_choice")
    if name in ("priority", "timeout"):
        return bool(kind == "int64_param" and value.int64_param >= 0)
    return bool(
        kind == "bool_param" and (name == EMPTY_FINAL or not name.startswith(("triton_", "sequence_")))
    )


def _settings(wire: Any) -> tuple[tuple[str, object], ...]:
    """What the parameters of a plain message set on its requests."""
    if not wire.parameters:
        return ()
    blank = InferenceRequest("", "", {}, _nobody, 0)
    request = InferenceRequest("", "", {}, _nobody, 0)
    read_parameters(request, wire.parameters)
    names = ("empty_final", "parameters", "priority", "timeout_us")
    return tuple(
        (name, getattr(request, name)) for name in names if getattr(request, name) != getattr(blank, name)
    )


def _nobody(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
    """The responder of a request that is never submitted."""


def _text(request_id: bytes) -> str:
    try:
        return request_id.decode()
    except UnicodeDecodeError:
        raise InvalidArgumentError("the request message is malformed: its id is not UTF-8") from None


def _parse(message: bytes, responder: Responder, received_ns: int) -> InferenceRequest:
    """Reads any request, the whole of it."""
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
    inputs = _raw_inputs(wire, raw) if raw else _typed_inputs(wire)
    requested: tuple[str, ...] | None = None
    outputs = wire.outputs
    if outputs:
        requested = tuple(dict.fromkeys([output.name for output in outputs]))
    request = InferenceRequest(
        wire.model_name, wire.model_version, inputs, responder, received_ns, wire.id, requested
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
        raise _twice(wire)
    return inputs


def _typed_inputs(wire: Any) -> dict[str, Tensor]:
    """The inputs whose elements come in their own ``contents``."""
    inputs: dict[str, Tensor] = {}
    for tensor in wire.inputs:
        if tensor.parameters:
            check_regions(tensor)
        inputs[tensor.name] = _typed_tensor(tensor, wire.model_name)
    if len(inputs) != len(wire.inputs):
        raise _twice(wire)
    return inputs


def _twice(wire: Any) -> InvalidArgumentError:
    names = [tensor.name for tensor in wire.inputs]
    name = next(name for name in names if names.count(name) > 1)
    return InvalidArgumentError(
        f"[request id: {wire.id or '<id_unknown>'}] input '{name}' already exists in request"
    )


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
    unexpected = f"unexpected explicit tensor data for input tensor '{name}' for model '{model_name}'"
    if len(filled) > 1:
        raise InvalidArgumentError(f"{unexpected}, binary data was already supplied.")
    if filled and filled[0] != expected:
        raise InvalidArgumentError(
            f"{unexpected} of type '{_FIELD_DATATYPE[filled[0]]}', expected datatype '{datatype}'"
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
