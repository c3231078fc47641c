"""Decodes ModelInferRequest messages to `InferenceRequest`.

Plain requests take the fast path of `request_layouts`. Protobuf parses all others, long ones after their
tensors are cut out, as it copies and holds the GIL. Tensors are views of the message.
Threads and locks: any thread; `Layouts` has a lock of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from conch.core.compiled import mypyc_attr
from conch.core.errors import InvalidArgumentError
from conch.core.request import InferenceRequest, NamedRegions, Responder, id_prefix
from conch.core.tensor import NUMPY_DTYPES, Buffer, Tensor, encode_bytes
from conch.frontends.grpc.request_layouts import Layout, Layouts
from conch.frontends.grpc.request_parameters import read_output_parameters, read_parameters, read_region
from conch.frontends.grpc.typed_contents import TypedContents
from conch.frontends.grpc.wire_format import MAX_PLAIN_FIELDS, CutRequest, cut_infer_request
from conch.protocol import inference_pb2

SCAN_FROM = 16 * 1024
LONG_BYTES = SCAN_FROM
"""Size from which a message may be worth another thread."""

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


@mypyc_attr(allow_interpreted_subclasses=True)
class RequestDecoder:
    """Decodes ModelInferRequest messages.

    Attributes:
        layouts: The layouts of plain requests.

    """

    def __init__(self) -> None:
        self.layouts = Layouts()

    def is_long(self, message: Buffer) -> bool:
        """Returns whether a message of `LONG_BYTES` or more may take long to decode and check."""
        layout = self.layouts.find(message)
        if layout is not None:
            return layout.template.strings
        try:
            cut = cut_infer_request(message, MAX_PLAIN_FIELDS, SCAN_FROM)
        except InvalidArgumentError:
            return True
        return any(cut.contents) or b"BYTES" in cut.head

    def __call__(self, message: Buffer, responder: Responder, received_ns: int) -> InferenceRequest:
        """Decodes a request, whose tensors are views of the message.

        Raises:
            InvalidArgumentError: The message is malformed or contradicts itself; texts are Triton's.
        """
        layout = self.layouts.find(message)
        if layout is None:
            return parse_request(message, responder, received_ns)
        template = layout.template
        request_id = "" if layout.request_id is None else _text(bytes(message[layout.request_id]))
        regions: NamedRegions | None = None
        inputs: dict[str, Tensor] = {}
        if template.parts is None:
            view = memoryview(message)
            for name, datatype, shape, place in layout.inputs:
                inputs[name] = Tensor(name, datatype, shape, view[place])
        else:
            regions = _in_regions(layout, message, inputs)
        request = InferenceRequest(
            template.model_name,
            template.model_version,
            inputs,
            responder,
            received_ns,
            request_id,
            template.requested,
        )
        request.signature = template
        for attribute, value in template.settings:
            setattr(request, attribute, value)
        request.named_regions = regions
        return request


MakeDecoder = Callable[[], RequestDecoder]


def _in_regions(layout: Layout, message: Buffer, inputs: dict[str, Tensor]) -> NamedRegions:
    """Fills the inputs of a request that has tensors in regions; returns these."""
    template = layout.template
    assert template.parts is not None
    view = memoryview(message)
    places = iter(layout.raw)
    regions = NamedRegions()
    for (name, datatype, shape), part in zip(template.inputs, template.parts, strict=True):
        if part is None:
            inputs[name] = Tensor(name, datatype, shape, view[next(places)])
        else:
            inputs[name] = Tensor(name, datatype, shape, b"")
            regions.inputs[name] = part
    regions.outputs.update(template.places)
    return regions


def _text(request_id: bytes) -> str:
    try:
        return request_id.decode()
    except UnicodeDecodeError:
        raise InvalidArgumentError("the request message is malformed: its id is not UTF-8") from None


def parse_request(message: Buffer, responder: Responder, received_ns: int) -> InferenceRequest:
    """Parses any request: the careful path."""
    regions = NamedRegions()
    cut: CutRequest | None = None
    try:
        if len(message) < SCAN_FROM:
            wire = inference_pb2.ModelInferRequest.FromString(bytes(message))
            raw: Any = wire.raw_input_contents
        else:
            cut = cut_infer_request(message)
            wire = inference_pb2.ModelInferRequest.FromString(cut.head)
            raw = cut.raw
    except DecodeError as error:
        raise InvalidArgumentError(f"the request message is malformed: {error}") from None
    inputs = _raw_inputs(wire, raw, regions) if raw else _typed_inputs(wire, cut, regions)
    requested: tuple[str, ...] | None = None
    outputs = wire.outputs
    if outputs:
        requested = tuple([output.name for output in outputs])
        if len(set(requested)) != len(requested):
            raise _duplicate(wire.id, "output", requested)
    request = InferenceRequest(
        wire.model_name, wire.model_version, inputs, responder, received_ns, wire.id, requested
    )
    for output in outputs:
        if output.parameters:
            place = read_output_parameters(request, output)
            if place is not None:
                regions.outputs[output.name] = place
    if wire.parameters:
        read_parameters(request, wire.parameters)
    if regions.inputs or regions.outputs:
        request.named_regions = regions
    return request


def _raw_inputs(wire: Any, raw: Any, regions: NamedRegions) -> dict[str, Tensor]:
    """Returns inputs from ``raw_input_contents``, in the same order, and from regions."""
    inputs: dict[str, Tensor] = {}
    contents = iter(raw)
    for tensor in wire.inputs:
        name = tensor.name
        if tensor.HasField("contents"):
            raise InvalidArgumentError(
                f"contents field must not be specified when using raw_input_contents for '{name}' for "
                f"model '{wire.model_name}'"
            )
        part = read_region(tensor) if tensor.parameters else None
        if part is not None:
            inputs[name] = Tensor(name, tensor.datatype, tuple(tensor.shape), b"")
            regions.inputs[name] = part
            continue
        data = next(contents, None)
        if data is None:
            raise _no_data(name, wire.model_name)
        inputs[name] = Tensor(name, tensor.datatype, tuple(tensor.shape), data)
    if len(inputs) != len(wire.inputs):
        raise _duplicate(wire.id, "input", [tensor.name for tensor in wire.inputs])
    return inputs


def _typed_inputs(wire: Any, cut: CutRequest | None, regions: NamedRegions) -> dict[str, Tensor]:
    """Returns inputs from their typed ``contents``, which may be cut out, and from regions."""
    inputs: dict[str, Tensor] = {}
    for index, tensor in enumerate(wire.inputs):
        name = tensor.name
        part = read_region(tensor) if tensor.parameters else None
        if part is None:
            pieces = None if cut is None else cut.contents[index]
            inputs[name] = _typed_tensor(tensor, pieces, wire.model_name)
            continue
        if tensor.HasField("contents"):
            raise InvalidArgumentError(
                f"unexpected 'content' provided when using shared memory for input tensor '{name}' for model "
                f"'{wire.model_name}'"
            )
        inputs[name] = Tensor(name, tensor.datatype, tuple(tensor.shape), b"")
        regions.inputs[name] = part
    if len(inputs) != len(wire.inputs):
        raise _duplicate(wire.id, "input", [tensor.name for tensor in wire.inputs])
    return inputs


def _duplicate(request_id: str, kind: str, names: Sequence[str]) -> InvalidArgumentError:
    seen = Counter(names)
    name = next(name for name in names if seen[name] > 1)
    return InvalidArgumentError(f"{id_prefix(request_id)}{kind} '{name}' already exists in request")


def _no_data(name: str, model_name: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"unable to find data for input tensor '{name}' for model '{model_name}' in request."
    )


def _typed_tensor(tensor: Any, pieces: list[memoryview] | None, model_name: str) -> Tensor:
    """Returns a tensor from typed ``contents``, or from the pieces cut out of them."""
    name, datatype = tensor.name, tensor.datatype
    shape = tuple(tensor.shape)
    if not tensor.HasField("contents"):
        if 0 in shape:
            return Tensor(name, datatype, shape, b"")
        raise _no_data(name, model_name)
    cut: TypedContents | None = None
    if pieces is None:
        filled = [field.name for field, _ in tensor.contents.ListFields()]
    else:
        cut = TypedContents(pieces, max_strings=max(prod(shape), 0) + 1)
        filled = cut.filled
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
    if cut is not None:
        return Tensor(name, datatype, shape, cut.data(expected, NUMPY_DTYPES[datatype]))
    elements = getattr(tensor.contents, expected)
    data: Buffer
    if datatype == "BYTES":
        data = encode_bytes(elements)
    else:
        # Through the field's width: values that do not fit the datatype are truncated, as in Triton.
        wide = np.array(elements, dtype=NUMPY_DTYPES[_FIELD_DATATYPE[expected]])
        data = wide.astype(NUMPY_DTYPES[datatype]).tobytes()
    return Tensor(name, datatype, shape, data)
