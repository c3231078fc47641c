"""Contents of the messages between server and worker: HELLO, requests, responses, errors, facts in JSON.

Packets, their header and their texts are the channel's, tensors and blocks those of `tensors`. Integers are
little-endian; nothing is pickled. Every decoder accepts any bytes, and returns a valid value or raises
`WireError`. There is one encoding of requests and one of responses: a batch and a call, and an outcome, a
frame and a reply, differ in their numbers and flags only. A frame has responses of any requests, which the
model has sent by itself: a step of an engine with many streams is one message.

    =========================  ===========  ==================================================================
    part                       of requests  contents
    =========================  ===========  ==================================================================
    head                       fields       count, rows, instance, start time, columns that are present
    rows                       fields       for each: times, deadline, batch size, flags
    ids, if any                fields       lengths, then texts
    numbers, if any            fields       for each: its former number if it runs again, or 0; for a call:
                                            that of the request it is made for
    tensors                    fields       see `tensors`
    options                    texts        JSON, empty for none: one for all requests, or one for each
    layouts                    texts        see `tensors`
    =========================  ===========  ==================================================================

    =========================  ============  =================================================================
    part                       of responses  contents
    =========================  ============  =================================================================
    head                       fields        times, bytes copied, count, columns that are present
    flags, if not all plain    fields        for each: one byte
    numbers, of a frame        fields        for each: that of its request
    tensors                    fields        of the responses that have some
    error of the whole batch   texts         JSON, instead of everything else
    texts, if there are any    texts         for each: its error or its parameters as JSON, empty for none
    layouts                    texts         of the responses that have some
    =========================  ============  =================================================================

A plain response has tensors, and nothing else. A request's number is made from that of its batch and its
index, see `number_of`, so neither side keeps a table of requests; one that runs again keeps its number.

A decoder reads its part of a message, and moves the message's cursor behind it with `ReceivedMessage.seek`;
`ReceivedMessage.lists` then reads the tensors. `decode_responses` calls it; callers of `decode_requests` call
it themselves.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple

from conch.core.errors import ERRORS_BY_CODE, ConchError, InternalError, without_traceback
from conch.core.request import InferenceRequest, InferenceResponse, SpanRecord
from conch.core.tensor import Buffer
from conch.ipc.channel import MOST_FACTS, Text, WireError
from conch.ipc.tensors import ReceivedMessage

VERSION = 7

_HELLO = struct.Struct("<4sHI")
_HELLO_MAGIC = b"conc"

# --- facts and errors --------------------------------------------------------------------------------------


def encode_hello(pid: int) -> bytes:
    """Encodes the fields of HELLO, the same in all versions."""
    return _HELLO.pack(_HELLO_MAGIC, VERSION, pid)


def check_hello(fields: Buffer, speaker: str) -> None:
    """Checks the fields of HELLO.

    Raises:
        WireError: The peer speaks another version or another protocol.
    """
    try:
        magic, version, _ = _HELLO.unpack(fields)
    except struct.error:
        magic, version = b"", 0
    if magic != _HELLO_MAGIC:
        raise WireError(f"the {speaker} does not speak conch's protocol for workers")
    if version != VERSION:
        raise WireError(
            f"the {speaker} speaks version {version} of the protocol for workers, and this side version "
            f"{VERSION}: both must be of the same conch; was it updated while the server ran?"
        )


def encode_json(value: object) -> bytes:
    """Encodes compact JSON; lone surrogates are escaped."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def decode_json(fields: Buffer) -> dict[str, Any]:
    """Decodes a JSON object.

    Raises:
        WireError: It is no JSON object.
    """
    try:
        value = json.loads(bytes(fields))
    except (ValueError, RecursionError) as error:
        raise WireError(f"JSON can't be read: {error}") from None
    if not isinstance(value, dict):
        raise WireError("a JSON object is expected")
    return value


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
    if len(fields) > MOST_FACTS:
        raise WireError(f"an error has {len(fields)} bytes, and may have {MOST_FACTS}")
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


_SPAN_TEXTS = ("name", "error_type", "error")
_SPAN_NUMBERS = ("span_id", "parent_id", "start_ns", "end_ns")


def span_from_json(fields: dict[str, Any]) -> SpanRecord:
    """Checks a span of model code, which is sent as its fields.

    Raises:
        WireError: It is malformed.
    """
    attributes = fields.get("attributes")
    if (
        set(fields) != set(SpanRecord._fields)
        or not all(isinstance(fields[name], str) for name in _SPAN_TEXTS)
        or not all(isinstance(fields[name], int) and 0 <= fields[name] < 2**64 for name in _SPAN_NUMBERS)
        or not isinstance(attributes, dict)
        or not all(isinstance(value, str | bool | int | float) for value in attributes.values())
    ):
        raise WireError("a span has names, ids, times and attributes")
    return SpanRecord(**fields)


# --- requests ----------------------------------------------------------------------------------------------

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
BINARY_OUTPUTS = 128
"""HTTP request of a front: its outputs are to be sent as binary."""

_INDEX_BITS = 20
MOST_REQUESTS = 1 << _INDEX_BITS
"""Most requests of a batch."""

NO_DEADLINE = -1
_LATEST_NS = (1 << 63) - 1
"""Later deadlines count as none."""

_REQUESTS = struct.Struct("<IIiqB")
_ROW = struct.Struct("<QQqIB")
_IDS, _OPTIONS, _NUMBERS = 1, 2, 4

_MOST_CACHED = 512


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
    more: bool = False
    """True if fields other than `requested` and `model` are set."""


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
) -> tuple[bytes, list[bytes]]:
    """Encodes requests without their tensors, which follow: fields and texts.

    Args:
        requests: The requests.
        size: Rows of all together.
        instance: Number of the instance to run them; -1 for any.
        start_ns: Monotonic time at which the instance took them.
        numbers: See the table.
        flags: Flags of all of them.
        model: Name and version, of a call.
    """
    columns = 0 if numbers is None else _NUMBERS
    parts: list[bytes] = [b""]
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
        parts.append(_ROW.pack(request.received_ns, request.queued_ns, deadline, request.batch_size, own))
        if request.parameters or request.correlation_id or request.priority or request.timeout_us or trace:
            options.append(_encode_options(request, model, trace))
        else:
            options.append(_common_options(request.requested, model))
    count = len(options)
    if options.count(options[0]) == count:
        del options[1:]
    else:
        columns |= _OPTIONS
    parts[0] = _REQUESTS.pack(count, size, instance, start_ns, columns)
    if columns & _IDS:
        ids = [request.id.encode("utf-8", "surrogatepass") for request in requests]
        parts += [struct.pack(f"<{count}I", *map(len, ids)), *ids]
    if numbers is not None:
        parts.append(struct.pack(f"<{count}Q", *numbers))
    return b"".join(parts), options


def decode_requests(received: ReceivedMessage) -> RequestColumns:
    """Reads requests; their tensors follow.

    Raises:
        WireError: They are malformed.
    """
    fields, texts = received.fields, received.texts
    try:
        count, size, instance, start_ns, columns = _REQUESTS.unpack_from(fields)
        if not 0 < count <= MOST_REQUESTS or columns > _IDS + _OPTIONS + _NUMBERS:
            raise WireError(f"the head of {count} requests is malformed")
        position = _REQUESTS.size + count * _ROW.size
        rows: list[Row] = list(_ROW.iter_unpack(fields[_REQUESTS.size : position]))
        if len(rows) != count:
            raise WireError(f"a message with {count} requests ends too early")
        ids: Iterable[str] = repeat("", count)
        if columns & _IDS:
            lengths = struct.unpack_from(f"<{count}I", fields, position)
            ids, position = _read_ids(fields, position + 4 * count, lengths)
        numbers = None
        if columns & _NUMBERS:
            numbers = struct.unpack_from(f"<{count}Q", fields, position)
            position += 8 * count
    except struct.error as error:
        raise WireError(f"a message ends too early: {error}") from None
    described = count if columns & _OPTIONS else 1
    if len(texts) < described:
        raise WireError(f"{count} requests have {len(texts)} options")
    received.seek(position, described)
    options: Iterable[Options]
    if columns & _OPTIONS:
        options = [_read_options(text) for text in texts[:count]]
    else:
        known = texts[0].options  # as `_read_options` begins, without its call; tested in test_wire.py
        options = repeat(known if isinstance(known, Options) else _read_options(texts[0]), count)
    return RequestColumns(size, instance, start_ns, rows, ids, options, numbers)


def _read_ids(fields: memoryview, position: int, lengths: Sequence[int]) -> tuple[list[str], int]:
    """Ids, and where they end."""
    ids: list[str] = []
    for length in lengths:
        start, position = position, position + length
        if position > len(fields):
            raise WireError(f"a message ends {position - len(fields)} bytes too early")
        try:
            ids.append(str(fields[start:position], "utf-8", "surrogatepass"))
        except UnicodeDecodeError as error:
            raise WireError(f"a text can't be read: {error}") from None
    return ids, position


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
def _common_options(requested: tuple[str, ...] | None, model: tuple[str, ...]) -> bytes:
    fields: dict[str, object] = {}
    if requested is not None:
        fields["requested"] = requested
    if model:
        fields["model"] = model
    return encode_json(fields) if fields else b""


def _read_options(text: Text) -> Options:
    """The options that a text says; the text keeps them."""
    if isinstance(text.options, Options):
        return text.options
    if not text.content:
        return PLAIN
    fields = decode_json(text.content)
    text.options = options = Options(
        check_parameters(fields.get("parameters")),
        _checked(fields, "correlation", int | str, 0),
        None if fields.get("requested") is None else _names(fields, "requested"),
        _checked(fields, "priority", int, 0),
        _checked(fields, "timeout", int, 0),
        _names(fields, "model"),
        _checked(fields, "trace", str, ""),
        not fields.keys() <= {"requested", "model"},
    )
    return options


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


# --- responses ---------------------------------------------------------------------------------------------

PRESENT = 1
"""There is a response."""
ERROR = 2
"""It is an error."""
FINAL = 4
"""It is the last of its request."""
RESCHEDULED = 8
"""The request runs again; a response with it has only states of its sequence."""
FAILED = 16
"""The model itself responded with the error; of a reply: the server refused the call."""

_RESPONSES = struct.Struct("<QQQIB")
_FLAGS, _TEXTS, _ERROR, _OF_REQUESTS = 1, 2, 4, 8
_HAS_TENSORS = (PRESENT | ERROR, PRESENT)

Times = tuple[int, int, int]
"""Monotonic ns when the inputs were ready and when the model had its results, 0 for never; bytes copied."""

_NO_TIMES: Times = (0, 0, 0)


class ResponseColumns(NamedTuple):
    """Decoded responses.

    Attributes:
        times: See `Times`.
        error: The error of the whole batch; then there are no responses.
        responses: A response for each request; None where the model responds later, or the request runs
            again. A response whose memory can't be opened here is an `UnreachableError`.
        flags: Flags of each response; None if all are plain.
        numbers: The request of each response of a frame; else None.
    """

    times: Times
    error: ConchError | None
    responses: list[InferenceResponse | None]
    flags: Sequence[int] | None
    numbers: Sequence[int] | None = None


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
    flags: Sequence[int] | None = None,
    has_texts: bool = False,
    times: Times = _NO_TIMES,
    numbers: Sequence[int] | None = None,
) -> bytes:
    """Encodes the fields of responses without their tensors, which follow.

    Args:
        count: Number of responses.
        flags: Flags of each response; None if all are plain.
        has_texts: True if the message has a text of each response.
        times: See `Times`.
        numbers: The request of each response of a frame.
    """
    columns = (0 if flags is None else _FLAGS) | (_TEXTS if has_texts else 0)
    if numbers is not None:
        columns |= _OF_REQUESTS
    fields = _RESPONSES.pack(*times, count, columns)
    if flags is not None:
        fields += bytes(flags)
    return fields if numbers is None else fields + struct.pack(f"<{count}Q", *numbers)


def encode_failure(error: ConchError, times: Times = _NO_TIMES) -> tuple[bytes, list[bytes]]:
    """Encodes the error of a whole batch: fields and texts."""
    return _RESPONSES.pack(*times, 0, _ERROR), [encode_error(error)]


def decode_responses(received: ReceivedMessage, expected: int | None = None) -> ResponseColumns:
    """Reads the responses to `expected` requests, or those of a frame, which are the whole message.

    Raises:
        WireError: They are malformed, or their number is wrong.
    """
    try:
        ready_ns, done_ns, copied, count, columns = _RESPONSES.unpack_from(received.fields)
    except struct.error as error:
        raise WireError(f"a message ends too early: {error}") from None
    times = ready_ns, done_ns, copied
    if columns == _ERROR:
        if len(received.texts) != 1 or len(received.fields) != _RESPONSES.size:
            raise WireError("the error of a batch is one text")
        return ResponseColumns(times, decode_error(received.texts[0].content), [], None)
    if expected is None:
        if columns | _TEXTS != _FLAGS + _TEXTS + _OF_REQUESTS:
            raise WireError("a frame has flags and numbers of requests, and is no outcome of a batch")
    elif count != expected or columns > _FLAGS + _TEXTS:
        raise WireError(f"{count} responses to {expected} requests")
    flags = numbers = None
    responses: list[InferenceResponse | None]
    if not columns:
        received.seek(_RESPONSES.size, 0)
        responses = list(map(InferenceResponse, received.lists(count)))
    else:
        position = _RESPONSES.size
        flags = bytes([PRESENT]) * count
        if columns & _FLAGS:
            position += count
            flags = bytes(received.fields[_RESPONSES.size : position])
        if expected is None:
            start, position = position, position + 8 * count
            if position > len(received.fields):
                raise WireError(f"a frame of {count} responses ends too early")
            numbers = struct.unpack_from(f"<{count}Q", received.fields, start)
        responses = _with_texts(received, position, flags, columns & _TEXTS != 0)
    if received.unreachable:
        present = [response for response in responses if response is not None and response.error is None]
        for index, failure in received.unreachable.items():
            present[index].error = without_traceback(failure)
    return ResponseColumns(times, None, responses, flags, numbers)


def _with_texts(
    received: ReceivedMessage, position: int, flags: bytes, has_texts: bool
) -> list[InferenceResponse | None]:
    """Responses of which some are errors, have parameters, or are absent; tensors begin at `position`."""
    count = len(flags)
    texts = [text.content for text in received.texts[:count]] if has_texts else [b""] * count
    if len(texts) != count:
        raise WireError(f"{count} responses have {len(texts)} texts")
    received.seek(position, count if has_texts else 0)
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
