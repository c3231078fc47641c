"""Flow control of connections: limits bytes read, parsed and written per loop iteration; collects bodies.

Threads and locks: event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import Any

import numpy as np

from conch.core.clock import monotonic_ns
from conch.core.compiled import mypyc_attr
from conch.core.errors import InvalidArgumentError, ResourceExhaustedError
from conch.core.tensor import Buffer
from conch.frontends.connections.byte_stream import ByteStream
from conch.frontends.connections.turns import Turns

AT_ONCE_BYTES = 8 << 20
"""Longer responses go to the transport in pieces."""
PIECE_BYTES = 512 << 10
"""Largest piece; a longer one could block the loop in a single system call."""
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


class PauseReason(Enum):
    """Reason for which a connection is not read."""

    WAITING = auto()
    """Requests wait for the response to an earlier one."""
    UNPARSED = auto()
    """Received bytes are not parsed yet."""
    BODY = auto()
    """The handler has not asked for the body yet."""


class ReadControl:
    """Pauses reading while there is a reason to."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._reasons: set[PauseReason] = set()

    @property
    def paused(self) -> bool:
        """True while received requests or bytes wait."""
        return bool(self._reasons)

    def pause(self, reason: PauseReason) -> None:
        """Pauses reading until `resume` with the same reason."""
        if not self._reasons:
            self._stream.pause_reading()
        self._reasons.add(reason)

    def resume(self, reason: PauseReason) -> None:
        """Resumes reading if there is no other reason to pause."""
        if reason in self._reasons:
            self._reasons.remove(reason)
            if not self._reasons:
                self._stream.resume_reading()


_MOST_ANNOUNCED = 1 << 30
_MOST_CLEARED = 256 << 10


class RequestBody:
    """A body that comes in several pieces, in one block of memory.

    A large block is left uninitialised: pages are allocated as bytes arrive, and no time is spent on zeroing.

    Args:
        length: Announced length in bytes, or None.
    """

    __slots__ = ("_block", "_grows", "_size")

    def __init__(self, length: int | None) -> None:
        self._grows = length is None or length > _MOST_ANNOUNCED
        self._size = 0
        self._block: Any
        if length is None or self._grows:
            self._block = bytearray()
        else:
            self._block = bytearray(length) if length <= _MOST_CLEARED else np.empty(length, np.uint8).data

    def add(self, piece: bytes) -> None:
        """Appends a piece."""
        if self._grows:
            self._block += piece
        else:
            self._block[self._size : self._size + len(piece)] = piece
        self._size += len(piece)

    def body(self) -> memoryview:
        """Returns what has come, without copying it."""
        return memoryview(self._block)[: self._size].toreadonly()


@mypyc_attr(native_class=False)
class UnreadBodyError(InvalidArgumentError):
    """A body is refused before its end; the connection closes with the response."""


@mypyc_attr(native_class=False)
class TooManyChunksError(UnreadBodyError):
    """A body has too many chunks."""

    def __init__(self) -> None:
        super().__init__(
            f"Chunked request body exceeds maximum of {MOST_CHUNKS} non-empty chunks. Send fewer or larger "
            f"HTTP chunks."
        )


@mypyc_attr(native_class=False)
class HeldBodyError(ResourceExhaustedError):
    """A body is refused before its end for what the server holds; the connection closes with the response."""


class ListenerState:
    """State shared by the connections of a listener.

    Args:
        loop: Their event loop.
        tls: True if they use TLS.
        most_connections: Limit of connections.
        on_lost: Called when a connection closes.

    Attributes:
        entering: Accepted connections that are not open yet, as during TLS's handshake, in order.
        connections: Open connections.
        leaving: Number of connections that make room for others.
        tasks: Tasks of their handlers.
        turns: Turns of those that have much to parse.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        tls: bool,
        most_connections: int,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.loop = loop
        self.tls = tls
        self.most_connections = most_connections
        self.entering: dict[Any, None] = {}
        self.connections: set[Any] = set()
        self.leaving = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.on_lost = on_lost
        self.turns = Turns(loop.call_soon, monotonic_ns)
