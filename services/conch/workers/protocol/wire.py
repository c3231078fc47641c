"""Packets between the server and a worker: kinds of messages, header, and primitives to read fields.

A message is one packet of a Unix socket: header, numbers of returned blocks, the message's fields, padding to
a multiple of eight, bytes of small tensors. Integers are little-endian; optional fields are compact JSON;
nothing is pickled. Every decoder accepts any bytes, and returns a valid value or raises `WireError`.
`request_columns` and `response_columns` encode requests and responses, `tensor_layouts` their tensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from conch.core.errors import ERRORS_BY_CODE, ConchError, InternalError
from conch.core.tensor import Buffer

MAGIC = 0xC7
VERSION = 4

MOST_INLINE = 32 * 1024
"""Tensors of a message with more bytes in total travel in a block."""

MOST_PACKET = 96 * 1024
"""A message with more bytes travels in a file, announced by an outline."""

RETURNED = 1 << 31
"""Set in the number of a block that belongs to the receiver of the message."""

MOST_RELEASED = 255


class WireError(Exception):
    """A malformed message; its sender can't be trusted any more."""


class Kind(IntEnum):
    """Kinds of messages, sent by S: the server, W: the worker, B: both."""

    HELLO = 1  # B: version
    LOAD = 2  # S: JSON: spec, placement
    LOADED = 3  # W: JSON: abilities of the instance
    FAILED = 4  # W: error: loading failed
    EXECUTE = 5  # S, of a batch: its requests
    DONE = 6  # W, of a batch: its outcome
    RESPONSE = 7  # W, of a request: one response by its sender
    CREDIT = 8  # S, of a request: grants more responses
    CANCEL = 9  # S, of a request: its client has left
    RELEASE = 10  # B: returned blocks in the header only
    DROP = 11  # B: freed blocks
    READY = 12  # S, of a check: is the model ready? W: the reply
    CLOSE = 13  # S: finalize and exit
    FORGET = 22  # S, of a request: a rescheduled one does not run again
    CALL = 14  # W, of a call: a request to another model
    CALL_CANCEL = 15  # W, of a call: cancels it
    REPLY = 16  # S, of a call: a response, or an error
    QUERY = 17  # W, of a query: JSON: what the model asks the server
    RESULT = 18  # S, of a query: JSON: the result, or an error
    LOG = 19  # W: JSON: a log record
    METRIC = 20  # W: JSON: a change of a metric
    LEVEL = 21  # S: JSON: the lowest level of records to send
    DEVICES = 23  # S: UUIDs of the GPUs on which outputs may stay
    UNREACHABLE = 24  # W, of a batch: its tensors can't be opened or were lost; the server sends it again
    FREED = 25  # S: UUID and handle of freed memory on a GPU
    UNMAPPED = 26  # B: blocks that can't be mapped: returned, and not to be used again
    LOST = 27  # made by the receiver: stands for a message whose file can't be read
    NOTE = 28  # W: JSON: a conflict between the model and its config
    SPAN = 29  # W, of a request: JSON: a span that the model made


_KINDS = {int(kind): kind for kind in Kind}

_MOST_BYTES = 2**31 - 1
_MOST_FACTS = 1 << 20  # records of the log, errors and the like: senders cut their texts to far less
_WITH_TENSORS = frozenset({Kind.EXECUTE, Kind.DONE, Kind.RESPONSE, Kind.CALL, Kind.REPLY})
_WITH_CONFIG_OR_FILES = frozenset({Kind.LOAD, Kind.QUERY, Kind.RESULT})


def most_bytes(kind: Kind) -> int:
    """Largest size of a message of a kind, tensors in blocks not counted."""
    return _MOST_BYTES if kind in _WITH_TENSORS or kind in _WITH_CONFIG_OR_FILES else _MOST_FACTS


HEADER = struct.Struct("<BBBBIQIQ")
"""Magic, kind, flags, number of returned blocks, bytes of fields, subject, number and size of a block."""

NEW_BLOCK = 1
"""Flag: the block is new; its descriptor comes with the message."""
OUTLINE = 2
"""Flag: the message is in a file; its descriptor comes with this one."""

_HEADER_BYTES = HEADER.size
_NO_FLAGS = ~(NEW_BLOCK | OUTLINE)
_PADDING = [bytes(-size % 8) for size in range(8)]
_HELLO = struct.Struct("<4sHI")
_HELLO_MAGIC = b"conc"


class Message(NamedTuple):
    """A message whose header is decoded.

    Attributes:
        subject: Number of a batch, a request or a call.
        data: Bytes of small tensors.
        block: Number of the block that comes with it; 0 for none.
        new_block: Whether the block's descriptor comes with it.
        released: Numbers of returned blocks.
        outline: Whether the message is in a file of `block_size` bytes.
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
    """Encodes a message; each part of `data` is padded to a multiple of eight."""
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


def kind_of(message: Buffer) -> Kind:
    """The kind of an encoded message, of which the beginning is enough."""
    return Kind(HEADER.unpack_from(message)[1])


def outline(message: Buffer, size: int) -> bytes:
    """Encodes the announcement of a message in a file of `size` bytes, from the message or its beginning.

    It repeats kind, subject and block, which the receiver needs if it can't read the file.
    """
    _, kind, _, _, _, subject, block, _ = HEADER.unpack_from(message)
    return HEADER.pack(MAGIC, kind, OUTLINE, 0, 0, subject, block, size)


def decode(packet: memoryview) -> Message:
    """Decodes a message's header.

    Raises:
        WireError: It is malformed.
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
    """Stands for a message whose file can't be read; `lost_kind` has its kind."""
    return message._replace(kind=Kind.LOST, fields=memoryview(bytes([message.kind])), block=0)


def lost_kind(fields: memoryview) -> Kind | None:
    """The kind of a lost message; None if unknown."""
    return _KINDS.get(fields[0]) if len(fields) == 1 else None


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
    if len(fields) > _MOST_FACTS:
        raise WireError(f"an error has {len(fields)} bytes, and may have {_MOST_FACTS}")
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


def encode_numbers(numbers: Sequence[int]) -> bytes:
    """Encodes numbers of blocks."""
    return struct.pack(f"<{len(numbers)}I", *numbers)


def decode_numbers(fields: Buffer) -> tuple[int, ...]:
    """Decodes numbers of blocks.

    Raises:
        WireError: The length is no multiple of four.
    """
    if len(fields) % 4:
        raise WireError("numbers of blocks have four bytes each")
    return struct.unpack(f"<{len(fields) // 4}I", fields)


class Reader:
    """Reads fields in order; raises `WireError` if they end early."""

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
        """The next bytes."""
        start = self._position
        end = self._position = start + length
        part = self._fields[start:end]
        if len(part) != length:
            raise WireError(f"a message ends {end - len(self._fields)} bytes too early")
        return part

    def rest(self) -> memoryview:
        """All remaining bytes."""
        part = self._fields[self._position :]
        self._position = len(self._fields)
        return part

    def text(self, length: int) -> str:
        """Text of `length` bytes."""
        try:
            return str(self.take(length), "utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise WireError(f"a text can't be read: {error}") from None

    def end(self) -> None:
        """Checks that no bytes remain."""
        if self._position != len(self._fields):
            raise WireError(f"a message has {len(self._fields) - self._position} bytes too many")
