"""Requests as the bytes that are sent, made once and sent many times."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from conch.protocol import inference_pb2


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a shared-memory region of the server."""

    region: str
    offset: int
    size: int

    def parameters(self) -> dict[str, Any]:
        """The parameters of a tensor that is there."""
        return {
            "shared_memory_region": self.region,
            "shared_memory_byte_size": self.size,
            **({"shared_memory_offset": self.offset} if self.offset else {}),
        }


@dataclass(frozen=True, slots=True)
class InputTensor:
    """One tensor of a request.

    Attributes:
        name: The input's name.
        datatype: Triton's, as ``FP32``.
        shape: With the batch dimension.
        data: Row-major; texts each after their length as 4 bytes, little endian.
        place: Place in shared memory of the data; None if it is sent.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class ReadyRequest:
    """A request to be sent.

    Attributes:
        body: A gRPC message without its prefix, or the body of an HTTP request.
        head_bytes: Length of the JSON before the tensors of an HTTP body; 0 for gRPC, and for JSON only.
        expected: Outputs that the response must have, by name.
        row: Number of its data.
        sequence_id: 0 for none.
    """

    body: bytes
    head_bytes: int = 0
    expected: Mapping[str, bytes] | None = None
    row: int = 0
    sequence_id: int = 0

    def marked(self, mark: bytes, sequence_id: int) -> ReadyRequest:
        """The request with the parameters of a `sequence_mark`."""
        if not self.head_bytes:
            body = self.body + mark  # joined messages are merged
            return ReadyRequest(body, 0, self.expected, self.row, sequence_id)
        at = self.head_bytes - len("}}")  # the JSON ends with its parameters, of which there is one
        body = b"".join((self.body[:at], mark, self.body[at:]))
        return ReadyRequest(body, self.head_bytes + len(mark), self.expected, self.row, sequence_id)


def sequence_mark(http: bool, sequence_id: int | str, first: bool, last: bool) -> bytes:
    """The parameters of a request of a sequence, as `ReadyRequest.marked` adds them."""
    parameters: dict[str, Any] = {"sequence_id": sequence_id}
    if first:
        parameters["sequence_start"] = True
    if last:
        parameters["sequence_end"] = True
    if http:
        return f",{json.dumps(parameters, separators=(',', ':'))[1:-1]}".encode()
    message = inference_pb2.ModelInferRequest()
    _set_parameters(message, parameters)
    return message.SerializeToString()


def grpc_request(
    model: str,
    version: str,
    tensors: Sequence[InputTensor],
    parameters: Mapping[str, Any],
    outputs: Mapping[str, Place],
) -> ReadyRequest:
    """A ModelInferRequest with raw contents; outputs that are named go to their places."""
    message = inference_pb2.ModelInferRequest(model_name=model, model_version=version)
    for tensor in tensors:
        made = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if tensor.place is None:
            message.raw_input_contents.append(tensor.data)
        else:
            _set_parameters(made, tensor.place.parameters())
    for name, place in outputs.items():
        _set_parameters(message.outputs.add(name=name), place.parameters())
    _set_parameters(message, parameters)
    return ReadyRequest(message.SerializeToString())


def _set_parameters(message: Any, parameters: Mapping[str, Any]) -> None:
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param"}.get(
            type(value), "string_param"
        )
        setattr(message.parameters[name], kind, value)


def http_request(
    tensors: Sequence[InputTensor], parameters: Mapping[str, Any], outputs: Mapping[str, Place]
) -> ReadyRequest:
    """An infer request with binary data, whose outputs are binary, too, or go to their places."""
    head: dict[str, Any] = {
        "inputs": [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": list(tensor.shape),
                "parameters": {"binary_data_size": len(tensor.data)}
                if tensor.place is None
                else tensor.place.parameters(),
            }
            for tensor in tensors
        ]
    }
    if outputs:
        head["outputs"] = [
            {"name": name, "parameters": place.parameters()} for name, place in outputs.items()
        ]
    head["parameters"] = {"binary_data_output": True, **parameters}
    text = json.dumps(head, separators=(",", ":")).encode()
    sent = (tensor.data for tensor in tensors if tensor.place is None)
    return ReadyRequest(b"".join((text, *sent)), len(text))


def json_request(tensors: Sequence[InputTensor], parameters: Mapping[str, Any]) -> ReadyRequest:
    """An infer request with tensors as JSON, whose outputs are JSON, too.

    Raises:
        ValueError: A value has no JSON: NaN, infinity, or bytes that are no text.
    """
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
            "data": tensor_values(tensor),
        }
        for tensor in tensors
    ]
    text = json.dumps(
        {"inputs": inputs, "parameters": dict(parameters)},
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    )
    return ReadyRequest(text.encode())


def tensor_values(tensor: InputTensor, errors: str = "strict") -> list[Any]:
    """Its numbers or texts, flat; `errors` is that of `bytes.decode`.

    Raises:
        ValueError: Bytes are no text.
    """
    if tensor.datatype == "BYTES":
        return [text.decode(errors=errors) for text in texts_of(tensor.data)]
    if tensor.datatype == "BF16":
        wide = np.frombuffer(tensor.data, "<u2").astype(np.uint32) << 16
        return list(wide.view(np.float32).tolist())
    return list(np.frombuffer(tensor.data, dtype_of(tensor.datatype)).tolist())


def texts_of(data: bytes) -> list[bytes]:
    """The texts of a tensor's bytes."""
    found = []
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        found.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return found


def texts_data(texts: Sequence[bytes]) -> bytes:
    """Texts as a tensor has them."""
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def array_data(values: Any, datatype: str) -> bytes:
    """Numbers as a tensor of this datatype has them.

    Raises:
        ValueError: A value does not fit.
    """
    if datatype == "BF16":
        found = np.asarray(values, np.float32)
        return (found.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    kind = dtype_of(datatype)
    found = np.asarray(values)
    if kind.kind in "iu" and found.dtype.kind == "f" and not (found == np.trunc(found)).all():
        raise ValueError(f"{datatype} takes whole numbers only")
    cast = found.astype(kind)
    if kind.kind in "iu" and not np.array_equal(cast.astype(object), found.astype(object)):
        raise ValueError(f"a value is out of the range of {datatype}")
    return cast.tobytes()


def dtype_of(datatype: str) -> np.dtype[Any]:
    """The numpy type of a datatype that has numbers.

    Raises:
        ValueError: There is none.
    """
    names = {"BOOL": "?", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}
    for bits in (8, 16, 32, 64):
        names[f"INT{bits}"] = f"<i{bits // 8}"
        names[f"UINT{bits}"] = f"<u{bits // 8}"
    if datatype not in names:
        raise ValueError(f"there are no numbers of datatype {datatype}")
    return np.dtype(names[datatype])
