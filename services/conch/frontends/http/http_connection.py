"""One HTTP/1.1 connection: hands its requests to the handler, in order, from the first byte to the last.

Requests behind the one that is answered (pipelined) wait in `_waiting`; reading pauses meanwhile. Parsing is
limited in time: a few bytes can be a request, a header or a chunk.

Threads and locks: event loop only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from conch.frontends.connections.byte_stream import BytesHandler, ByteStream
from conch.frontends.http.flow_control import ListenerState, PauseReason, ReadControl
from conch.frontends.http.http_exchange import CONTINUE, STATUS_LINES, HttpExchange
from conch.frontends.http.request_reader import RequestReader
from conch.frontends.http.timeouts import ConnectionSnapshot, ProgressCheck, WaitsFor

log = logging.getLogger(__name__)

Handler = Callable[[HttpExchange], Coroutine[Any, Any, None] | None]
"""Answers a request, or returns a coroutine that does; called once the headers are complete."""

_PARSED_BYTES = 4 << 10  # parsed at once, as they may hold many requests, headers or chunks
_PARSING_S = 0.002  # time slice of parsing per connection
_PROBE_S = 0.5  # delay of the first probe of a half-closed client; doubles with each probe


def refusal(status: int, text: str) -> bytes:
    """A response that ends its connection."""
    body = text.encode("ascii")
    return (
        b"%bcontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
        % (STATUS_LINES[status], len(body), body)
    )


class Connection:
    """One connection.

    Args:
        handler: Answers the requests.
        state: State of the listener.
        open_stream: Makes the stream, whose bytes the connection takes.
        peer: The client's address, such as ``127.0.0.1:50000``.
        reserved: True in a reserved place, see `find_place`.

    Attributes:
        progress: Detects clients that exceed their timeouts.
        stream: Its bytes.
        peer: The client's address.
        lost: True once the connection is closed.
    """

    def __init__(
        self,
        handler: Handler,
        state: ListenerState,
        open_stream: Callable[[BytesHandler], ByteStream],
        peer: str,
        reserved: bool = False,
    ) -> None:
        self.progress = ProgressCheck()
        self.peer = peer
        self.reserved = reserved
        self._gives_way = False
        self.lost = False
        self.stream = open_stream(self)
        self._control = ReadControl(self.stream)
        self._handle = handler
        self._state = state
        self._reader = RequestReader(self)
        self._writable = asyncio.Event()
        self._writable.set()
        self._current: HttpExchange | None = None  # the request that is answered, or the last one that was
        self._waiting: deque[HttpExchange] = deque()  # requests behind it
        self._unparsed: bytes | memoryview = b""
        self._parse_queued = False
        self._received = 0

    # The stream

    def opened(self) -> None:
        """Takes requests from now on."""
        self._state.entering.pop(self, None)
        self._state.connections.add(self)

    def closed(self) -> None:
        """Cancels the request of the connection and releases its buffers."""
        self.lost = True
        self._state.entering.pop(self, None)
        self._state.connections.discard(self)
        self._state.leaving -= self._gives_way
        self._writable.set()
        self._unparsed = b""
        self._waiting.clear()
        self._reader.close()
        current, self._current = self._current, None
        if current is not None:
            current.disconnected()
        self._state.on_lost()

    def pause_writing(self) -> None:
        """Makes responses wait for the client to read."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Continues responses."""
        self._writable.set()
        if self._waiting:
            self._state.loop.call_soon(self._start_next)

    def hold_body(self, paused: bool) -> None:
        """Pauses reading while a body is not asked for, or resumes it."""
        (self._control.pause if paused else self._control.resume)(PauseReason.BODY)

    @property
    def writable(self) -> bool:
        """True if the client has read enough for more to be written."""
        return self._writable.is_set()

    async def drain(self) -> None:
        """Waits until the client has read enough for more to be written."""
        await self._writable.wait()

    def ended(self) -> bool:
        """Handles a half-close: the client may still wait for responses.

        A closed client looks the same until bytes are sent to it. So during a long request the connection
        sends bytes that clients ignore, such as ``100 Continue``; a closed client answers with a reset.

        Returns:
            True if the connection stays open, which TLS does not allow.
        """
        if self._state.tls:
            return False
        if not self._reader.closed:
            last = self._last
            if self._reader.in_head or self._reader.exchange is not None:
                self.refuse(400, "The request ends too early.")
            elif last is None or last.done:
                return False
            else:
                self._reader.closed = True
                last.keep_alive = False
        self._state.loop.call_later(_PROBE_S, self._probe, _PROBE_S)
        return True

    def _probe(self, delay_s: float) -> None:
        """Sends a half-closed client bytes that it ignores; the stream closes if it is gone."""
        if self.stream.closing:
            return
        current = self._current
        if current is not None and not current.done and not self._unsent():
            if current.began:
                self.stream.write(current.filler)
            elif current.version != "1.0":
                self.stream.write(CONTINUE)
        self._state.loop.call_later(2 * delay_s, self._probe, 2 * delay_s)

    # Parsing

    def received(self, data: bytes) -> None:
        """Parses received bytes, or buffers them where there are many."""
        size = len(data)
        self._received += size
        if size <= _PARSED_BYTES and not self._unparsed:
            self._reader.feed(data)
        else:
            self._unparsed = bytes(self._unparsed) + data if self._unparsed else data
            self.take_turn()

    def take_turn(self) -> None:
        """Parses buffered bytes for one time slice.

        Pieces are small unless they belong to a body.
        """
        self._parse_queued = False
        rest = memoryview(self._unparsed)
        end = time.monotonic() + _PARSING_S
        while rest and not self._waiting and not self._reader.closed:
            size = max(_PARSED_BYTES, self._reader.body_left())
            self._reader.feed(rest[:size])
            rest = rest[size:]
            if time.monotonic() > end:
                break
        self._unparsed = b"" if self._reader.closed else rest
        if self._unparsed:
            self._control.pause(PauseReason.UNPARSED)
            self._parse_later()
        else:
            self._control.resume(PauseReason.UNPARSED)

    def _parse_later(self) -> None:
        """Queues the rest of the buffer once no request waits."""
        if self._unparsed and not self._waiting and not self._parse_queued:
            self._parse_queued = True
            self._state.turns.queue(self)

    # Requests in order

    @property
    def _last(self) -> HttpExchange | None:
        """The last request that was received."""
        return self._waiting[-1] if self._waiting else self._current

    def begin(self, exchange: HttpExchange, waited: bool = False) -> None:
        """Starts a request, or queues it behind earlier ones and behind what their client has not read."""
        busy = self._current is not None and not self._current.done
        if not waited and (busy or self._waiting or not self._writable.is_set()):
            self._waiting.append(exchange)
            self._control.pause(PauseReason.WAITING)
            return
        self._current = exchange
        work = self._handle(exchange)
        if work is not None:
            self.run(exchange, work)

    def run(self, exchange: HttpExchange, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine of an exchange as a task."""
        task = self._state.loop.create_task(work)
        self._state.tasks.add(task)
        task.add_done_callback(partial(self._task_ended, exchange))

    def _task_ended(self, exchange: HttpExchange, task: asyncio.Task[None]) -> None:
        self._state.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error(
                "%s %s could not be answered", exchange.method, exchange.path, exc_info=task.exception()
            )
        if not exchange.done and not exchange.unsent:
            self.stream.abort()

    def finished(self, exchange: HttpExchange) -> None:
        """Ends a request: closes the connection, or goes on with the next one."""
        exchange.done = True
        if exchange.body_hold is not None:
            exchange.let_go()
        exchange.on_disconnect = exchange.then = exchange.whole = exchange.collected = exchange.sink = None
        if exchange.body_paused:
            self.hold_body(False)
        if not exchange.keep_alive:
            self._reader.closed = True
            self.stream.close()
        elif self._waiting:
            self._state.loop.call_soon(self._start_next)

    def _start_next(self) -> None:
        current = self._current
        if not self._waiting or self.stream.closing or not self._writable.is_set():
            return
        if current is None or current.done:
            self.begin(self._waiting.popleft(), waited=True)
            if not self._waiting:
                self._control.resume(PauseReason.WAITING)
                self._parse_later()

    # Refusals, timeouts, shutdown

    @property
    def idle(self) -> bool:
        """True between requests."""
        return self.snapshot().waits is WaitsFor.REQUEST

    @property
    def used(self) -> bool:
        """True once a request has come."""
        return self._reader.requests > 0

    @property
    def leaving(self) -> bool:
        """True once it is ending."""
        return self.stream.closing

    @property
    def heard_at(self) -> float:
        """See `ProgressCheck.since_s`."""
        return self.progress.since_s

    def leave(self) -> None:
        """Makes room for another connection."""
        if not self._gives_way:
            self._gives_way = True
            self._state.leaving += 1
        self.give_up()

    def give_up(self) -> None:
        """Closes the connection of a client that timed out."""
        if self.stream.closing or self._unsent():
            self.stream.abort()
        elif self._reader.in_head or self._reader.exchange is not None:
            self.refuse(408, "The request has not come in time.")
        else:
            self.stream.close()

    def refuse(self, status: int, text: str) -> None:
        """Refuses the request that is read, as the last one; earlier ones are still answered."""
        self._reader.closed = True
        broken, self._reader.exchange = self._reader.exchange, None
        if broken is not None and broken is self._current:
            if broken.began:
                self.stream.close()
            else:
                self._refuse(status, text)
            return
        if broken is not None:
            self._waiting.pop()
        last = self._last
        if last is None or last.done:
            self._refuse(status, text)
        else:
            last.keep_alive = False

    def _refuse(self, status: int, text: str) -> None:
        self.stream.write(refusal(status, text))
        self.stream.close()

    def shutdown(self) -> None:
        """Closes the connection once its requests are answered."""
        last = self._last
        if last is None or last.done:
            self.stream.close()
        else:
            last.keep_alive = False

    def begun(self) -> list[HttpExchange]:
        """Returns the requests that have come whole and are not answered yet."""
        begun = (self._current, *self._waiting)
        reading = self._reader.exchange
        return [each for each in begun if each is not None and each is not reading and not each.done]

    def snapshot(self) -> ConnectionSnapshot:
        """Returns the state that timeouts are checked against."""
        last, unsent = self._last, self._unsent()
        if self.stream.closing:
            waits = WaitsFor.CLOSE
        elif unsent:
            waits = WaitsFor.READER
        elif self._reader.exchange is not None:
            waits = WaitsFor.SERVER if self._waiting or self._control.paused else WaitsFor.REST
        elif last is not None and not last.done:
            waits = WaitsFor.SERVER
        else:
            waits = WaitsFor.REST if self._reader.in_head else WaitsFor.REQUEST
        return ConnectionSnapshot(waits, self._reader.requests, self._received, unsent)

    def _unsent(self) -> int:
        """Returns the number of bytes not yet sent to the client."""
        unsent = 0 if self._current is None else self._current.unsent
        return self.stream.unsent + unsent
