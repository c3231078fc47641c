"""Flow control of connections: limits bytes read, parsed and written per loop iteration; buffers bodies.

Threads and locks: event loop only. Used by `http_connection`, `fast_path`, `infer_fast_path`, `http_loop`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Protocol

import numpy as np
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from conch.core.errors import InvalidArgumentError
from conch.core.tensor import Buffer

AT_ONCE_BYTES = 8 << 20
"""Longer responses go to the transport in pieces."""
PIECE_BYTES = 512 << 10
"""Largest piece; a longer one could block the loop in a single system call."""
MUCH_BYTES = 64 << 10
"""Smallest read that counts towards `TURN_BYTES`."""
TURN_BYTES = 2 << 20
"""Bytes read from one client before other clients are served."""

MOST_CHUNKS = 65536
"""Limit of the chunks of a body."""

Body = bytes | Sequence[Buffer]
"""The body of a response, whole or in parts of bytes."""


def body_size(body: Body) -> int:
    """Returns the length of a body in bytes."""
    return len(body) if isinstance(body, bytes) else sum(map(len, body))


def body_pieces(body: Body) -> Iterator[Buffer]:
    """Yields a body in pieces of at most `PIECE_BYTES`, without copies."""
    for part in (body,) if isinstance(body, bytes) else body:
        if len(part) <= PIECE_BYTES:
            yield part
            continue
        view = memoryview(part)
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


class HttpFlowControl(FlowControl):
    """Pauses reading while pipelined requests wait; writes long responses in pieces.

    Args:
        transport: The connection's transport.
        loop: Its event loop.
        waiting: The pipeline of requests.

    Attributes:
        unsent: Bytes of a long response not yet passed to the transport.
        held: True while received bytes are unparsed; reading is paused.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, waiting: Sized) -> None:
        super().__init__(transport)
        self._loop = loop
        self._waiting = waiting
        self._pieces: Iterator[Buffer] | None = None
        self._sent: Callable[[], None] | None = None
        self._read = 0
        self.unsent = 0
        self.held = False

    def resume_reading(self) -> None:
        """Resumes reading unless requests wait or bytes are unparsed."""
        if not self._waiting and not self.held:
            super().resume_reading()

    def hold(self) -> None:
        """Pauses reading until `release`."""
        self.held = True
        self.pause_reading()

    def release(self) -> None:
        """Ends `hold`; resumes reading unless requests wait."""
        self.held = False
        self.resume_reading()

    def has_read(self, size: int) -> None:
        """Counts received bytes; pauses for one loop iteration after `TURN_BYTES`.

        Without it, one fast sender would keep the loop reading.
        """
        self._read += size
        if self._read >= TURN_BYTES and not self.read_paused and not self._transport.is_closing():
            self._read = 0
            self._transport.pause_reading()
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if not self.read_paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def resume_writing(self) -> None:
        """Continues a long response."""
        super().resume_writing()
        if self._pieces is not None:
            self._loop.call_soon(self._send)

    def send(self, body: Body, sent: Callable[[], None]) -> None:
        """Sends a long response, one piece per loop iteration.

        Args:
            body: The response body.
            sent: Called after the last piece; not called if the client disconnects.
        """
        self._pieces, self._sent = body_pieces(body), sent
        self.unsent = body_size(body)
        self._send()

    def stop(self) -> None:
        """Drops the rest of the response."""
        self._pieces = self._sent = None
        self.unsent = 0

    def _send(self) -> None:
        if self._pieces is None or self.write_paused:
            return
        piece = next(self._pieces)
        self.unsent -= len(piece)
        self._transport.write(piece)
        if not self.unsent:
            sent = self._sent
            self.stop()
            if sent is not None:
                sent()
        elif not self.write_paused:
            self._loop.call_soon(self._send)


_MOST_ANNOUNCED = 1 << 30
_MOST_CLEARED = 256 << 10


class RequestBody:
    """A partial or complete body.

    Args:
        length: Announced length in bytes, or None.
        most: Limit in bytes.

    Attributes:
        size: Bytes received.
        most: Limit in bytes.
    """

    __slots__ = ("_block", "_parts", "most", "size")

    def __init__(self, length: int | None, most: int) -> None:
        self._parts: list[bytes] = []
        self._block = None if length is None or length > _MOST_ANNOUNCED else _block(length)
        self.size = 0
        self.most = most

    def add(self, part: bytes) -> None:
        """Appends a piece."""
        block = self._block
        if block is None:
            self._parts.append(part)
        else:
            block[self.size : self.size + len(part)] = part
        self.size += len(part)

    def body(self) -> memoryview:
        """Returns the complete body; may copy it."""
        if self._block is not None:
            return memoryview(self._block)[: self.size].toreadonly()
        return memoryview(b"".join(self._parts))


def _block(length: int) -> bytearray | memoryview:
    """Allocates memory for a body.

    A large block is left uninitialised: pages are allocated as bytes arrive, and no time is spent on zeroing.
    """
    return bytearray(length) if length <= _MOST_CLEARED else np.empty(length, np.uint8).data


class UnreadBodyError(InvalidArgumentError):
    """A body is refused before its end; the connection closes with the response."""


class TooManyChunksError(UnreadBodyError):
    """A body has too many chunks."""

    def __init__(self) -> None:
        super().__init__(
            f"Chunked request body exceeds maximum of {MOST_CHUNKS} non-empty chunks. Send fewer or larger "
            f"HTTP chunks."
        )


class SlicedParser(Protocol):
    """A connection that parses its buffer in time slices."""

    loop: asyncio.AbstractEventLoop

    def parse_on(self) -> None:
        """Parses the next time slice."""


class ListenerState(ServerState):
    """State shared by the connections of a listener; `on_lost` is called when one closes."""

    def __init__(self, most_connections: int) -> None:
        super().__init__()
        self.most_connections = most_connections
        self._unparsed: deque[SlicedParser] = deque()
        self.default_headers = []
        self.on_lost: Callable[[], None] = _nothing

    def parse_later(self, connection: SlicedParser) -> None:
        """Queues a connection for parsing; one runs per iteration of the event loop."""
        self._unparsed.append(connection)
        if len(self._unparsed) == 1:
            connection.loop.call_soon(self._parse_one)

    def _parse_one(self) -> None:
        connection = self._unparsed.popleft()
        if self._unparsed:
            connection.loop.call_soon(self._parse_one)
        connection.parse_on()


def _nothing() -> None:
    """Does nothing; the default of `on_lost`."""
