"""`ByteStream`: a client's socket, plain or with TLS, as a stream of bytes both ways.

What is written in a round leaves with its end, in one call if possible. Reading takes turns: after a few
reads other sockets have theirs.

    ============  =========================================  ==========================================
    state         ends with                                  what is done
    ============  =========================================  ==========================================
    HANDSHAKE     TLS's handshake; `_HANDSHAKE_NS`           its steps run on a pool, see `wire`
    OPEN          `close`, `abort`, an error, the end        bytes pass both ways
    CLOSING       what was written is sent                   nothing is read
    CLOSED
    ============  =========================================  ==========================================

A client that ends its side may still read. One that is gone altogether shows as an error or a hang-up, which
epoll reports whether the socket is read or not.

Threads and locks: the loop's thread; steps of handshakes run on a pool.
"""

from __future__ import annotations

import logging
from enum import Enum, auto
from select import EPOLLERR, EPOLLHUP, EPOLLIN, EPOLLOUT
from typing import Protocol

from conch.core.clock import Clock, monotonic_ns
from conch.core.compiled import mypyc_attr
from conch.core.tensor import Buffer
from conch.frontends.connections.wire import Wire
from conch.ipc.loop import IoLoop

log = logging.getLogger(__name__)

_READ_BYTES = 64 * 1024
_LONG_READ_BYTES = 256 * 1024
_READS = 4
_HANDSHAKE_NS = 10_000_000_000
_MOST_UNSENT_BYTES = 64 * 1024
"""Bytes that are written and not sent before the handler is to wait."""
_GONE = EPOLLERR | EPOLLHUP


class BytesHandler(Protocol):
    """Takes the bytes of a stream."""

    def opened(self) -> None:
        """The handshake is over; called first, and not if it fails."""

    def received(self, data: bytes) -> None:
        """Takes bytes."""

    def ended(self) -> bool:
        """The client has ended its side; True if the stream stays open."""

    def pause_writing(self) -> None:
        """The client reads too slowly."""

    def resume_writing(self) -> None:
        """The client has read what was written."""

    def closed(self) -> None:
        """The stream is closed; called last, and once."""


class _State(Enum):
    """See the module."""

    HANDSHAKE = auto()
    OPEN = auto()
    CLOSING = auto()
    CLOSED = auto()


@mypyc_attr(allow_interpreted_subclasses=True)
class ByteStream:
    """One stream.

    Args:
        loop: The loop.
        wire: The socket.
        handler: Takes the bytes.
        clock: Monotonic time in nanoseconds.

    Attributes:
        certificate_names: Names in the client's certificate, such as ``cn:web``; none without one.
        unsent: Bytes that were written and that the socket has not taken.
    """

    __slots__ = (
        "_blocked",
        "_clock",
        "_ended",
        "_events",
        "_handler",
        "_held",
        "_loop",
        "_output",
        "_paused",
        "_state",
        "_timer",
        "_wire",
        "certificate_names",
        "unsent",
    )

    def __init__(self, loop: IoLoop, wire: Wire, handler: BytesHandler, clock: Clock = monotonic_ns) -> None:
        self.certificate_names: tuple[str, ...] = ()
        self.unsent = 0
        self._loop = loop
        self._wire = wire
        self._handler = handler
        self._clock = clock
        self._state = _State.HANDSHAKE
        self._events = EPOLLIN
        self._output: list[Buffer] = []
        self._blocked = False  # the socket takes no more for now
        self._held = False  # the handler waits with writing
        self._paused = False  # the handler does not want to read
        self._ended = False  # the client has ended its side
        self._timer = loop.call_at(clock() + _HANDSHAKE_NS, self._check_handshake)

    def start(self) -> None:
        """Begins with the handshake."""
        try:
            self._loop.register(self._wire.fileno(), self)
        except OSError:  # memory is exhausted
            self._close()
        else:
            self.on_ready(EPOLLIN)

    def _check_handshake(self) -> None:
        if self._state is _State.HANDSHAKE:
            self._close()

    @property
    def closing(self) -> bool:
        """True once nothing more can be written."""
        return self._state in (_State.CLOSING, _State.CLOSED)

    # --- reading -------------------------------------------------------------------------------------------

    def on_ready(self, events: int) -> None:
        """Handles the socket's events."""
        try:
            if self._state is _State.HANDSHAKE and not self._shake_hands():
                return
            if events & EPOLLOUT and self._blocked:
                self._blocked = False
                self._send()
            if events & ~EPOLLOUT:
                if self._events & EPOLLIN:
                    self._read()
                elif events & _GONE:
                    self._close()
        except Exception:  # boundary: the handler; the connection fails alone
            log.exception("a connection could not be served")
            self.abort()

    def _shake_hands(self) -> bool:
        try:
            if not self._wire.handshake(self._loop, self):
                return False
        except OSError:  # it failed, or the client disconnected
            self._close()
            return False
        self._timer.cancel()
        self._state = _State.OPEN
        self.certificate_names = self._wire.certificate_names()
        self._handler.opened()
        return True

    def _read(self) -> None:
        wire, size = self._wire, _READ_BYTES
        for _ in range(_READS):
            try:
                data = wire.recv(size)
            except BlockingIOError:
                return
            except OSError:  # the client disconnected
                self._close()
                return
            if not data:
                self._ended = True
                self._watch()
                if not self._handler.ended():
                    self.close()
                return
            self._handler.received(data)
            if not self._events & EPOLLIN or (len(data) < size and wire.reads_all):
                return
            if len(data) == size:
                size = _LONG_READ_BYTES
        if wire.pending():
            self._loop.call_soon(self._read_pending)  # the socket does not tell of it

    def _read_pending(self) -> None:
        if self._events & EPOLLIN and self._wire.pending():
            self.on_ready(EPOLLIN)

    def pause_reading(self) -> None:
        """Reads nothing until `resume_reading`."""
        self._paused = True
        self._watch()

    def resume_reading(self) -> None:
        """Reads on."""
        self._paused = False
        self._watch()
        if self._wire.pending():
            self._loop.call_soon(self._read_pending)

    def _watch(self) -> None:
        """Sets the events that are of interest."""
        if self._state is _State.CLOSED:
            self._events = 0
            return
        reads = self._state is _State.OPEN and not self._paused and not self._ended
        events = (EPOLLIN if reads else 0) | (EPOLLOUT if self._blocked else 0)
        if events != self._events:
            self._events = events
            self._loop.modify(self._wire.fileno(), events)

    # --- writing -------------------------------------------------------------------------------------------

    def write(self, *data: Buffer) -> None:
        """Sends bytes with the end of the round; they must not be changed later."""
        if self._state is not _State.OPEN:
            return
        self._output += data
        for each in data:
            self.unsent += len(each)
        if not self._blocked:
            self._loop.flush_later(self)
        if self.unsent > _MOST_UNSENT_BYTES and not self._held:
            self._held = True  # at once: a coroutine that has more to write goes on in this round
            self._handler.pause_writing()

    def flush(self) -> None:
        """Sends what was written, as far as the socket takes it."""
        if not self._blocked and self._state is not _State.CLOSED:
            self._send()

    def _send(self) -> None:
        output, wire = self._output, self._wire
        while output:
            try:
                count = wire.send(output)
            except BlockingIOError:
                self._output = output
                self._blocked = True
                break
            except OSError:  # the client disconnected
                self._close()
                return
            self.unsent -= count
            output = unsent_part(output, count)
        else:
            self._output = []
            if self._state is _State.CLOSING:
                self._loop.call_soon(self._finish)
        if self._blocked or self._events & EPOLLOUT:
            self._watch()
        if self._held and not self._blocked:
            self._held = False
            self._handler.resume_writing()

    # --- the end -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the stream once what was written is sent."""
        if self._state is _State.OPEN:
            self._state = _State.CLOSING
            self._watch()
            if not self._output:
                self._loop.call_soon(self._finish)
        elif self._state is _State.HANDSHAKE:
            self.abort()

    def abort(self) -> None:
        """Closes the stream at once."""
        if self._state is not _State.CLOSED:
            self._state = _State.CLOSING
            self._watch()
            self._output = []
            self.unsent = 0
            self._loop.call_soon(self._close)

    def _finish(self) -> None:
        if self._state is not _State.CLOSED:
            self._wire.say_goodbye()
            self._close()

    def _close(self) -> None:
        if self._state is _State.CLOSED:
            return
        self._state = _State.CLOSED
        self._events = 0
        self._timer.cancel()
        self._output = []
        self.unsent = 0
        self._loop.unregister(self._wire.fileno())
        self._wire.close()
        self._handler.closed()


def unsent_part(buffers: list[Buffer], count: int) -> list[Buffer]:
    """Unsent remainder of `buffers` after `count` sent bytes."""
    for index, buffer in enumerate(buffers):
        size = buffer.nbytes if type(buffer) is memoryview else len(buffer)
        if count < size:
            return [memoryview(buffer)[count:], *buffers[index + 1 :]] if count else buffers[index:]
        count -= size
    return []
