"""Encodes the responses to a batch, or one response, in messages between server and worker; flow control.

    =========================  =====================================================================
    part                       contents
    =========================  =====================================================================
    head                       times, bytes copied, count, length of an error, columns
    error of the whole batch   JSON, instead of everything else
    flags, if not all plain    for each response: one byte
    texts, if there are any    for each response: length; then its error or its parameters as JSON
    tensors                    of the responses that have some; see `tensor_layouts`
    =========================  =====================================================================

A plain response has tensors, and nothing else. Used by: the worker connection and the worker host.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from conch.core.errors import ConchError, without_traceback
from conch.core.request import InferenceResponse
from conch.core.tensor import Tensor
from conch.workers.protocol.received_message import ReceivedMessage
from conch.workers.protocol.wire import (
    MOST_INLINE,
    Reader,
    WireError,
    check_parameters,
    decode_error,
    decode_json,
    encode_error,
    encode_json,
)

PRESENT = 1
"""There is a response."""
ERROR = 2
"""It is an error."""
FINAL = 4
"""It is the last of its request."""
RESCHEDULED = 8
"""The request runs again."""
FAILED = 16
"""The model itself responded with the error; of a reply: the server refused the call."""

_HEAD = struct.Struct("<QQQIIB")
_FLAGS, _TEXTS = 1, 2
_HAS_TENSORS = (PRESENT | ERROR, PRESENT)

Times = tuple[int, int, int]
"""When the inputs were ready for the model, when it had its results (0 for never), and bytes copied."""

_NO_TIMES: Times = (0, 0, 0)


class ResponseColumns(NamedTuple):
    """Decoded responses.

    Attributes:
        times: See `Times`.
        error: The error of the whole batch; then there are no responses.
        responses: A response for each request; None where the model responds later, or the request runs
            again. A response whose memory can't be opened here is an `UnreachableError`.
        flags: Of each response; None if all are plain.
    """

    times: Times
    error: ConchError | None
    responses: list[InferenceResponse | None]
    flags: Sequence[int] | None


def flags_of(response: InferenceResponse | None, final: bool = False, failed: bool = False) -> int:
    """The flags of a response."""
    flags = (FINAL if final else 0) | (FAILED if failed else 0)
    if response is None:
        return flags
    return flags | PRESENT if response.error is None else flags | PRESENT | ERROR


def text_of(response: InferenceResponse | None) -> bytes:
    """The text of a response: its error or its parameters."""
    if response is None:
        return b""
    if response.error is not None:
        return encode_error(response.error)
    return encode_json(dict(response.parameters)) if response.parameters else b""


def encode_responses(
    count: int,
    tensors: bytes,
    flags: Sequence[int] | None = None,
    texts: Sequence[bytes] | None = None,
    times: Times = _NO_TIMES,
) -> bytes:
    """Encodes responses, with the description of their tensors.

    Args:
        count: Number of responses.
        tensors: Describes the tensors of those that have some; see `Payload.fields`.
        flags: Of each response; None if all are plain.
        texts: Of each response; None if there are none.
        times: See `Times`.
    """
    columns = (0 if flags is None else _FLAGS) | (0 if texts is None else _TEXTS)
    parts = [_HEAD.pack(*times, count, 0, columns)]
    if flags is not None:
        parts.append(bytes(flags))
    if texts is not None:
        parts.append(struct.pack(f"<{count}I", *map(len, texts)))
        parts += texts
    parts.append(tensors)
    return b"".join(parts)


def encode_failure(error: ConchError, times: Times = _NO_TIMES) -> bytes:
    """Encodes the error of a whole batch."""
    text = encode_error(error)
    return _HEAD.pack(*times, 0, len(text), 0) + text


def decode_responses(received: ReceivedMessage, expected: int) -> ResponseColumns:
    """Reads the responses to `expected` requests, which are the whole message.

    Raises:
        WireError: They are malformed, or their number is wrong.
    """
    reader = received.reader
    *times, count, length, columns = reader.unpack(_HEAD)
    if length:
        error = decode_error(reader.take(length))
        reader.end()
        return ResponseColumns((times[0], times[1], times[2]), error, [], None)
    if count != expected:
        raise WireError(f"{count} responses to {expected} requests")
    flags = bytes(reader.take(count)) if columns & _FLAGS else None
    texts: Sequence[bytes] | None = None
    if columns & _TEXTS:
        texts = [bytes(reader.take(each)) for each in reader.unpack(struct.Struct(f"<{count}I"))]
    responses: list[InferenceResponse | None]
    if flags is None and texts is None:
        responses = list(map(InferenceResponse, received.lists(count)))
        unreachable = received.unreachable
    else:
        responses = _with_texts(received, flags or bytes([PRESENT]) * count, texts or [b""] * count)
        unreachable = received.unreachable
    if unreachable:
        present = [response for response in responses if response is not None and response.error is None]
        for index, failure in unreachable.items():
            present[index].error = without_traceback(failure)
    return ResponseColumns((times[0], times[1], times[2]), None, responses, flags)


def _with_texts(
    received: ReceivedMessage, flags: bytes, texts: Sequence[bytes]
) -> list[InferenceResponse | None]:
    """Responses of which some are errors, have parameters, or are absent."""
    has_tensors = [each & _HAS_TENSORS[0] == _HAS_TENSORS[1] for each in flags]
    lists = iter(received.lists(sum(has_tensors)))
    responses: list[InferenceResponse | None] = []
    for each, text, tensors in zip(flags, texts, has_tensors, strict=True):
        if each & ERROR:
            responses.append(InferenceResponse([], decode_error(text)))
        elif tensors:
            parameters = check_parameters(decode_json(text)) if text else None
            responses.append(InferenceResponse(next(lists), None, parameters))
        else:
            responses.append(None)
    return responses


# --- flow control ----------------------------------------------------------------------------------------

WINDOW = 96
"""Units that a worker may send for one request of a decoupled model before the server grants more."""

CREDIT_AT = WINDOW // 4
"""Units after whose delivery the server grants them again."""

_UNIT_BYTES = 64 * 1024
_BLOCK_UNITS = 12
"""At most eight blocks of a request are in flight at a time; each takes a descriptor."""

_CREDIT = struct.Struct("<I")


def units(tensors: Sequence[Tensor]) -> int:
    """Units that a response takes: one if it is small, more if it needs a block."""
    nbytes = 0
    for tensor in tensors:
        nbytes += tensor.nbytes
    return 1 if nbytes <= MOST_INLINE else _BLOCK_UNITS + nbytes // _UNIT_BYTES


def encode_credit(units: int) -> bytes:
    """Encodes the units that the worker may send in addition."""
    return _CREDIT.pack(units)


def decode_credit(fields: memoryview) -> int:
    """The units that the worker may send in addition.

    Raises:
        WireError: The fields are malformed.
    """
    (units,) = Reader(fields).unpack(_CREDIT)
    return int(units)
