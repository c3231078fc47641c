"""Arrays of 64-bit words, in which a worker and the C host pass requests and events; see ``conch_host.h``.

Texts and bytes are a word with their length, then the bytes, padded to words. Pure functions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from conch.core.errors import (
    AlreadyExistsError,
    CancelledError,
    ConchError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    UnknownError,
    UnsupportedError,
)
from conch.core.request import InferenceRequest, Parameter
from conch.core.tensor import Array
from conch.ipc.tensors import LayoutKey

NOTHING = (1 << 64) - 1
"""The word of a missing code or index."""

OK = -1
"""The result of a function that succeeds."""

DATATYPES = (
    *("", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BYTES", "BF16"),
)
"""By ``TRITONSERVER_DataType``."""

KINDS = ("AUTO", "CPU", "GPU", "MODEL")
"""By ``TRITONSERVER_InstanceGroupKind``."""

_ERRORS: tuple[type[ConchError], ...] = (
    UnknownError,
    InternalError,
    NotFoundError,
    InvalidArgumentError,
    UnavailableError,
    UnsupportedError,
    AlreadyExistsError,
    CancelledError,
)
"""By ``TRITONSERVER_Error_Code``."""

_CODES = {kind.code: code for code, kind in enumerate(_ERRORS)}
_TYPES = {name: number for number, name in enumerate(DATATYPES)}
_STRING, _INT, _BOOL, _DOUBLE, _BYTES = range(5)

_START, _END = 1, 2
_WORD = struct.Struct("=Q")
_BEGIN = struct.Struct("=5Q")


class Output(NamedTuple):
    """An output or a state: `place` is its index, or its name if the config does not have it."""

    place: int | str
    datatype: str
    shape: tuple[int, ...]
    address: int
    nbytes: int


class Response(NamedTuple):
    """A response; final without any if `result` is 0 and there is no error."""

    number: int
    final: bool
    result: int
    error: ConchError | None
    parameters: Mapping[str, Parameter] | None
    outputs: Sequence[Output]


class SmallOutput(NamedTuple):
    """An output whose bytes came with the event."""

    place: int
    datatype: str
    shape: tuple[int, ...]
    data: bytes


class SmallResponse(NamedTuple):
    """A response that holds no memory, without an error or parameters."""

    number: int
    final: bool
    outputs: Sequence[SmallOutput]


class Released(NamedTuple):
    """The backend has done with a request; `runs_again` if it is to run again."""

    number: int
    runs_again: bool


class State(NamedTuple):
    """A state for the sequence of a request."""

    number: int
    result: int
    output: Output


class LogText(NamedTuple):
    """A text for the log; `level` is a ``TRITONSERVER_LogLevel``."""

    level: int
    line: int
    file: str
    text: str


class Note(NamedTuple):
    """A way in which the backend deviates from the config or the interface."""

    text: str


class Activity(NamedTuple):
    """A named time of a request's trace."""

    number: int
    time_ns: int
    name: str


class MetricChange(NamedTuple):
    """A change of a metric; `operation` and `kind` are numbers of the interface."""

    operation: int
    kind: int
    value: float
    family: str
    help: str
    labels: Mapping[str, str]
    bounds: Sequence[float]


class Query(NamedTuple):
    """A call of the backend to the server; only a load has parameters."""

    call: int
    operation: int
    version: int
    model: str
    text: str
    parameters: Mapping[str, str | bytes]


class CallInput(NamedTuple):
    """An input of a request to another model."""

    datatype: str
    shape: tuple[int, ...]
    name: str
    address: int
    nbytes: int


class ModelCall(NamedTuple):
    """A request to another model; `number` is that of the request that makes it, or 0."""

    number: int
    call: int
    model: str
    version: int
    flags: int
    correlation_id: int | str
    priority: int
    timeout_us: int
    id: str
    trace: str
    parameters: Mapping[str, Parameter]
    inputs: Sequence[CallInput]
    requested: Sequence[str]


class CallCancel(NamedTuple):
    """The backend cancels a call."""

    call: int


Event = (
    Response
    | SmallResponse
    | Released
    | State
    | LogText
    | Note
    | Activity
    | MetricChange
    | Query
    | ModelCall
    | CallCancel
)


# --- errors ------------------------------------------------------------------------------------------------


def error_of(code: int, text: str) -> ConchError:
    """The error of a code."""
    return (_ERRORS[code] if 0 <= code < len(_ERRORS) else UnknownError)(text)


def code_of(error: ConchError) -> int:
    """The code of an error; INTERNAL for those that Triton does not have."""
    return _CODES.get(error.code, 1)


# --- packing -----------------------------------------------------------------------------------------------


def pack_words(words: Sequence[int]) -> bytes:
    """Words as bytes."""
    return struct.pack(f"={len(words)}Q", *words)


def pack_text(text: str | bytes) -> bytes:
    """A text, or bytes."""
    data = text.encode("utf-8", "replace") if isinstance(text, str) else text
    return _WORD.pack(len(data)) + data + bytes(-len(data) % 8)


def datatype_number(datatype: str) -> int:
    """The number of a datatype."""
    return _TYPES[datatype]


def pack_layout(inputs: LayoutKey, requested: Sequence[str]) -> bytes:
    """Packs the layout that requests with the same tensors share."""
    parts = [_WORD.pack(len(inputs))]
    for name, datatype, shape in inputs:
        parts.append(pack_words((datatype_number(datatype), len(shape), *shape)))
        parts.append(pack_text(name))
    parts.append(_WORD.pack(len(requested)))
    return b"".join(parts + [pack_text(name) for name in requested])


def flags_of(request: InferenceRequest) -> int:
    """``TRITONSERVER_RequestFlag`` of a request."""
    return (_START if request.sequence_start else 0) | (_END if request.sequence_end else 0)


def pack_rarities(request: InferenceRequest) -> bytes:
    """The fields of a request that few have; empty without any."""
    watch, correlation = request.watch, request.correlation_id
    if not (request.id or watch or request.parameters or (correlation and isinstance(correlation, str))):
        return b""
    trace = "" if watch is None else watch.trace_context
    correlation = correlation if isinstance(correlation, str) else ""
    parts = [pack_text(request.id), pack_text(correlation), pack_text(trace)]
    parts.append(pack_parameters(request.parameters or {}))
    return b"".join(parts)


def pack_parameters(parameters: Mapping[str, Parameter]) -> bytes:
    """Parameters with their number before them."""
    parts = [_WORD.pack(len(parameters))]
    for key, value in parameters.items():
        kind = _kind_of(value)
        parts += [_WORD.pack(kind), pack_text(key)]
        if isinstance(value, str):
            parts.append(pack_text(value))
        elif isinstance(value, float):
            parts.append(struct.pack("=d", value))
        else:
            parts.append(_WORD.pack(int(value) & NOTHING))
    return b"".join(parts)


def pack_reply(call: ModelCall, code: int, final: bool = True) -> bytes:
    """The begin of a response to a call."""
    return (
        pack_words((1 if final else 0, code, 1))
        + pack_text(call.model)
        + pack_words((call.version & NOTHING,))
        + pack_text(call.id)
    )


def pack_error(call: ModelCall, error: ConchError, final: bool = True) -> bytes:
    """An error as the response to a call."""
    return pack_reply(call, code_of(error), final) + pack_text(error.message)


def address_of(array: Array) -> int:
    """Address of an array's memory."""
    address: int = array.__array_interface__["data"][0]
    return address


def _kind_of(value: Parameter) -> int:
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, int):
        return _INT
    return _DOUBLE if isinstance(value, float) else _STRING


# --- reading -----------------------------------------------------------------------------------------------


class SmallResponses(NamedTuple):
    """The responses to a batch whose outputs are all described by the same words."""

    described: bytes
    data: bytes


def read_small_responses(data: memoryview, words: int, first: int, count: int) -> SmallResponses | None:
    """Reads the events of a batch of requests with numbers from `first`, in any order.

    None unless each request has got one small response, a final one, and is released, and nothing else has
    happened. `read_events` reads these events too, and all others. Readable are five words more than `words`.
    """
    outputs = [data] * count
    described = b""
    released = answered = 0  # a bit for each request
    at, end = 0, 8 * words
    while at < end:
        size, kind, number, final, length = _BEGIN.unpack_from(data, at)
        next_at = at + 8 * size
        index = number - first
        if not 0 <= index < count:
            return None
        if kind == _RELEASED:
            released |= 1 << index
        elif kind != _SMALL_RESPONSE or not final or answered >> index & 1:
            return None
        else:
            start = at + _BEGIN.size + 8 * length
            own = data[at + _BEGIN.size : start].tobytes()
            if own != described:
                if answered:
                    return None
                described = own
            outputs[index] = data[start:next_at]
            answered |= 1 << index
        at = next_at
    if not answered == released == (1 << count) - 1:
        return None
    return SmallResponses(described, b"".join(outputs))


def read_description(described: bytes) -> list[tuple[int, str, tuple[int, ...], int]]:
    """Index, datatype, shape and bytes of each output of a small response."""
    words = struct.unpack(f"={len(described) // 8}Q", described)
    return _read_description(_Words(words, memoryview(described)))


def _read_description(reader: _Words) -> list[tuple[int, str, tuple[int, ...], int]]:
    return [
        (reader.word(), DATATYPES[reader.word()], reader.dims(), reader.word()) for _ in range(reader.word())
    ]


class _Words:
    """Reads words one after the other."""

    __slots__ = ("at", "data", "words")

    def __init__(self, words: tuple[int, ...], data: memoryview, at: int = 0) -> None:
        self.words = words
        self.data = data
        self.at = at

    def word(self) -> int:
        at = self.at
        self.at = at + 1
        return self.words[at]

    def signed(self) -> int:
        return _signed(self.word())

    def real(self) -> float:
        at = self.at
        self.at = at + 1
        value: float = struct.unpack_from("=d", self.data, 8 * at)[0]
        return value

    def raw(self, length: int) -> bytes:
        start = 8 * self.at
        self.at += (length + 7) // 8
        return bytes(self.data[start : start + length])

    def text(self) -> str:
        return self.raw(self.word()).decode("utf-8", "replace")

    def texts(self) -> list[str]:
        return [self.text() for _ in range(self.word())]

    def dims(self) -> tuple[int, ...]:
        rank = self.word()
        at = self.at
        self.at = at + rank
        return self.words[at : at + rank]

    def parameters(self) -> dict[str, Parameter]:
        found: dict[str, Parameter] = {}
        for _ in range(self.word()):
            kind, key = self.word(), self.text()
            if kind in (_STRING, _BYTES):
                found[key] = self.text()
            elif kind == _DOUBLE:
                found[key] = self.real()
            else:
                found[key] = self.word() != 0 if kind == _BOOL else self.signed()
        return found

    def output(self) -> Output:
        words, at = self.words, self.at  # each response has some: without a call for each word
        place: int | str
        place, datatype, rank = words[at : at + 3]
        at += 3 + rank
        address, nbytes = words[at : at + 2]
        shape = words[at - rank : at]
        self.at = at + 4  # behind memory type and device: the host keeps outputs in its own memory
        return Output(self.text() if place == NOTHING else place, DATATYPES[datatype], shape, address, nbytes)


def read_events(data: memoryview, count: int) -> Iterator[Event]:
    """Reads events from so many words; `data` may be written to again once the iterator has ended."""
    words: tuple[int, ...] = struct.unpack_from(f"={count}Q", data)
    reader = _Words(words, data)
    start = 0
    while start < count:
        size, kind, number = words[start : start + 3]
        reader.at = start + 3
        start += size
        if kind == _RESPONSE:
            yield _read_response(number, reader)
        elif kind in (_RELEASED, _RESCHEDULED):
            yield Released(number, kind == _RESCHEDULED)
        else:
            read = _READERS.get(kind)
            if read is not None:
                yield read(number, reader)


def _read_response(number: int, reader: _Words) -> Response:
    final = reader.word()
    if final == _FINAL_ALONE:
        return Response(number, True, 0, None, None, ())
    code, result = reader.word(), reader.word()
    if code != NOTHING:
        return Response(number, final == 1, result, error_of(code, reader.text()), None, ())
    parameters = reader.parameters() or None
    return Response(
        number, final == 1, result, None, parameters, [reader.output() for _ in range(reader.word())]
    )


def _read_small_response(number: int, reader: _Words) -> SmallResponse:
    final, _ = reader.word(), reader.word()
    outputs = []
    for place, datatype, shape, nbytes in _read_description(reader):
        outputs.append(SmallOutput(place, datatype, shape, reader.raw(nbytes)))
    return SmallResponse(number, final == 1, outputs)


def _read_state(number: int, reader: _Words) -> State:
    return State(number, reader.word(), reader.output())


def _read_log(number: int, reader: _Words) -> LogText:
    return LogText(reader.word(), reader.word(), reader.text(), reader.text())


def _read_note(number: int, reader: _Words) -> Note:
    return Note(reader.text())


def _read_activity(number: int, reader: _Words) -> Activity:
    return Activity(number, reader.word(), reader.text())


def _read_metric(number: int, reader: _Words) -> MetricChange:
    operation, kind, value = reader.word(), reader.word(), reader.real()
    family, help_text = reader.text(), reader.text()
    labels = {reader.text(): reader.text() for _ in range(reader.word())}
    bounds = [reader.real() for _ in range(reader.word())] if kind == _HISTOGRAM else []
    return MetricChange(operation, kind, value, family, help_text, labels, bounds)


def _read_query(number: int, reader: _Words) -> Query:
    call, operation, version = reader.word(), reader.word(), reader.signed()
    model, text = reader.text(), reader.text()
    parameters: dict[str, str | bytes] = {}
    for _ in range(reader.word()):
        kind, key = reader.word(), reader.text()
        value = reader.raw(reader.word())
        parameters[key] = value if kind == _BYTES else value.decode("utf-8", "replace")
    return Query(call, operation, version, model, text, parameters)


def _read_call(number: int, reader: _Words) -> ModelCall:
    call, model, version, flags = reader.word(), reader.text(), reader.signed(), reader.word()
    correlation: int | str = reader.word()
    priority, timeout_us = reader.word(), reader.word()
    request_id = reader.text()
    correlation = reader.text() or correlation
    trace, parameters = reader.text(), reader.parameters()
    inputs = []
    for _ in range(reader.word()):
        datatype, shape = DATATYPES[reader.word()], reader.dims()
        inputs.append(CallInput(datatype, shape, reader.text(), reader.word(), reader.word()))
    return ModelCall(
        *(number, call, model, version, flags, correlation, priority, timeout_us, request_id, trace),
        parameters,
        inputs,
        reader.texts(),
    )


def _read_cancel(number: int, reader: _Words) -> CallCancel:
    return CallCancel(reader.word())


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_RESPONSE, _RELEASED, _RESCHEDULED, _SMALL_RESPONSE = 1, 2, 3, 12
_FINAL_ALONE = 2
_HISTOGRAM = 2
_READERS: Mapping[int, Callable[[int, _Words], Event]] = {
    4: _read_state,
    5: _read_log,
    6: _read_note,
    7: _read_activity,
    8: _read_metric,
    9: _read_query,
    10: _read_call,
    11: _read_cancel,
    12: _read_small_response,
}
