"""The wire format between the server and a worker.

Every message is one packet of a Unix socket: a header, numbers of blocks that are given back, the message's
own fields, and then, on a multiple of eight, the bytes of small tensors. Integers are little-endian. What
few messages have is compact JSON; nothing is pickled. Every decoder here takes whatever bytes there are, and
either returns something valid or raises `WireError`.

A list of tensors is a layout, which is the same for most requests of a model and is parsed once. The bytes of
small ones follow one another in the message, list after list, each tensor on a multiple of eight, and only
strings need their sizes said. Others say for each tensor where it is: in the block that came with the message
(its number), or in a block that the receiver had sent (its number with `RETURNED` set). Those on a GPU have
`ON_DEVICE` set, and behind the place what opens their memory: the GPU's UUID and the memory's handle. With
them goes a number to be given back, with `RETURNED` set, when nobody looks at the tensor any more; 0 where
nobody waits for that.

The requests of a batch are mostly alike: they differ in numbers, times and ids only, and one layout holds for
the tensors of all of them. Then all that is said once, and so it is with responses that are nothing but
tensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import repeat
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

from conch.core.errors import ERRORS_BY_CODE, ConchError, InternalError
from conch.core.request import InferenceRequest
from conch.core.tensor import ELEMENT_SIZES, Buffer, Tensor

MAGIC = 0xC7
VERSION = 3

MOST_INLINE = 32 * 1024
"""Tensors of a message that have more bytes than this together travel in a block."""

MOST_PACKET = 96 * 1024
"""A message with more bytes travels in a file of its own, of which the packet only tells."""

RETURNED = 1 << 31
"""Set in the number of a block that belongs to the receiver of the message."""

ON_DEVICE = 1 << 32
"""Set in the place of a tensor that is on a GPU."""

UUID_BYTES = 16
HANDLE_BYTES = 64

MOST_RELEASED = 255


class WireError(Exception):
    """A message that is not one; whoever sent it can't be trusted with the next."""


class Kind(IntEnum):
    """Kinds of messages. S: the server sends them, W: the worker, B: both."""

    HELLO = 1  # B: version
    LOAD = 2  # S: JSON: spec, placement
    LOADED = 3  # W: JSON: what the instance can do
    FAILED = 4  # W: error: it could not be loaded
    EXECUTE = 5  # S, subject is a batch: its requests
    DONE = 6  # W, a batch: what came of it
    RESPONSE = 7  # W, a request: one response by its sender
    CREDIT = 8  # S, a request: more responses may be sent
    CANCEL = 9  # S, a request: nobody waits for it any more
    RELEASE = 10  # B: nothing but the blocks in its header
    DROP = 11  # B: blocks that are not used any more
    READY = 12  # S, a question: is the model ready? W: the answer
    CLOSE = 13  # S: finalize and end
    FORGET = 22  # S, a request: one that was to run again does not
    CALL = 14  # W, a call: a request to another model
    CALL_CANCEL = 15  # W, a call: nobody waits for it any more
    REPLY = 16  # S, a call: one response, or an error
    ASK = 17  # W, a call: JSON: another question to the server
    ANSWER = 18  # S, a call: JSON: the answer, or an error
    LOG = 19  # W: JSON: a record of the log
    METRIC = 20  # W: JSON: a change of a metric
    LEVEL = 21  # S: JSON: from which level on records are wanted
    DEVICES = 23  # S: UUIDs of the GPUs on which outputs may stay
    UNREACHABLE = 24  # W, a batch: its tensors can't be opened or have not come; it is to be sent again
    GONE = 25  # S: UUID and handle of memory on a GPU that is not used any more
    UNMAPPED = 26  # B: blocks that came and can't be mapped: they are given back, and not to be used again
    LOST = 27  # on the side that receives: a message about a subject whose file could not be read
    NOTE = 28  # W: JSON: what the model does against its config


_KINDS = {int(kind): kind for kind in Kind}

HEADER = struct.Struct("<BBBBIQIQ")
"""Magic, kind, flags, count of released blocks, bytes of fields, subject, number and size of a block."""

NEW_BLOCK = 1
"""Flag: the block is new, and its descriptor comes with the message."""
OUTLINE = 2
"""Flag: the message is in the file whose descriptor comes with this one."""

_HEADER_BYTES = HEADER.size
_NO_FLAGS = ~(NEW_BLOCK | OUTLINE)
_PADDING = [bytes(-size % 8) for size in range(8)]
_HELLO = struct.Struct("<4sHI")
_HELLO_MAGIC = b"conc"


class Message(NamedTuple):
    """A message that has been taken apart as far as all messages are alike.

    Attributes:
        kind: What it is.
        subject: What it is about: number of a batch, a request or a call.
        fields: Its own fields.
        data: The bytes of small tensors.
        block: Number of the block that comes with it; 0 for none.
        block_size: The size of that block.
        new_block: Whether the block's descriptor comes with it.
        released: Blocks that are given back.
        outline: Whether the message itself is in a file of `block_size` bytes.
    """

    kind: Kind
    subject: int
    fields: memoryview
    data: memoryview
    block: int
    block_size: int
    new_block: bool
    released: tuple[int, ...]
    outline: bool = False


def encode(
    kind: Kind,
    subject: int = 0,
    fields: bytes = b"",
    data: Sequence[Buffer] = (),
    block: int = 0,
    block_size: int = 0,
    new_block: bool = False,
    released: Sequence[int] = (),
) -> bytes:
    """Puts a message together; the parts of `data` must each begin on a multiple of eight."""
    length = len(fields)
    flags = NEW_BLOCK if new_block else 0
    header = HEADER.pack(MAGIC, kind, flags, len(released), length, subject, block, block_size)
    if not released and not data:
        return header + fields
    numbers = encode_numbers(released) if released else b""
    head = _HEADER_BYTES + len(numbers) + length
    parts: list[Buffer] = [header, numbers, fields, _PADDING[head & 7]]
    for part in data:
        parts.append(part)
        if rest := len(part) & 7:
            parts.append(_PADDING[rest])
    return b"".join(parts)


def outline(message: Buffer, size: int) -> bytes:
    """The message that tells of a message in a file.

    It has what the receiver needs if it can't read the file: kind, subject and block of that message.

    Args:
        message: The message in the file, or its beginning.
        size: Bytes of the file.
    """
    _, kind, _, _, _, subject, block, _ = HEADER.unpack_from(message)
    return HEADER.pack(MAGIC, kind, OUTLINE, 0, 0, subject, block, size)


def decode(packet: memoryview) -> Message:
    """Takes a message apart.

    Raises:
        WireError: It is none.
    """
    size = len(packet)
    if size < _HEADER_BYTES:
        raise WireError(f"a message of {size} bytes is too short")
    magic, number, flags, released, length, subject, block, block_size = HEADER.unpack_from(packet)
    if magic != MAGIC:
        raise WireError(f"a message begins with {magic:#x}, not {MAGIC:#x}")
    kind = _KINDS.get(number)
    if kind is None:
        raise WireError(f"there is no message of kind {number}")
    start = _HEADER_BYTES + 4 * released
    end = start + length
    if end > size or flags & _NO_FLAGS:
        raise WireError(f"the header of a message {kind.name} does not fit it")
    numbers: tuple[int, ...] = struct.unpack_from(f"<{released}I", packet, _HEADER_BYTES) if released else ()
    return Message(
        kind,
        subject,
        packet[start:end],
        packet[end + (-end & 7) :],
        block,
        block_size,
        flags & NEW_BLOCK != 0,
        numbers,
        flags & OUTLINE != 0,
    )


def lost(message: Message) -> Message:
    """What stands for a message whose file could not be read; `lost_kind` has its kind."""
    return message._replace(kind=Kind.LOST, fields=memoryview(bytes([message.kind])), block=0)


def lost_kind(fields: memoryview) -> Kind | None:
    """The kind of a message that was lost; None where that is not known."""
    return _KINDS.get(fields[0]) if len(fields) == 1 else None


def encode_hello(pid: int) -> bytes:
    """The fields of HELLO, which stay the same in all versions."""
    return _HELLO.pack(_HELLO_MAGIC, VERSION, pid)


def check_hello(fields: Buffer, speaker: str) -> None:
    """Checks the fields of HELLO.

    Raises:
        WireError: The other side speaks another version, or something else.
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
    """A value as compact JSON, also with text that UTF-8 can't have."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def decode_json(fields: Buffer) -> dict[str, Any]:
    """An object in JSON.

    Raises:
        WireError: It is something else.
    """
    try:
        value = json.loads(bytes(fields))
    except (ValueError, RecursionError) as error:
        raise WireError(f"JSON can't be read: {error}") from None
    if not isinstance(value, dict):
        raise WireError("a JSON object is expected")
    return value


def encode_numbers(numbers: Sequence[int]) -> bytes:
    """Numbers of blocks."""
    return struct.pack(f"<{len(numbers)}I", *numbers)


def decode_numbers(fields: Buffer) -> tuple[int, ...]:
    """Numbers of blocks.

    Raises:
        WireError: It is something else.
    """
    if len(fields) % 4:
        raise WireError("numbers of blocks have four bytes each")
    return struct.unpack(f"<{len(fields) // 4}I", fields)


class Reader:
    """Reads fields one after the other; every read raises `WireError` where the fields end too early."""

    __slots__ = ("_fields", "_position")

    def __init__(self, fields: memoryview) -> None:
        self._fields = fields
        self._position = 0

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        """The values of a struct."""
        try:
            values = layout.unpack_from(self._fields, self._position)
        except struct.error as error:
            raise WireError(f"a message ends too early: {error}") from None
        self._position += layout.size
        return values

    def take(self, length: int) -> memoryview:
        """So many bytes."""
        start = self._position
        end = self._position = start + length
        part = self._fields[start:end]
        if len(part) != length:
            raise WireError(f"a message ends {end - len(self._fields)} bytes too early")
        return part

    def rest(self) -> memoryview:
        """All that has not been read."""
        part = self._fields[self._position :]
        self._position = len(self._fields)
        return part

    def text(self, length: int) -> str:
        """Text of so many bytes."""
        try:
            return str(self.take(length), "utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise WireError(f"a text can't be read: {error}") from None

    def end(self) -> None:
        """Checks that everything has been read."""
        if self._position != len(self._fields):
            raise WireError(f"a message has {len(self._fields) - self._position} bytes too many")


# --- tensors ---------------------------------------------------------------------------------------------


class TensorLayout(NamedTuple):
    """What a tensor is.

    Attributes:
        name: Its name.
        datatype: Its datatype.
        shape: Its shape.
        nbytes: Its size; -1 where only the message says it, as for BYTES.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    nbytes: int


class Layout(NamedTuple):
    """What the tensors of a list are.

    Attributes:
        tensors: The tensors.
        strings: Whether the sizes of some are not known without the message.
        spans: Where each begins and ends, in the message, if that is known.
        nbytes: What they take there together.
    """

    tensors: tuple[TensorLayout, ...]
    strings: bool
    spans: tuple[tuple[TensorLayout, int, int], ...]
    nbytes: int


class Description(NamedTuple):
    """A list of tensors, as the other side is told of it.

    Attributes:
        inline: How it begins where their bytes are in the message.
        placed: How it begins where they are in blocks.
        strings: Whether there are some whose sizes have to be said, too.
        nbytes: Their bytes; -1 where these are not known without them.
        aligned: Whether each fills a multiple of eight, so that they follow one another as they are.
    """

    inline: bytes
    placed: bytes
    strings: bool
    nbytes: int
    aligned: bool


class Place(NamedTuple):
    """Where a tensor's bytes are.

    Attributes:
        source: 0 for the message itself, else the number of a block.
        offset: Where they begin there; for the message from the beginning of their list.
        nbytes: How many there are.
        device: What opens the memory, if it is on a GPU.
    """

    source: int
    offset: int
    nbytes: int
    device: bytes = b""


_LIST = struct.Struct("<IIB")
"""Bytes of the layout, count of tensors, and whether their bytes are in the message."""
_PLACE = struct.Struct("<QQQ")
_MOST_LAYOUTS = 512
_MOST_KEPT = 256
"""What few requests have is kept parsed up to so many bytes: longer ones would take memory, and differ."""
_MOST_DIM = (1 << 63) - 1
_LATEST_NS = (1 << 63) - 1
"""Deadlines beyond this one are as good as none."""
NO_DEADLINE = -1
"""Stands for a deadline where there is none."""

LayoutKey = tuple[tuple[str, str, tuple[int, ...]], ...]


class Layouts:
    """The layouts that one side has sent or received; all are forgotten when there are too many."""

    def __init__(self) -> None:
        self._encoded: dict[LayoutKey, Description] = {}
        self._decoded: dict[bytes, Layout] = {}
        self._fixed: dict[bytes, Layout] = {}

    def encode(self, key: LayoutKey) -> Description:
        """How a list is described.

        Raises:
            WireError: The other side would not take it.
        """
        encoded = self._encoded.get(key)
        if encoded is None:
            _check_key(key)
            encoded = _description(key)
            if len(self._encoded) >= _MOST_LAYOUTS:
                self._encoded.clear()
            self._encoded[key] = encoded
        return encoded

    def decode(self, text: bytes) -> Layout:
        """Reads a layout.

        Raises:
            WireError: It is none.
        """
        decoded = self._decoded.get(text)
        if decoded is None:
            decoded = _layout(_parse_layout(text))
            if len(self._decoded) >= _MOST_LAYOUTS:
                self._decoded.clear()
            self._decoded[text] = decoded
        return decoded

    def decode_fixed(self, reader: Reader) -> Layout:
        """Reads what describes tensors of known sizes in the message, with which the fields end.

        Raises:
            WireError: It is something else.
        """
        text = bytes(reader.rest())
        layout = self._fixed.get(text)
        if layout is None:
            whole = Reader(memoryview(text))
            length, count, inline = whole.unpack(_LIST)
            layout = self.decode(bytes(whole.take(length)))
            if count != len(layout.tensors) or inline > 1:
                raise _miscounted(count, layout)
            if layout.strings or not inline:
                raise WireError("lists of strings, and of tensors in blocks, can't be alike")
            whole.end()
            if len(self._fixed) >= _MOST_LAYOUTS:
                self._fixed.clear()
            self._fixed[text] = layout
        return layout


def _check_key(key: LayoutKey) -> None:
    for name, datatype, shape in key:
        if not all(0 <= dim <= _MOST_DIM for dim in shape):
            raise WireError(f"tensor '{name}' can't be sent: {datatype} of shape {list(shape)}")


def _description(key: LayoutKey) -> Description:
    text = encode_json(key)
    inline, placed = (_LIST.pack(len(text), len(key), there) + text for there in (True, False))
    strings = any(datatype == "BYTES" for _, datatype, _ in key)
    if not all(datatype in ELEMENT_SIZES for _, datatype, _ in key):
        return Description(inline, placed, strings, -1, False)
    sizes = [prod(shape) * ELEMENT_SIZES[datatype] for _, datatype, shape in key]
    return Description(inline, placed, strings, sum(sizes), not any(size % 8 for size in sizes))


def _layout(tensors: tuple[TensorLayout, ...]) -> Layout:
    if any(tensor.nbytes < 0 for tensor in tensors):
        return Layout(tensors, True, (), 0)
    return Layout(tensors, False, *_spans(tensors, [tensor.nbytes for tensor in tensors]))


def _spans(
    tensors: Sequence[TensorLayout], sizes: Sequence[int]
) -> tuple[tuple[tuple[TensorLayout, int, int], ...], int]:
    spans = []
    start = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        spans.append((tensor, start, start + size))
        start += size + -size % 8
    return tuple(spans), start


def _parse_layout(text: bytes) -> tuple[TensorLayout, ...]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the layout of tensors can't be read: {error}") from None
    if not isinstance(value, list):
        raise WireError("the layout of tensors is not a list")
    return tuple(_tensor_layout(entry) for entry in value)


def _tensor_layout(entry: object) -> TensorLayout:
    match entry:
        case [str() as name, str() as datatype, list() as dims] if all(
            type(dim) is int and 0 <= dim <= _MOST_DIM for dim in dims
        ):
            pass
        case _:
            raise WireError("the layout of a tensor is not a name, a datatype and a shape")
    if datatype == "BYTES":
        return TensorLayout(name, datatype, tuple(dims), -1)
    size = ELEMENT_SIZES.get(datatype)
    if size is None:
        raise WireError(f"there is no datatype '{datatype}'")
    return TensorLayout(name, datatype, tuple(dims), prod(dims) * size)


def encode_tensors(layouts: Layouts, key: LayoutKey, places: Sequence[Place]) -> bytes:
    """A list of tensors in blocks: what they are and where."""
    return b"".join(
        [layouts.encode(key).placed, *[_PLACE.pack(*place[:3]) + place.device for place in places]]
    )


def encode_inline(layouts: Layouts, key: LayoutKey, parts: Sequence[Buffer]) -> bytes:
    """A list of tensors whose bytes are in the message."""
    description = layouts.encode(key)
    if description.strings:
        return description.inline + struct.pack(f"<{len(parts)}Q", *map(len, parts))
    return description.inline


def decode_tensors(
    layouts: Layouts, reader: Reader
) -> tuple[Sequence[tuple[TensorLayout, int, int]], int, Sequence[tuple[TensorLayout, Place]]]:
    """Reads a list of tensors; that they are where they should be is for `conch.workers.protocol.received_message` to check.

    Returns:
        Those in the message, with where they begin and end from the beginning of the list; what they take
        together; those in blocks.

    Raises:
        WireError: It is none, or one of them has not the size that its shape says.
    """
    length, count, inline = reader.unpack(_LIST)
    layout = layouts.decode(bytes(reader.take(length)))
    if count != len(layout.tensors) or inline > 1:
        raise _miscounted(count, layout)
    if inline:
        if not layout.strings:
            return layout.spans, layout.nbytes, ()
        sizes = reader.unpack(struct.Struct(f"<{count}Q"))
        for tensor, size in zip(layout.tensors, sizes, strict=True):
            _check_size(tensor, size)
        return *_spans(layout.tensors, sizes), ()
    tensors: list[tuple[TensorLayout, Place]] = []
    for tensor in layout.tensors:
        place = Place(*reader.unpack(_PLACE))
        _check_size(tensor, place.nbytes)
        if place.source & ON_DEVICE:
            if tensor.nbytes < 0:
                raise WireError(f"tensor '{tensor.name}' of {tensor.datatype} can't be on a GPU")
            place = place._replace(device=bytes(reader.take(UUID_BYTES + HANDLE_BYTES)))
        tensors.append((tensor, place))
    return (), 0, tensors


def _miscounted(count: int, layout: Layout) -> WireError:
    return WireError(f"a list of {count} tensors has a layout of {len(layout.tensors)}")


def _check_size(tensor: TensorLayout, nbytes: int) -> None:
    if tensor.nbytes not in (-1, nbytes):
        raise WireError(f"tensor '{tensor.name}' has {nbytes} bytes, not {tensor.nbytes}")


# --- errors ----------------------------------------------------------------------------------------------


def encode_error(error: ConchError) -> bytes:
    """An error: its code and its text."""
    record: dict[str, object] = {"code": error.code, "text": error.message}
    if error.retry_after_ms is not None:
        record["retry"] = error.retry_after_ms
    return encode_json(record)


def decode_error(fields: Buffer) -> ConchError:
    """Reads an error.

    Raises:
        WireError: It is none.
    """
    record = decode_json(fields)
    code, text, retry = record.get("code"), record.get("text"), record.get("retry")
    if not isinstance(code, str) or not isinstance(text, str) or not isinstance(retry, int | None):
        raise WireError("an error is a code and a text")
    error = ERRORS_BY_CODE.get(code, InternalError)(text)
    error.retry_after_ms = retry
    return error


def check_parameters(value: object) -> dict[str, bool | int | float | str] | None:
    """Parameters as they came in JSON.

    Raises:
        WireError: They are none.
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
"""Of a call: it wants a final response even where that says nothing."""
BELIEVED_SINGLE = 64
"""Of a call: who calls believes that the model answers every request once."""
BELIEVED_DECOUPLED = 128
"""Of a call: who calls believes that the model is decoupled."""


@dataclass(slots=True)
class RequestRecord:
    """A request, without its tensors: one that a worker is to execute, or that its model makes.

    Attributes:
        number: Its number on this socket.
        received_ns: Monotonic time at which it reached the server.
        queued_ns: Monotonic time at which its scheduler took it.
        deadline_ns: Monotonic time after which nobody waits for the answer, or None.
        batch_size: Rows it adds to a batch.
        flags: What else is true of it.
        id: The client's request id.
        parameters: Its parameters, or None.
        correlation_id: The sequence it belongs to.
        requested: The outputs that are wanted, or None for all.
        priority: Its priority level.
        timeout_us: Its timeout.
        model: For a call, the name and the version of the model; empty otherwise.
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
        """The record, to be followed by its tensors."""
        return encode_request(self, self.number, self.flags, self.model)

    @classmethod
    def decode(cls, reader: Reader) -> RequestRecord:
        """Reads a record.

        Raises:
            WireError: It is none.
        """
        number, received, queued, deadline, rows, flags, name, rare = reader.unpack(_REQUEST)
        until = None if deadline == NO_DEADLINE else deadline
        request_id = reader.text(name) if name else ""
        if not rare:
            return cls(number, received, queued, until, rows, flags, request_id)
        return cls(number, received, queued, until, rows, flags, request_id, *_take_rare(reader, rare))


def encode_request(
    request: RequestRecord | InferenceRequest,
    number: int,
    flags: int,
    model: tuple[str, ...] = (),
) -> bytes:
    """A request as a record, to be followed by its tensors; see `RequestRecord`."""
    if request.parameters or request.correlation_id or request.priority or request.timeout_us:
        rare = _rare(request, model)
    else:
        rare = _common(request.requested, model)  # most say no more than that, and always the same
    name = request.id.encode("utf-8", "surrogatepass") if request.id else b""
    head = _REQUEST.pack(
        number,
        request.received_ns,
        request.queued_ns,
        _deadline(request.deadline_ns),
        request.batch_size,
        flags,
        len(name),
        len(rare),
    )
    return head + name + rare


def _deadline(time_ns: int | None) -> int:
    return NO_DEADLINE if time_ns is None or time_ns > _LATEST_NS else time_ns


def _rare(request: RequestRecord | InferenceRequest, model: tuple[str, ...]) -> bytes:
    rare: dict[str, object] = {}
    if request.parameters:
        rare["parameters"] = dict(request.parameters)
    if request.correlation_id:
        rare["correlation"] = request.correlation_id
    if request.requested is not None:
        rare["requested"] = request.requested
    if request.priority:
        rare["priority"] = request.priority
    if request.timeout_us:
        rare["timeout"] = request.timeout_us
    if model:
        rare["model"] = model
    return encode_json(rare)


@lru_cache(_MOST_LAYOUTS)
def _common(requested: tuple[str, ...] | None, model: tuple[str, ...]) -> bytes:
    rare: dict[str, object] = {}
    if requested is not None:
        rare["requested"] = requested
    if model:
        rare["model"] = model
    return encode_json(rare) if rare else b""


class _Rare(NamedTuple):
    """What few requests say; the last fields of a `RequestRecord`, in their order."""

    parameters: Mapping[str, bool | int | float | str] | None
    correlation_id: int | str
    requested: tuple[str, ...] | None
    priority: int
    timeout_us: int
    model: tuple[str, ...]


def _take_rare(reader: Reader, length: int) -> _Rare:
    text = bytes(reader.take(length))
    return _kept_rare(text) if length <= _MOST_KEPT else _parse_rare(text)


def _parse_rare(text: bytes) -> _Rare:
    rare = decode_json(text)
    return _Rare(
        check_parameters(rare.get("parameters")),
        _checked(rare, "correlation", int | str, 0),
        None if rare.get("requested") is None else _names(rare, "requested"),
        _checked(rare, "priority", int, 0),
        _checked(rare, "timeout", int, 0),
        _names(rare, "model"),
    )


_kept_rare = lru_cache(_MOST_LAYOUTS)(_parse_rare)
"""The same; shared by all requests that say the same, so nobody may change the parameters."""


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
    """A batch, without its requests.

    Attributes:
        length: How many requests there are.
        size: Their rows.
        instance: Number of the instance that may run it; -1 for any.
        start_ns: Monotonic time at which the instance took it.
        alike: Whether its requests follow as `encode_alike` puts them, not each with a record of its own.
    """

    length: int
    size: int
    instance: int
    start_ns: int
    alike: bool = False

    def encode(self) -> bytes:
        """The record, to be followed by its requests."""
        return _BATCH.pack(*self)

    @classmethod
    def decode(cls, reader: Reader) -> BatchRecord:
        """Reads a record.

        Raises:
            WireError: It is none.
        """
        return cls(*reader.unpack(_BATCH))


_ALIKE = struct.Struct("<I")
_ROW = struct.Struct("<QQQqII")
_ID_BYTES = itemgetter(5)

Row = tuple[int, int, int, int, int, int]
"""What a request says where a batch's requests are otherwise alike, see `RequestRecord`: its number, when it
was received and queued, its deadline or `NO_DEADLINE`, its rows, and how many bytes its id has."""


def encode_alike(requests: Sequence[InferenceRequest], numbers: Sequence[int]) -> bytes | None:
    """The requests of a batch, to be followed by one list of tensors that holds for all of them.

    Returns:
        None if one of them says what most do not: they need records of their own then.
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
    rare = _common(requested, ())
    return b"".join([_ALIKE.pack(len(rare)), rare, *rows, *names])


def decode_alike(reader: Reader, length: int) -> tuple[tuple[str, ...] | None, list[Row], Iterable[str]]:
    """Reads requests that are alike: the outputs that all of them want, what they differ in, and their ids.

    Raises:
        WireError: They are none.
    """
    (rare,) = reader.unpack(_ALIKE)
    requested = _take_rare(reader, rare).requested if rare else None
    rows: list[Any] = list(_ROW.iter_unpack(reader.take(length * _ROW.size)))
    if any(map(_ID_BYTES, rows)):
        return requested, rows, [reader.text(_ID_BYTES(row)) for row in rows]
    return requested, rows, repeat("", length)


# --- responses -------------------------------------------------------------------------------------------

_RESPONSE = struct.Struct("<BBHI")
_HAS_RESPONSE, _HAS_ERROR, _FINAL, _RESCHEDULED, _FAILED = 1, 2, 4, 8, 16


@dataclass(slots=True)
class ResponseRecord:
    """A response without its tensors, or what there is instead of one.

    Attributes:
        present: Whether there is a response; its tensors follow unless it is an error.
        error: What went wrong, or None.
        parameters: Its parameters, or None.
        final: Whether nothing follows for its request.
        rescheduled: Whether its request runs again.
        failed: Whether the model has answered with an error by itself.
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
        """The record."""
        flags = (
            (_HAS_RESPONSE if self.present else 0)
            | (_HAS_ERROR if self.error is not None else 0)
            | (_FINAL if self.final else 0)
            | (_RESCHEDULED if self.rescheduled else 0)
            | (_FAILED if self.failed else 0)
        )
        rare = b""
        if self.error is not None:
            rare = encode_error(self.error)
        elif self.parameters:
            rare = encode_json(dict(self.parameters))
        return _RESPONSE.pack(flags, 0, 0, len(rare)) + rare

    @classmethod
    def decode(cls, reader: Reader) -> ResponseRecord:
        """Reads a record.

        Raises:
            WireError: It is none.
        """
        flags, _, _, rare = reader.unpack(_RESPONSE)
        if flags == _HAS_RESPONSE and not rare:
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
            record.error = decode_error(reader.take(rare))
        elif rare:
            record.parameters = check_parameters(decode_json(reader.take(rare)))
        return record


_PLAIN = ResponseRecord(True)
"""What most responses are; nobody changes what was decoded."""

PLAIN_RESPONSE = _PLAIN.encode()
"""A response that is nothing but its tensors."""

LAST_RESPONSE = ResponseRecord(True, final=True).encode()
"""Such a response, after which nothing follows."""

_DONE = struct.Struct("<QQQII?")


class DoneRecord(NamedTuple):
    """What came of a batch, without the responses.

    Attributes:
        input_end_ns: When its inputs were ready for the model; 0 if never.
        output_start_ns: When the model had its results; 0 if never.
        bytes_copied: Bytes copied in the worker.
        length: How many responses follow.
        error: Bytes of the error that follows; 0 for none.
        alike: Whether all responses are nothing but tensors, and one list that holds for all of them follows.
    """

    input_end_ns: int
    output_start_ns: int
    bytes_copied: int
    length: int
    error: int
    alike: bool = False

    def encode(self) -> bytes:
        """The record."""
        return _DONE.pack(*self)

    @classmethod
    def decode(cls, reader: Reader) -> DoneRecord:
        """Reads a record.

        Raises:
            WireError: It is none.
        """
        return cls(*reader.unpack(_DONE))


WINDOW = 96
"""What the worker may send for one request of a decoupled model before the server has handed it on."""

CREDIT_AT = WINDOW // 4
"""The server says what it has handed on when it is that much."""

_UNIT_BYTES = 64 * 1024
_BLOCK_UNITS = 12
"""So at most eight blocks of a request are on their way at a time, each of which takes a descriptor."""


def units(tensors: Sequence[Tensor]) -> int:
    """What a response costs of its request's window: small ones one, others more, as each takes a block."""
    nbytes = 0
    for tensor in tensors:
        nbytes += tensor.nbytes
    return 1 if nbytes <= MOST_INLINE else _BLOCK_UNITS + nbytes // _UNIT_BYTES


_CREDIT = struct.Struct("<I")


def encode_credit(units: int) -> bytes:
    """How much more may be sent."""
    return _CREDIT.pack(units)


def decode_credit(fields: memoryview) -> int:
    """How much more may be sent.

    Raises:
        WireError: It is something else.
    """
    (units,) = Reader(fields).unpack(_CREDIT)
    return int(units)
