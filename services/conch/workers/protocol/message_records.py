"""Records in messages between server and worker: batches, requests, responses, errors, flow control.

The requests of a batch usually differ only in numbers, times and ids. Such homogeneous requests travel as
rows, after one copy of the optional fields and before one description of all tensors; others have a record
each. Responses that consist of tensors only do the same.
Used by: worker connections and the worker host.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple

from conch.core.errors import ERRORS_BY_CODE, ConchError, InternalError
from conch.core.request import InferenceRequest
from conch.core.tensor import Buffer, Tensor
from conch.workers.protocol.wire import MOST_INLINE, Reader, WireError, decode_json, encode_json

_MOST_CACHED = 512
_MOST_CACHED_BYTES = 256
"""Longer optional fields are not cached: they take memory, and rarely repeat."""

_LATEST_NS = (1 << 63) - 1
"""Later deadlines count as none."""
NO_DEADLINE = -1


def encode_error(error: ConchError) -> bytes:
    """Encodes an error's code and text."""
    record: dict[str, object] = {"code": error.code, "text": error.message}
    if error.retry_after_ms is not None:
        record["retry"] = error.retry_after_ms
    return encode_json(record)


def decode_error(fields: Buffer) -> ConchError:
    """Reads an error.

    Raises:
        WireError: It is malformed.
    """
    record = decode_json(fields)
    code, text, retry = record.get("code"), record.get("text"), record.get("retry")
    if not isinstance(code, str) or not isinstance(text, str) or not isinstance(retry, int | None):
        raise WireError("an error is a code and a text")
    error = ERRORS_BY_CODE.get(code, InternalError)(text)
    error.retry_after_ms = retry
    return error


def check_parameters(value: object) -> dict[str, bool | int | float | str] | None:
    """Parameters from decoded JSON.

    Raises:
        WireError: They are malformed.
    """
    if value is None:
        return None
    if not isinstance(value, dict) or not all(
        isinstance(item, bool | int | float | str) for item in value.values()
    ):
        raise WireError("parameters are names with a bool, a number or a text")
    return value


# --- requests --------------------------------------------------------------------------------------------

_REQUEST = struct.Struct("<QQQqIIII")

SEQUENCE_START = 1
SEQUENCE_END = 2
FILLER = 4
CANCELLED = 8
AGAIN = 16
EMPTY_FINAL = 32
"""BLS call: send a final response even if it is empty."""
BELIEVED_SINGLE = 64
"""BLS call: the caller expects one response per request."""
BELIEVED_DECOUPLED = 128
"""BLS call: the caller expects a decoupled model."""


@dataclass(slots=True)
class RequestRecord:
    """A request without its tensors: to be executed by a worker, or a BLS call of its model.

    Attributes:
        number: Its number on this socket.
        received_ns: Monotonic time at which the server received it.
        queued_ns: Monotonic time at which it was queued.
        deadline_ns: Monotonic time at which it expires, or None.
        flags: `SEQUENCE_START` and the like.
        requested: Names of the wanted outputs; None for all.
        model: For a call, name and version of the model; else empty.
    """

    number: int
    received_ns: int = 0
    queued_ns: int = 0
    deadline_ns: int | None = None
    batch_size: int = 1
    flags: int = 0
    id: str = ""
    parameters: Mapping[str, bool | int | float | str] | None = None
    correlation_id: int | str = 0
    requested: tuple[str, ...] | None = None
    priority: int = 0
    timeout_us: int = 0
    model: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Encodes the record; its tensors follow."""
        return encode_request(self, self.number, self.flags, self.model)

    @classmethod
    def decode(cls, reader: Reader) -> RequestRecord:
        """Reads a record.

        Raises:
            WireError: It is malformed.
        """
        number, received, queued, deadline, rows, flags, name, optional = reader.unpack(_REQUEST)
        until = None if deadline == NO_DEADLINE else deadline
        request_id = reader.text(name) if name else ""
        if not optional:
            return cls(number, received, queued, until, rows, flags, request_id)
        return cls(
            number, received, queued, until, rows, flags, request_id, *_read_optional(reader, optional)
        )


def encode_request(
    request: RequestRecord | InferenceRequest,
    number: int,
    flags: int,
    model: tuple[str, ...] = (),
) -> bytes:
    """Encodes a request as a `RequestRecord`; its tensors follow."""
    if request.parameters or request.correlation_id or request.priority or request.timeout_us:
        optional = _encode_optional(request, model)
    else:
        optional = _cached_optional(request.requested, model)
    name = request.id.encode("utf-8", "surrogatepass") if request.id else b""
    head = _REQUEST.pack(
        number,
        request.received_ns,
        request.queued_ns,
        _deadline(request.deadline_ns),
        request.batch_size,
        flags,
        len(name),
        len(optional),
    )
    return head + name + optional


def _deadline(time_ns: int | None) -> int:
    return NO_DEADLINE if time_ns is None or time_ns > _LATEST_NS else time_ns


def _encode_optional(request: RequestRecord | InferenceRequest, model: tuple[str, ...]) -> bytes:
    fields: dict[str, object] = {}
    if request.parameters:
        fields["parameters"] = dict(request.parameters)
    if request.correlation_id:
        fields["correlation"] = request.correlation_id
    if request.requested is not None:
        fields["requested"] = request.requested
    if request.priority:
        fields["priority"] = request.priority
    if request.timeout_us:
        fields["timeout"] = request.timeout_us
    if model:
        fields["model"] = model
    return encode_json(fields)


@lru_cache(_MOST_CACHED)
def _cached_optional(requested: tuple[str, ...] | None, model: tuple[str, ...]) -> bytes:
    fields: dict[str, object] = {}
    if requested is not None:
        fields["requested"] = requested
    if model:
        fields["model"] = model
    return encode_json(fields) if fields else b""


class _OptionalFields(NamedTuple):
    """The last fields of a `RequestRecord`, in their order."""

    parameters: Mapping[str, bool | int | float | str] | None
    correlation_id: int | str
    requested: tuple[str, ...] | None
    priority: int
    timeout_us: int
    model: tuple[str, ...]


def _read_optional(reader: Reader, length: int) -> _OptionalFields:
    text = bytes(reader.take(length))
    return _cached_parse(text) if length <= _MOST_CACHED_BYTES else _parse_optional(text)


def _parse_optional(text: bytes) -> _OptionalFields:
    fields = decode_json(text)
    return _OptionalFields(
        check_parameters(fields.get("parameters")),
        _checked(fields, "correlation", int | str, 0),
        None if fields.get("requested") is None else _names(fields, "requested"),
        _checked(fields, "priority", int, 0),
        _checked(fields, "timeout", int, 0),
        _names(fields, "model"),
    )


_cached_parse = lru_cache(_MOST_CACHED)(_parse_optional)
"""Requests share the results, so the parameters must not be changed."""


def _names(record: dict[str, Any], key: str) -> tuple[str, ...]:
    names = record.get(key, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise WireError(f"'{key}' of a request is not a list of names")
    return tuple(names)


def _checked(record: dict[str, Any], key: str, kind: Any, default: Any) -> Any:
    value = record.get(key, default)
    if value is not default and (not isinstance(value, kind) or isinstance(value, bool)):
        raise WireError(f"'{key}' of a request is {type(value).__name__}")
    return value


_BATCH = struct.Struct("<IIiq?")


class BatchRecord(NamedTuple):
    """A batch without its requests.

    Attributes:
        length: Number of requests.
        size: Their rows.
        instance: Number of the instance to run it; -1 for any.
        start_ns: Monotonic time at which the instance took it.
        homogeneous: Whether the requests follow as `encode_homogeneous` encodes them.
    """

    length: int
    size: int
    instance: int
    start_ns: int
    homogeneous: bool = False

    def encode(self) -> bytes:
        """Encodes the record; the requests follow."""
        return _BATCH.pack(*self)

    @classmethod
    def decode(cls, reader: Reader) -> BatchRecord:
        """Reads a record.

        Raises:
            WireError: It is malformed.
        """
        return cls(*reader.unpack(_BATCH))


_HOMOGENEOUS = struct.Struct("<I")
_ROW = struct.Struct("<QQQqII")
_ID_BYTES = itemgetter(5)

Row = tuple[int, int, int, int, int, int]
"""A homogeneous request: number, received_ns, queued_ns, deadline or `NO_DEADLINE`, rows, bytes of its id."""


def encode_homogeneous(requests: Sequence[InferenceRequest], numbers: Sequence[int]) -> bytes | None:
    """Encodes the requests of a batch as rows; one list of tensors for all of them follows.

    Returns:
        None if a request has other fields: all need records then.
    """
    requested = requests[0].requested
    pack = _ROW.pack
    rows: list[bytes] = []
    names: list[bytes] = []
    for request, number in zip(requests, numbers, strict=True):
        if (
            request.requested != requested
            or request.parameters
            or request.correlation_id
            or request.priority
            or request.timeout_us
            or request.sequence_start
            or request.sequence_end
            or request.cancelled
            or request.filler
        ):
            return None
        length = 0
        if request.id:
            name = request.id.encode("utf-8", "surrogatepass")
            names.append(name)
            length = len(name)
        rows.append(
            pack(
                number,
                request.received_ns,
                request.queued_ns,
                NO_DEADLINE if request.deadline_ns is None else _deadline(request.deadline_ns),
                request.batch_size,
                length,
            )
        )
    optional = _cached_optional(requested, ())
    return b"".join([_HOMOGENEOUS.pack(len(optional)), optional, *rows, *names])


def decode_homogeneous(
    reader: Reader, length: int
) -> tuple[tuple[str, ...] | None, list[Row], Iterable[str]]:
    """Reads homogeneous requests: the wanted outputs of all, their rows, their ids.

    Raises:
        WireError: They are malformed.
    """
    (optional,) = reader.unpack(_HOMOGENEOUS)
    requested = _read_optional(reader, optional).requested if optional else None
    rows: list[Any] = list(_ROW.iter_unpack(reader.take(length * _ROW.size)))
    if any(map(_ID_BYTES, rows)):
        return requested, rows, [reader.text(_ID_BYTES(row)) for row in rows]
    return requested, rows, repeat("", length)


# --- responses -------------------------------------------------------------------------------------------

_RESPONSE = struct.Struct("<BBHI")
_HAS_RESPONSE, _HAS_ERROR, _FINAL, _RESCHEDULED, _FAILED = 1, 2, 4, 8, 16


@dataclass(slots=True)
class ResponseRecord:
    """A response without its tensors, or the reason that there is none.

    Attributes:
        present: Whether there is a response; its tensors follow unless it is an error.
        final: Whether it is the last of its request.
        rescheduled: Whether the request runs again.
        failed: Whether the model itself responded with the error.
    """

    present: bool = False
    error: ConchError | None = None
    parameters: Mapping[str, bool | int | float | str] | None = None
    final: bool = False
    rescheduled: bool = False
    failed: bool = False

    @property
    def has_tensors(self) -> bool:
        """Whether tensors follow."""
        return self.present and self.error is None

    def encode(self) -> bytes:
        """Encodes the record."""
        flags = (
            (_HAS_RESPONSE if self.present else 0)
            | (_HAS_ERROR if self.error is not None else 0)
            | (_FINAL if self.final else 0)
            | (_RESCHEDULED if self.rescheduled else 0)
            | (_FAILED if self.failed else 0)
        )
        optional = b""
        if self.error is not None:
            optional = encode_error(self.error)
        elif self.parameters:
            optional = encode_json(dict(self.parameters))
        return _RESPONSE.pack(flags, 0, 0, len(optional)) + optional

    @classmethod
    def decode(cls, reader: Reader) -> ResponseRecord:
        """Reads a record.

        Raises:
            WireError: It is malformed.
        """
        flags, _, _, optional = reader.unpack(_RESPONSE)
        if flags == _HAS_RESPONSE and not optional:
            return _PLAIN
        record = cls(
            bool(flags & _HAS_RESPONSE),
            None,
            None,
            bool(flags & _FINAL),
            bool(flags & _RESCHEDULED),
            bool(flags & _FAILED),
        )
        if flags & _HAS_ERROR:
            record.error = decode_error(reader.take(optional))
        elif optional:
            record.parameters = check_parameters(decode_json(reader.take(optional)))
        return record


_PLAIN = ResponseRecord(True)
"""Most responses; shared, so decoded records must not be changed."""

PLAIN_RESPONSE = _PLAIN.encode()
"""A response of tensors only."""

LAST_RESPONSE = ResponseRecord(True, final=True).encode()
"""A response of tensors only, the last of its request."""

_DONE = struct.Struct("<QQQII?")


class DoneRecord(NamedTuple):
    """The outcome of a batch, without the responses.

    Attributes:
        input_end_ns: Monotonic time at which the inputs were ready for the model; 0 if never.
        output_start_ns: Monotonic time at which the model had its results; 0 if never.
        bytes_copied: Bytes copied in the worker.
        length: Number of responses that follow.
        error: Bytes of the error that follows; 0 for none.
        homogeneous: Whether all responses are tensors only, with one list for all of them.
    """

    input_end_ns: int
    output_start_ns: int
    bytes_copied: int
    length: int
    error: int
    homogeneous: bool = False

    def encode(self) -> bytes:
        """Encodes the record."""
        return _DONE.pack(*self)

    @classmethod
    def decode(cls, reader: Reader) -> DoneRecord:
        """Reads a record.

        Raises:
            WireError: It is malformed.
        """
        return cls(*reader.unpack(_DONE))


# --- flow control ----------------------------------------------------------------------------------------

WINDOW = 96
"""Units that a worker may send for one request of a decoupled model before the server grants more."""

CREDIT_AT = WINDOW // 4
"""Units after whose delivery the server grants them again."""

_UNIT_BYTES = 64 * 1024
_BLOCK_UNITS = 12
"""At most eight blocks of a request are in flight at a time; each takes a descriptor."""


def units(tensors: Sequence[Tensor]) -> int:
    """Units that a response takes: one if it is small, more if it needs a block."""
    nbytes = 0
    for tensor in tensors:
        nbytes += tensor.nbytes
    return 1 if nbytes <= MOST_INLINE else _BLOCK_UNITS + nbytes // _UNIT_BYTES


_CREDIT = struct.Struct("<I")


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
