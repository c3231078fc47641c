"""Encodes the requests of a batch, or of one call, in messages between server and worker.

    ==========================  ======================================================================
    part                        contents
    ==========================  ======================================================================
    head                        count, rows, instance, start time, columns that are present
    rows                        for each request: times, deadline, batch size, flags
    ids, if any                 lengths, then texts
    options                     JSON: one for all requests, or lengths and a text for each
    numbers, if any             for each request: its former number if it runs again, or 0; for a call: that
                                of the request it is made for
    tensors                     see `tensor_layouts`
    ==========================  ======================================================================

A request's number is made from that of its batch and its index, see `number_of`; one that runs again keeps
its former number.
Used by: the worker connection and the worker host.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple

from conch.core.request import InferenceRequest
from conch.workers.protocol.wire import Reader, WireError, check_parameters, decode_json, encode_json

SEQUENCE_START = 1
SEQUENCE_END = 2
FILLER = 4
CANCELLED = 8
EMPTY_FINAL = 16
"""Call: send a final response even if it is empty."""
EXPECTS_SINGLE = 32
"""Call: the caller expects one response."""
EXPECTS_DECOUPLED = 64
"""Call: the caller expects a decoupled model."""

_INDEX_BITS = 20
MOST_REQUESTS = 1 << _INDEX_BITS
"""Most requests of a batch."""

NO_DEADLINE = -1
_LATEST_NS = (1 << 63) - 1
"""Later deadlines count as none."""

_HEAD = struct.Struct("<IIiqIB")
_ROW = struct.Struct("<QQqIB")
_IDS, _OPTIONS, _NUMBERS = 1, 2, 4

_MOST_CACHED = 512
_MOST_CACHED_BYTES = 256
"""Longer options are not cached: they take memory, and rarely repeat."""


def number_of(batch: int, index: int) -> int:
    """The number of a request of a batch."""
    return batch << _INDEX_BITS | index


def batch_of(number: int) -> tuple[int, int]:
    """The number of a request's batch, and its index there."""
    return number >> _INDEX_BITS, number & (MOST_REQUESTS - 1)


class Options(NamedTuple):
    """Fields that few requests have; shared by requests, so not to be changed."""

    parameters: Mapping[str, bool | int | float | str] | None = None
    correlation_id: int | str = 0
    requested: tuple[str, ...] | None = None
    priority: int = 0
    timeout_us: int = 0
    model: tuple[str, ...] = ()
    trace: str = ""


PLAIN = Options()
"""The options of a request that wants all outputs and nothing else."""


Row = tuple[int, int, int, int, int]
"""Times at which a request was received and queued, its deadline or `NO_DEADLINE`, batch size, flags."""


class RequestColumns(NamedTuple):
    """Decoded requests without their tensors.

    Attributes:
        size: Rows of all requests together.
        instance: Number of the instance to run them; -1 for any.
        start_ns: Monotonic time at which the instance took them.
        numbers: Former numbers of requests that run again, 0 for others; the calling request of a call; None
            if there are none.
    """

    size: int
    instance: int
    start_ns: int
    rows: list[Row]
    ids: Iterable[str]
    options: Iterable[Options]
    numbers: Sequence[int] | None


def encode_requests(
    requests: Sequence[InferenceRequest],
    size: int = 1,
    instance: int = -1,
    start_ns: int = 0,
    numbers: Sequence[int] | None = None,
    flags: int = 0,
    model: tuple[str, ...] = (),
) -> bytes:
    """Encodes requests; their tensors follow. `flags` are those of all requests, `model` that of a call."""
    columns = 0 if numbers is None else _NUMBERS
    rows: list[bytes] = []
    options: list[bytes] = []
    for request in requests:
        own = flags
        if request.sequence_start:
            own |= SEQUENCE_START
        if request.sequence_end:
            own |= SEQUENCE_END
        if request.cancelled:
            own |= CANCELLED
        if request.filler:
            own |= FILLER
        if request.id:
            columns |= _IDS
        watch = request.watch
        trace = "" if watch is None else watch.trace_context
        deadline = request.deadline_ns
        if deadline is None or deadline > _LATEST_NS:
            deadline = NO_DEADLINE
        rows.append(_ROW.pack(request.received_ns, request.queued_ns, deadline, request.batch_size, own))
        if request.parameters or request.correlation_id or request.priority or request.timeout_us or trace:
            options.append(_encode_options(request, model, trace))
        else:
            options.append(_cached_options(request.requested, model))
    count = len(rows)
    if options.count(options[0]) == count:
        del options[1:]
    else:
        columns |= _OPTIONS
    common = 0 if columns & _OPTIONS else len(options[0])
    parts = [_HEAD.pack(count, size, instance, start_ns, common, columns), *rows]
    if columns & _IDS:
        ids = [request.id.encode("utf-8", "surrogatepass") for request in requests]
        parts += [_lengths(ids), *ids]
    if columns & _OPTIONS:
        parts.append(_lengths(options))
    parts += options
    if numbers is not None:
        parts.append(struct.pack(f"<{count}Q", *numbers))
    return b"".join(parts)


def decode_requests(reader: Reader) -> RequestColumns:
    """Reads requests; their tensors follow.

    Raises:
        WireError: They are malformed.
    """
    count, size, instance, start_ns, common, columns = reader.unpack(_HEAD)
    if not 0 < count <= MOST_REQUESTS or columns > _IDS + _OPTIONS + _NUMBERS:
        raise WireError(f"the head of {count} requests is malformed")
    rows: list[Row] = list(_ROW.iter_unpack(reader.take(count * _ROW.size)))
    ids: Iterable[str] = repeat("", count)
    if columns & _IDS:
        ids = [reader.text(length) for length in reader.unpack(struct.Struct(f"<{count}I"))]
    options: Iterable[Options]
    if columns & _OPTIONS:
        lengths = reader.unpack(struct.Struct(f"<{count}I"))
        options = [_read_options(reader, length) for length in lengths]
    else:
        options = repeat(_read_options(reader, common) if common else PLAIN, count)
    numbers = reader.unpack(struct.Struct(f"<{count}Q")) if columns & _NUMBERS else None
    return RequestColumns(size, instance, start_ns, rows, ids, options, numbers)


def _lengths(texts: Sequence[bytes]) -> bytes:
    return struct.pack(f"<{len(texts)}I", *map(len, texts))


def _encode_options(request: InferenceRequest, model: tuple[str, ...], trace: str) -> bytes:
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
    if trace:
        fields["trace"] = trace
    return encode_json(fields)


@lru_cache(_MOST_CACHED)
def _cached_options(requested: tuple[str, ...] | None, model: tuple[str, ...]) -> bytes:
    fields: dict[str, object] = {}
    if requested is not None:
        fields["requested"] = requested
    if model:
        fields["model"] = model
    return encode_json(fields) if fields else b""


def _read_options(reader: Reader, length: int) -> Options:
    if not length:
        return PLAIN
    text = bytes(reader.take(length))
    return _cached_parse(text) if length <= _MOST_CACHED_BYTES else _parse_options(text)


def _parse_options(text: bytes) -> Options:
    fields = decode_json(text)
    return Options(
        check_parameters(fields.get("parameters")),
        _checked(fields, "correlation", int | str, 0),
        None if fields.get("requested") is None else _names(fields, "requested"),
        _checked(fields, "priority", int, 0),
        _checked(fields, "timeout", int, 0),
        _names(fields, "model"),
        _checked(fields, "trace", str, ""),
    )


_cached_parse = lru_cache(_MOST_CACHED)(_parse_options)


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
