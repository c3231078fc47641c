"""Encodes infer responses: the JSON, and the binary tensors behind it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import orjson

from conch.core.compiled import mypyc_attr
from conch.core.errors import ConchError, InternalError, InvalidArgumentError, UnsupportedError
from conch.core.recognition import Table
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.response_errors import unsendable, wrong_parameter
from conch.core.tensor import Array, Buffer, Tensor, copied
from conch.frontends.http.flow_control import AT_ONCE_BYTES
from conch.frontends.http.http_exchange import Headers, Reply
from conch.frontends.http.infer.compression import compressed
from conch.frontends.http.json_body import JSON, error_reply
from conch.frontends.yield_gil import yield_gil
from conch.memory.region_bindings import PlacedTensor

HEAD_LENGTH: Final = b"inference-header-content-length"
"""The header with the length of the JSON before binary tensors; 0 for a raw request."""
_OCTETS = (b"content-type", b"application/octet-stream")

InferReply = Reply | Callable[[], Reply]
"""A reply, or a slow function that builds it."""


@mypyc_attr(native_class=False)
class UnsupportedEncodingError(UnsupportedError):
    """The request has an unsupported Content-Encoding."""


def failure(error: ConchError) -> Reply:
    """Builds an error response."""
    reply = error_reply(error)
    if isinstance(error, UnsupportedEncodingError):
        reply.headers.append((b"accept-encoding", b"gzip, deflate"))
    return reply


@dataclass(slots=True)
class BinaryOutputs:
    """Outputs to send as binary; the others are JSON.

    Attributes:
        binary: Default for outputs not in `named`.
        named: Choice per output name.
    """

    binary: bool
    named: dict[str, bool] = field(default_factory=dict)


_SLICE = 32 * 1024
_QUICK_COMPRESSION = 16 * 1024
_ESCAPED = re.compile(rb'["\\\x00-\x1f]')
_INFINITIES = {"inf": b"Infinity", "-inf": b"-Infinity", "nan": b"NaN"}


class LongOutputError(Exception):
    """An output takes too long to encode on the model's thread."""


class _Described(Table[tuple[str, str, tuple[int, ...], int], bytes]):
    """JSON of tensors up to their elements, by name, datatype, shape and size of binary elements, or -1."""

    def __missing__(self, key: tuple[str, str, tuple[int, ...], int]) -> bytes:
        name, datatype, shape, size = key
        data = b',"data":[' if size < 0 else b',"parameters":{"binary_data_size":%d}}' % size
        return self.keep(key, _start(name, datatype, shape) + data)


class ResponseEncoder:
    """Encodes responses; caches the JSON of names, datatypes and shapes."""

    def __init__(self) -> None:
        self._models: Table[tuple[str, str], bytes] = Table()
        self._outputs = _Described()

    def __call__(
        self,
        request: InferenceRequest,
        response: InferenceResponse,
        wanted: BinaryOutputs,
        encoding: bytes | None = None,
        quick: bool = False,
    ) -> InferReply:
        """Encodes one response.

        Args:
            request: The answered request.
            response: A response without an error.
            wanted: Outputs that are sent in binary form.
            encoding: Compresses the body; None for not.
            quick: True if the thread must not compute for long: a long body is compressed later.

        Returns:
            The reply, or with `quick` a slow function that compresses it.

        Raises:
            ConchError: Something in it can't be sent; texts are Triton's.
            LongOutputError: An output takes long to encode, with `quick`.
        """
        model = request.model
        assert model is not None, "only a request that has been submitted is answered"
        key = (model.spec.name, model.version_text)
        head = self._models.get(key)
        if head is None:
            head = b'"model_name":%b,"model_version":%b' % (orjson.dumps(key[0]), orjson.dumps(key[1]))
            self._models.keep(key, head)
        parts = [b'{"id":%b,%b' % (orjson.dumps(request.id), head) if request.id else b"{" + head]
        if response.parameters:
            parts.append(b',"parameters":' + _parameters(response.parameters, key[0]))
        binary: list[Buffer] = []
        separator = b',"outputs":['
        named, outputs = wanted.named, self._outputs
        for tensor in response.outputs:
            parts.append(separator)
            separator = b","
            if type(tensor) is PlacedTensor:
                parts.append(_start(tensor.name, tensor.datatype, tensor.shape) + b"}")
            elif named.get(tensor.name, wanted.binary):
                data = tensor.data
                size = data.nbytes if isinstance(data, memoryview) else len(data)
                parts.append(outputs[tensor.name, tensor.datatype, tensor.shape, size])
                if size:
                    binary.append(data)
            else:
                parts.append(outputs[tensor.name, tensor.datatype, tensor.shape, -1])
                write_elements(tensor, parts, quick)
                parts.append(b"]}")
        parts.append(b"]}" if response.outputs else b',"outputs":[]}')
        headers = [_OCTETS, (HEAD_LENGTH, b"%d" % sum(map(len, parts)))] if binary else [JSON]
        body: list[Buffer] = [*parts, *binary]
        size = sum(map(len, body))
        if encoding is None:
            # Copied, as models may reuse their output buffers.
            return Reply(
                200, headers, b"".join(body) if size <= AT_ONCE_BYTES else [copied(part) for part in body]
            )
        headers.append((b"content-encoding", encoding))
        if quick and size > _QUICK_COMPRESSION:
            body = [*parts, *map(copied, binary)]
            return lambda: _packed(headers, body, encoding)
        return _packed(headers, body, encoding)

    def answer(
        self,
        request: InferenceRequest,
        response: InferenceResponse | None,
        wanted: BinaryOutputs,
        encoding: bytes | None,
    ) -> InferReply:
        """Encodes a response, or the error of one that can't be sent; the thread must not compute for long.

        Returns:
            The reply, or a slow function that builds it and raises ConchError.
        """
        try:
            if response is None:
                raise InternalError("expected a single response, got 0")  # Triton's text
            if response.error is not None:
                return failure(response.error)
            try:
                return self(request, response, wanted, encoding, quick=True)
            except LongOutputError:
                # The model's thread goes on; the model may write to its arrays then.
                outputs = [tensor.detached(tensor.name) for tensor in response.outputs]
                kept = InferenceResponse(outputs, parameters=response.parameters)
                return partial(self._encode_long, request, kept, wanted, encoding)
        except Exception as error:  # boundary: outputs that user code has made
            return failure(unsendable(request.model_name, response, error))

    def _encode_long(
        self,
        request: InferenceRequest,
        response: InferenceResponse,
        wanted: BinaryOutputs,
        encoding: bytes | None,
    ) -> Reply:
        try:
            reply = self(request, response, wanted, encoding)
        except Exception as error:  # boundary: outputs that user code has made
            raise unsendable(request.model_name, response, error) from None
        assert isinstance(reply, Reply)
        return reply


def _packed(headers: Headers, body: list[Buffer], encoding: bytes) -> Reply:
    parts = compressed(body, encoding)
    short = sum(map(len, parts)) <= AT_ONCE_BYTES
    return Reply(200, headers, b"".join(parts) if short else parts)


def _start(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    dims = b",".join(b"%d" % dim for dim in shape)
    return b'{"name":%b,"datatype":"%b","shape":[%b]' % (orjson.dumps(name), datatype.encode(), dims)


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


def write_elements(tensor: Tensor, parts: list[bytes], quick: bool = False) -> None:
    """Writes the elements of a tensor as JSON, flat and without brackets.

    Written in slices, with the GIL released in between.

    Args:
        tensor: The tensor.
        parts: Gets what is written.
        quick: True if the thread must not compute for long.

    Raises:
        InvalidArgumentError: JSON has nothing for the datatype.
        LongOutputError: There are many elements, with `quick`.
    """
    if tensor.datatype in ("FP16", "BF16"):
        raise InvalidArgumentError(
            f"sending {tensor.datatype} data via JSON is not supported. Please use the binary data format "
            f"for output"
        )
    array = np.ascontiguousarray(tensor.numpy()).ravel()
    if quick and array.size > _SLICE:
        raise LongOutputError
    if not array.flags.aligned:
        array = array.copy()
    for start in range(0, array.size or 1, _SLICE):
        piece = array[start : start + _SLICE]
        if start:
            yield_gil()
            parts.append(b",")
        if tensor.datatype == "BYTES":
            parts.append(_strings(piece))
            continue
        text = orjson.dumps(piece, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        parts.append(_with_infinities(text, piece) if b"null" in text else text)


def _with_infinities(text: bytes, array: Array) -> bytes:
    """Puts the numbers that are not finite in place of the nulls that orjson writes for them."""
    pieces = text.split(b"null")
    between = [_INFINITIES[str(value)] for value in array[~np.isfinite(array)].tolist()]
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
