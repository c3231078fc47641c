"""HTTP on an I/O loop: coroutines of handlers, listening ports and their connections."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, TypeVar

from conch.core.errors import UnavailableError
from conch.core.servable import InlineClaim
from conch.door.operation_table import SERVER_LIVE, SERVER_READY
from conch.frontends.connections.byte_stream import ByteStream
from conch.frontends.connections.listener import Listener, tcp_sockets
from conch.frontends.connections.places import Place, find_place
from conch.frontends.connections.wire import open_wire
from conch.frontends.http.flow_control import ListenerState
from conch.frontends.http.http_connection import Connection, Handler, refusal
from conch.frontends.http.http_exchange import HttpExchange
from conch.frontends.http.timeouts import ClientTimeouts
from conch.ipc.asyncio_loop import AsyncioLoop, TimedCallback, asyncio_loop
from conch.ipc.loop import IO_LOOP, SharedLoop

log = logging.getLogger(__name__)

ABORT_S = 1.0
"""Time for what is aborted to end."""
_LOOK_S = 0.02  # between looks at requests that a stop waits for; a notice would cost each request a call
_CROWDED_SHARE = 0.75
_TOO_MANY_TEXT = "There are too many connections."
_TOO_MANY = refusal(503, _TOO_MANY_TEXT)
_HEALTH = frozenset((*SERVER_LIVE.paths, *SERVER_READY.paths, "/health"))
_UNREAD_BYTES = 64 << 10
DEFAULT_TIMEOUTS = ClientTimeouts()
"""Default timeouts."""

_T = TypeVar("_T")


class HttpLoop:
    """HTTP's use of an I/O loop; code on it must not block or compute for long.

    Args:
        shared: The I/O loop, which is held from `start` to `stop`.

    Attributes:
        loop: The event loop of coroutines; available after `start`.
    """

    loop: AsyncioLoop

    def __init__(self, shared: SharedLoop = IO_LOOP) -> None:
        self._shared = shared
        self._running = False

    def start(self) -> None:
        """Starts to use the loop, once."""
        if not self._running:
            self.loop = asyncio_loop(self._shared.hold())
            self._running = True

    def stop(self) -> None:
        """Cancels the tasks, and lets go of the loop."""
        if self._running:
            self._running = False
            self.run(self.loop.cancel_tasks()).result()
            self.loop.close()
            self._shared.release()

    def call_soon(self, work: Callable[[], object]) -> None:
        """Runs work on the loop; any thread."""
        self.loop.io.call_soon(work)

    def queue_inline(self, claim: InlineClaim) -> None:
        """Takes a claim of a model that the loop may run after the round's events."""
        self.loop.io.queue_inline(claim)

    def run(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Runs a coroutine on the loop; called on another thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def listen(
        self,
        handler: Handler,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        reuse_port: bool = False,
        timeouts: ClientTimeouts = DEFAULT_TIMEOUTS,
        most_connections: int = 256,
    ) -> HttpListener:
        """Serves HTTP on an address.

        Args:
            handler: Answers the requests, on the loop.
            host: Host name or address.
            port: The port; 0 for any free one.
            tls: TLS, or None for plain text.
            reuse_port: True lets other processes listen on the same port.
            timeouts: Timeouts of clients.
            most_connections: Limit of connections.

        Raises:
            UnavailableError: The address can't be listened on.
        """
        bound = bound_sockets(host, port, reuse_port)
        self.start()
        with ExitStack() as undo:
            for each in bound:
                undo.callback(each.close)
            listener = HttpListener(self, handler, bound, tls, timeouts, most_connections)
            self.run(listener.start()).result()
            undo.pop_all()
        return listener


def refuse_crowded(accepted: socket.socket, tls: bool) -> None:
    """Refuses a connection of a port that has as many as it may."""
    with accepted, suppress(OSError):
        if not tls:
            accepted.send(_TOO_MANY)
            accepted.shutdown(socket.SHUT_WR)
            accepted.recv(_UNREAD_BYTES)  # else the kernel resets the connection before the client reads


class ConnectionSet:
    """Connections with one handler, their timeouts and their end; event loop only.

    Args:
        loop: The event loop.
        handler: Answers the requests.
        tls: TLS, or None for plain text.
        timeouts: Timeouts of clients.
        most_connections: Limit of connections.
        on_left: Called when a connection has ended.
    """

    def __init__(
        self,
        loop: AsyncioLoop,
        handler: Handler,
        tls: ssl.SSLContext | None,
        timeouts: ClientTimeouts,
        most_connections: int,
        on_left: Callable[[], None] = lambda: None,
    ) -> None:
        self._handler = handler
        self._loop = loop
        self._tls = tls
        self._timeouts = timeouts
        self._state = ListenerState(loop, tls is not None, most_connections, self._lost)
        self._on_left = on_left
        self._none = asyncio.Event()
        self._check_clients()

    def __len__(self) -> int:
        return len(self._state.entering) + len(self._state.connections)

    def serve(self, accepted: socket.socket, peer: str) -> None:
        """Serves a connection; refuses it if there are too many, and all have requests."""
        state = self._state
        place = Place.FREE
        if len(self) - state.leaving >= state.most_connections:
            found = [*state.entering, *state.connections]
            place = find_place(found, state.leaving, state.most_connections)
        if place is Place.NONE:
            refuse_crowded(accepted, self._tls is not None)
            self._on_left()
            return
        try:
            wire = open_wire(accepted, self._tls, http2=False)
        except OSError:  # the client disconnected
            accepted.close()
            self._on_left()
            return
        reserved = place is Place.RESERVED
        handler = self._handle_crowded if reserved else self._handler
        connection = Connection(handler, state, partial(ByteStream, self._loop.io, wire), peer, reserved)
        state.entering[connection] = None
        connection.stream.start()

    def _handle_crowded(self, exchange: HttpExchange) -> Coroutine[Any, Any, None] | None:
        """Answers a health check; refuses all else. The connection ends."""
        if exchange.path in _HEALTH:
            exchange.keep_alive = False
            return self._handler(exchange)
        headers = [(b"content-type", b"text/plain; charset=utf-8")]
        exchange.respond(503, headers, _TOO_MANY_TEXT.encode(), closes=True)
        return None

    def _lost(self) -> None:
        if not self._state.connections:
            self._none.set()
        self._on_left()

    def _check_clients(self) -> None:
        """Closes connections that timed out; reschedules itself."""
        timeouts, now = self._timeouts, self._loop.time()
        if len(self._state.connections) > _CROWDED_SHARE * self._state.most_connections:
            timeouts = timeouts.while_crowded()
        for connection in list(self._state.connections):
            if connection.progress.timed_out(connection.snapshot(), timeouts, now):
                connection.give_up()
        self._look: TimedCallback = self._loop.call_later(timeouts.every_s, self._check_clients)

    async def finish_begun(self, handler: Handler, grace_s: float) -> bool:
        """See `HttpListener.finish_begun`; a request has begun if it has come whole."""
        self._handler = handler
        begun = [each for connection in self._state.connections for each in connection.begun()]
        return await ended_in_time(begun, grace_s)

    async def close(self, grace_s: float) -> bool:
        """Waits up to `grace_s` seconds for requests in flight, and closes.

        Returns:
            True if all requests finished.
        """
        state = self._state
        for entering in list(state.entering):
            entering.stream.abort()
        self._none.clear()
        for connection in list(state.connections):
            connection.shutdown()
        if not state.connections:
            self._none.set()
        self._look.cancel()
        self._timeouts = self._timeouts.while_stopping()
        self._check_clients()
        ended = await in_time(self._none.wait(), grace_s)
        self._look.cancel()
        if not ended:
            for connection in list(state.connections):
                connection.stream.abort()
            await in_time(self._none.wait(), ABORT_S)
        await end_tasks(state.tasks)
        return ended


class HttpListener:
    """A listening port and its connections; connections over the limit are refused."""

    def __init__(
        self,
        thread: HttpLoop,
        handler: Handler,
        bound: Sequence[socket.socket],
        tls: ssl.SSLContext | None,
        timeouts: ClientTimeouts,
        most_connections: int,
    ) -> None:
        self._thread = thread
        self._tls = tls
        self._make = partial(ConnectionSet, thread.loop, handler, tls, timeouts, most_connections)
        self.port: int = bound[0].getsockname()[1]
        self._acceptors = [Listener(each, self._take, f"port {self.port}") for each in bound]

    async def start(self) -> None:
        """Starts accepting connections; runs on the loop."""
        self._connections = self._make()
        for each in self._acceptors:
            each.listen(self._thread.loop.io)

    def _take(self, accepted: socket.socket, address: object) -> None:
        self._connections.serve(accepted, client_address(address))

    def finish_begun(self, handler: Handler, grace_s: float) -> bool:
        """Waits up to `grace_s` seconds for the requests that have begun; `handler` answers new connections.

        Returns:
            True if these requests finished.
        """
        return self._thread.run(self._connections.finish_begun(handler, grace_s)).result()

    def close(self, grace_s: float) -> bool:
        """Stops accepting, waits up to `grace_s` seconds for requests in flight, and closes.

        Returns:
            True if all requests finished.
        """
        return self._thread.run(self._close(grace_s)).result()

    async def _close(self, grace_s: float) -> bool:
        for each in self._acceptors:
            each.close()
        return await self._connections.close(grace_s)


async def ended_in_time(begun: Sequence[HttpExchange], seconds: float) -> bool:
    """Waits until exchanges have ended; False if some have not in time."""

    async def ended() -> None:
        while any(not each.done and not each.lost for each in begun):
            await asyncio.sleep(_LOOK_S)

    return await in_time(ended(), seconds)


async def end_tasks(tasks: Collection[asyncio.Task[None]]) -> None:
    """Waits a moment for the tasks of handlers, and cancels those that go on."""
    if tasks:
        _, late = await asyncio.wait(list(tasks), timeout=ABORT_S)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=ABORT_S)


async def in_time(work: Coroutine[Any, Any, Any], seconds: float) -> bool:
    """Runs a coroutine; False if it does not end in time."""
    try:
        await asyncio.wait_for(work, max(seconds, 0.001))
    except TimeoutError:
        return False
    return True


def bound_sockets(host: str, port: int, reuse_port: bool) -> list[socket.socket]:
    """Listens on the addresses of a host, see `tcp_sockets`. Raises UnavailableError: it can't."""
    try:
        return tcp_sockets(host or "0.0.0.0", port, reuse_port)
    except socket.gaierror as error:
        raise UnavailableError(f"address '{host}' is not known: {error.strerror}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UnavailableError(f"Socket '{host}:{port}' already in use ") from None
        raise UnavailableError(f"address {host}:{port} can't be listened on: {error.strerror}") from None


def client_address(address: object) -> str:
    """The client's address, such as ``127.0.0.1:50000``."""
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else ""
