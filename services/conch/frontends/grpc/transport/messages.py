"""Length-prefixed messages: collects a call's messages from pieces of data, compresses and decompresses.

Source: PROTOCOL-HTTP2 of the gRPC project ("Length-Prefixed-Message"): a byte that tells of compression, four
bytes of length, the message.
Threads and locks: one reader per call, on the loop's thread; `plain` and `compress` anywhere.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from conch.core.tensor import Buffer
from conch.frontends.inflation import inflate

PREFIX = struct.Struct(">BI")
PREFIX_BYTES = 5
OWN_BUFFER_BYTES = 64 * 1024
"""From this size on, a message is received into a buffer of its own."""

_FIRST_BYTES = 1 << 20  # of a long message's buffer; grows with what arrives, not with what is announced
_WINDOW_BITS = {"gzip": 31, "deflate": 15}
_LEVEL = 6  # of zlib, as gRPC's own


class MessageError(Exception):
    """A message that can't be taken.

    Attributes:
        status: The gRPC status of the call.
    """

    def __init__(self, status: int, details: str) -> None:
        super().__init__(details)
        self.status = status


class CompressedMessage(NamedTuple):
    """A message that is still compressed."""

    data: Buffer
    encoding: str
    most_bytes: int

    def plain(self, hold: Callable[[int], object]) -> Buffer:
        """Decompresses it; see `inflate` for `hold`. Raises MessageError: it is malformed, or too large."""
        encoding, most_bytes = self.encoding, self.most_bytes
        try:
            plain, left = inflate(self.data, _WINDOW_BITS[encoding], most_bytes, hold)
        except zlib.error as error:
            raise MessageError(13, f"a message is no valid {encoding} data: {error}") from None
        if len(plain) > most_bytes:
            raise too_large(len(plain), most_bytes)
        if left != 0:
            raise MessageError(13, f"a message is no complete {encoding} data")
        return plain if len(plain) >= OWN_BUFFER_BYTES else bytes(plain)


Received = bytes | bytearray | memoryview | CompressedMessage
"""A received message."""


class MessageReader:
    """Collects the messages of one call.

    A short message is joined from its pieces. A long one has a buffer that its pieces are copied to, or
    received into: `room` is where the next bytes belong.

    Args:
        most_bytes: Limit of a message.
        encoding: Compression of messages that are marked as compressed.

    Attributes:
        failure: Error after which no message is taken; None for none.
    """

    __slots__ = ("_buffer", "_compressed", "_encoding", "_filled", "_most_bytes", "_parts", "_size",
                 "failure")  # fmt: skip

    def __init__(self, most_bytes: int, encoding: str) -> None:
        self._most_bytes = most_bytes
        self._encoding = encoding
        self._parts = bytearray()  # of the prefix, then of a short message
        self._buffer: memoryview | None = None  # of a long message
        self._size = -1  # of the message; -1 before its prefix
        self._filled = 0
        self._compressed = False
        self.failure: MessageError | None = None

    @property
    def empty(self) -> bool:
        """True if no message has begun."""
        return self._size < 0 and not self._parts

    @property
    def partial_bytes(self) -> int:
        """Bytes of the message that has begun."""
        return len(self._parts) if self._buffer is None else self._filled

    def feed(self, data: bytes, start: int, end: int) -> tuple[int, Received | None]:
        """Takes a piece of data up to the end of the first message; a wrong one sets `failure`.

        Returns:
            Where the rest of the data begins, and the message if it is complete now.
        """
        if self._size < 0:
            start = self._read_prefix(data, start, end)
            if self._size < 0:
                return start, None
        count = min(end - start, self._size - self.partial_bytes)
        if self._buffer is None:
            self._parts += data[start : start + count]
        else:
            self._make_room(count)
            self._buffer[self._filled : self._filled + count] = memoryview(data)[start : start + count]
            self._filled += count
        return start + count, self._finish() if self.partial_bytes == self._size else None

    def _read_prefix(self, data: bytes, start: int, end: int) -> int:
        """Reads the prefix, as far as it has come; returns where the rest of the data begins."""
        stop = min(end, start + PREFIX_BYTES - len(self._parts))
        self._parts += data[start:stop]
        if len(self._parts) == PREFIX_BYTES:
            flag, size = PREFIX.unpack(self._parts)
            self.failure = self._prefix_error(flag, size)
            if self.failure is not None:
                return stop
            self._size = size
            self._compressed = flag == 1
            self._parts = bytearray()
            if size >= OWN_BUFFER_BYTES:
                self._buffer = _buffer_of(min(size, _FIRST_BYTES))
                self._filled = 0
        return stop

    def _prefix_error(self, flag: int, size: int) -> MessageError | None:
        """Error of a message's prefix: a message too large, or an unknown compression; None for none."""
        if flag > 1:
            return MessageError(13, f"a message begins with {flag}, which is no compression flag")
        if flag == 1 and self._encoding == "identity":
            return MessageError(13, "a message is compressed, and grpc-encoding does not say how")
        if size > self._most_bytes:
            return too_large(size, self._most_bytes)
        return None

    def _make_room(self, count: int) -> None:
        """Makes the buffer larger, to four times what has come: clients may announce what they never send."""
        buffer = self._buffer
        assert buffer is not None
        if self._filled + count <= len(buffer):
            return
        grown = _buffer_of(min(self._size, max(4 * len(buffer), self._filled + count)))
        grown[: self._filled] = buffer[: self._filled]
        self._buffer = grown

    def receive_buffer(self) -> memoryview | None:
        """Memory for the next bytes of a long message; None if they go to `feed`."""
        if self._buffer is None:
            return None
        if self._filled == len(self._buffer):
            self._make_room(1)
        return self._buffer[self._filled :]

    def received(self, count: int) -> Received | None:
        """Notes that so many bytes are in `room`; returns the message if it is complete."""
        self._filled += count
        return self._finish() if self._filled == self._size else None

    def _finish(self) -> Received:
        message: Buffer = bytes(self._parts) if self._buffer is None else self._buffer.toreadonly()
        compressed = self._compressed
        self._parts, self._buffer, self._size = bytearray(), None, -1
        return CompressedMessage(message, self._encoding, self._most_bytes) if compressed else message


def _buffer_of(size: int) -> memoryview:
    """A buffer that is not filled with zeros first, as a bytearray would be."""
    return np.empty(size, np.uint8).data


def too_large(size: int, most_bytes: int) -> MessageError:
    """The error of a message over the limit; text as gRPC's C core has it."""
    return MessageError(8, f"Received message larger than max ({size} vs. {most_bytes})")


def compress(message: Buffer, encoding: str) -> bytes:
    """Compresses a message with ``gzip`` or ``deflate``."""
    machine = zlib.compressobj(_LEVEL, wbits=_WINDOW_BITS[encoding])
    return machine.compress(message) + machine.flush()
