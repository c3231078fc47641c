"""Responses to HTTP bodies: the JSON, and the binary tensors behind it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

from conch.core.admission import ExitingError
from conch.core.errors import ConchError, InternalError, InvalidArgumentError, UnsupportedError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.response_errors import wrong_parameter
from conch.core.tensor import Array, Buffer, Tensor, copied
from conch.frontends.http.flow_control import AT_ONCE_BYTES, Body, UnreadBodyError, body_size
from conch.frontends.http.infer.compression import compressed
from conch.frontends.http.infer.infer_headers import HEAD_LENGTH
from conch.frontends.http.json_body import error_body
from conch.frontends.http.yield_gil import yield_gil
from conch.memory.region_bindings import PlacedTensor

Headers = list[tuple[bytes, bytes]]

_JSON: Final = (b"content-type", b"application/json")
_OCTETS: Final = (b"content-type", b"application/octet-stream")


class Reply(NamedTuple):
    """An HTTP response, with Content-Length among the headers.

    Attributes:
        status: HTTP status.
        headers: Headers in order.
        body: The body.
        closes: True to close the connection.
    """

    status: int
    headers: Headers
    body: Body
    closes: bool = False


Answer = Reply | Callable[[], Reply]
"""A reply, or a slow function that builds it."""


class UnsupportedEncodingError(UnsupportedError):
    """The request has an unsupported Content-Encoding."""


def success(head: list[bytes], tail: list[Buffer], encoding: bytes | None) -> Reply:
    """Builds a response of JSON and binary tensors, compressed if requested."""
    parts = [*head, *tail]
    headers = [_OCTETS, (HEAD_LENGTH, b"%d" % body_size(head))] if tail else [_JSON]
    if encoding is not None:
        parts = compressed(parts, encoding)
        headers.append((b"content-encoding", encoding))
    size = body_size(parts)
    headers.append((b"content-length", b"%d" % size))
    # Copied, as models may reuse their output buffers.
    body: Body = b"".join(parts) if size <= AT_ONCE_BYTES else [copied(part) for part in parts]
    return Reply(200, headers, body)


def failure(error: ConchError) -> Reply:
    """Builds an error response."""
    body = error_body(error.message)
    headers = [_JSON, (b"content-length", b"%d" % len(body))]
    if error.retry_after_ms is not None:
        headers.append((b"retry-after", b"%d" % -(-error.retry_after_ms // 1000)))
    if isinstance(error, UnsupportedEncodingError):
        headers.append((b"accept-encoding", b"gzip, deflate"))
    return Reply(error.http_status, headers, body, isinstance(error, UnreadBodyError | ExitingError))


@dataclass(slots=True)
class BinaryOutputs:
    """Outputs to send as binary; the others are JSON.

    Attributes:
        binary: Default for outputs not in `named`.
        named: Choice per output name.
    """

    binary: bool
    named: dict[str, bool] = field(default_factory=dict)


_MOST_CACHED = 4096
_SLICE = 32 * 1024
_ESCAPED = re.compile(rb'["\\\x00-\x1f]')
_INFINITIES = {"inf": b"Infinity", "-inf": b"-Infinity", "nan": b"NaN"}


class ResponseEncoder:
    """Encodes response bodies; caches the JSON of names, datatypes and shapes."""

    def __init__(self) -> None:
        self._models: dict[tuple[str, str], bytes] = {}
        self._outputs: dict[tuple[str, str, tuple[int, ...], int], bytes] = {}

    def __call__(
        self, request: InferenceRequest, response: InferenceResponse, wanted: BinaryOutputs
    ) -> tuple[list[bytes], list[Buffer]]:
        """Encodes one response.

        Args:
            request: The answered request.
            response: A response without an error.
            wanted: Which outputs are sent in binary form.

        Returns:
            The JSON in pieces, and the bytes of binary outputs that follow it.

        Raises:
            ConchError: Something in it can't be sent; texts are Triton's.
        """
        model = request.model
        assert model is not None, "only a request that has been submitted is answered"
        key = (model.spec.name, model.version_text)
        head = self._models.get(key)
        if head is None:
            head = b'"model_name":%b,"model_version":%b' % (orjson.dumps(key[0]), orjson.dumps(key[1]))
            _remember(self._models, key, head)
        parts = [b'{"id":%b,%b' % (orjson.dumps(request.id), head) if request.id else b"{" + head]
        if response.parameters:
            parts.append(b',"parameters":' + _parameters(response.parameters, key[0]))
        binary: list[Buffer] = []
        separator = b',"outputs":['
        named = wanted.named
        for tensor in response.outputs:
            parts.append(separator)
            separator = b","
            if type(tensor) is PlacedTensor:
                parts.append(_start(tensor) + b"}")
            elif named.get(tensor.name, wanted.binary):
                data = tensor.data
                size = data.nbytes if isinstance(data, memoryview) else len(data)
                parts.append(self._binary(tensor, size))
                if size:
                    binary.append(data)
            else:
                self._json(tensor, parts)
        parts.append(b"]}" if response.outputs else b',"outputs":[]}')
        return parts, binary

    def _binary(self, tensor: Tensor, size: int) -> bytes:
        key = (tensor.name, tensor.datatype, tensor.shape, size)
        found = self._outputs.get(key)
        if found is None:
            found = _start(tensor) + b',"parameters":{"binary_data_size":%d}}' % size
            _remember(self._outputs, key, found)
        return found

    def _json(self, tensor: Tensor, parts: list[bytes]) -> None:
        key = (tensor.name, tensor.datatype, tensor.shape, -1)
        found = self._outputs.get(key)
        if found is None:
            found = _start(tensor) + b',"data":['
            _remember(self._outputs, key, found)
        parts.append(found)
        write_elements(tensor, parts)
        parts.append(b"]}")


def _start(tensor: Tensor) -> bytes:
    return b'{"name":%b,"datatype":"%b","shape":[%b]' % (
        orjson.dumps(tensor.name),
        tensor.datatype.encode(),
        b",".join(b"%d" % dim for dim in tensor.shape),
    )


def _remember(cache: dict[Any, bytes], key: Any, value: bytes) -> None:
    if len(cache) >= _MOST_CACHED:
        cache.clear()  # shapes that never repeat must not fill the memory
    cache[key] = value


def _parameters(parameters: Any, model: str) -> bytes:
    for key, value in parameters.items():
        if isinstance(value, bytes):
            raise UnsupportedError(
                "Response parameter of type 'TRITONSERVER_PARAMETER_BYTES' is not currently supported"
            )
        if not isinstance(value, bool | int | float | str):
            raise wrong_parameter(model, key, value)
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise wrong_parameter(model, key, value)
    return b"{%b}" % b",".join(
        b"%b:%b" % (orjson.dumps(key), _scalar(value)) for key, value in parameters.items()
    )


def _scalar(value: Any) -> bytes:
    return _INFINITIES.get(str(value)) or orjson.dumps(value) if type(value) is float else orjson.dumps(value)


def is_long(response: InferenceResponse, wanted: BinaryOutputs) -> bool:
    """True if encoding the outputs as JSON takes long."""
    return any(
        type(tensor) is not PlacedTensor
        and not wanted.named.get(tensor.name, wanted.binary)
        and (tensor.numpy().size if tensor.datatype == "BYTES" else tensor.nbytes // 4) > _SLICE
        for tensor in response.outputs
    )


def write_elements(tensor: Tensor, parts: list[bytes]) -> None:
    """Writes the elements of a tensor as JSON, flat and without brackets.

    Written in slices, with the GIL released in between.

    Args:
        tensor: The tensor.
        parts: Gets what is written.

    Raises:
        InvalidArgumentError: JSON has nothing for the datatype.
    """
    if tensor.datatype in ("FP16", "BF16"):
        raise InvalidArgumentError(
            f"sending {tensor.datatype} data via JSON is not supported. Please use the binary data format "
            f"for output"
        )
    array = np.ascontiguousarray(tensor.numpy()).ravel()
    if not array.flags.aligned:
        array = array.copy()
    write = _strings if tensor.datatype == "BYTES" else _numbers
    parts.append(write(array[:_SLICE]))
    for start in range(_SLICE, array.size, _SLICE):
        yield_gil()
        parts += (b",", write(array[start : start + _SLICE]))


def _numbers(array: Array) -> bytes:
    text = orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
    if array.dtype.kind != "f":
        return text
    finite = np.isfinite(array)
    if finite.all():
        return text
    # The others have been written as null.
    pieces = text.split(b"null")
    between = [_INFINITIES[str(value)] for value in array[~finite].tolist()]
    return b"".join([part for pair in zip(pieces, [*between, b""], strict=True) for part in pair])


def _strings(array: Array) -> bytes:
    elements = array.tolist()
    try:
        texts = [element.decode() if type(element) is bytes else str(element) for element in elements]
        return orjson.dumps(texts)[1:-1]
    except (UnicodeDecodeError, orjson.JSONEncodeError):
        # Bytes that are no UTF-8 go out as they are, as from Triton.
        return b",".join([_quoted(element) for element in elements])


def _quoted(element: Any) -> bytes:
    data = element if isinstance(element, bytes) else str(element).encode("utf-8", "surrogateescape")
    return b'"%b"' % _ESCAPED.sub(lambda found: orjson.dumps(found.group().decode())[1:-1], data)


def check_single(response: InferenceResponse | None) -> InferenceResponse:
    """Returns the response. Raises InternalError: the response is missing; the text is Triton's."""
    if response is None:
        raise InternalError("expected a single response, got 0")
    return response
