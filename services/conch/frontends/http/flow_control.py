"""How much is read from a client, and how much is written to it, at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence, Sized

from uvicorn.protocols.http.flow_control import FlowControl

from conch.core.tensor import Buffer

AT_ONCE_BYTES = 8 << 20
"""A response that is longer is handed to the transport piece by piece."""
PIECE_BYTES = 512 << 10
"""How long such a piece is at most.

The system takes all of a longer one in a single call, in which nothing else runs, if the client reads fast.
"""
MUCH_BYTES = 64 << 10
"""What has been read at once is counted from this size on."""
TURN_BYTES = 2 << 20
"""So much is read from one client before the others have their turn."""

Body = bytes | Sequence[Buffer]
"""The body of a response, whole or in parts of bytes."""


def body_size(body: Body) -> int:
    """How many bytes a body has."""
    return len(body) if isinstance(body, bytes) else sum(map(len, body))


def body_pieces(body: Body) -> Iterator[Buffer]:
    """A body in pieces that are short enough to be written at once; it is not copied."""
    for part in (body,) if isinstance(body, bytes) else body:
        if len(part) <= PIECE_BYTES:
            yield part
            continue
        view = memoryview(part)
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


class HttpFlowControl(FlowControl):
    """Reads no more from a client while requests of it wait that it has sent ahead; sends what is long.

    Args:
        transport: The connection.
        loop: Its loop, which has other connections too.
        waiting: The requests that wait.

    Attributes:
        unsent: How many bytes of a long response have not been handed to the transport.
        held: Whether what has been read already is not parsed yet: no more is read then.
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
        """Reads on, unless there are any."""
        if not self._waiting and not self.held:
            super().resume_reading()

    def hold(self) -> None:
        """Reads no more until `release`."""
        self.held = True
        self.pause_reading()

    def release(self) -> None:
        """Reads on, unless requests wait."""
        self.held = False
        self.resume_reading()

    def has_read(self, size: int) -> None:
        """Counts what has come; if it is much, other clients have their turn before more is read.

        Else as much would be read as the system has of this one, which may go on sending as fast.
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
        """Sends on, as the client reads."""
        super().resume_writing()
        if self._pieces is not None:
            self._loop.call_soon(self._send)

    def send(self, body: Body, sent: Callable[[], None]) -> None:
        """Sends a long response, a piece in each turn of the loop.

        Args:
            body: The response.
            sent: Called when the last piece has been handed to the transport, unless the client goes before.
        """
        self._pieces, self._sent = body_pieces(body), sent
        self.unsent = body_size(body)
        self._send()

    def stop(self) -> None:
        """Sends no more, and keeps nothing of it."""
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
