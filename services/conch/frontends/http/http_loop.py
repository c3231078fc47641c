"""A thread that runs an event loop, and the listeners on it."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, TypeVar

import uvloop

from conch.core.errors import UnavailableError
from conch.frontends.http.flow_control import ListenerState
from conch.frontends.http.http_connection import Connection, Handler, refusal
from conch.frontends.http.http_exchange import HttpExchange
from conch.frontends.http.timeouts import ClientTimeouts

log = logging.getLogger(__name__)

_BACKLOG = 2048
ABORT_S = 1.0
"""Time for what is aborted to end."""
_ENTRY_S = 0.1  # for connections that have been accepted, and are not open yet
_LOOK_S = 0.02  # between looks at requests that a stop waits for; a notice would cost each request a call
_HANDSHAKE_S = 10.0
_CROWDED_SHARE = 0.75
_ACCEPTED_AT_ONCE = 100
_ACCEPT_AGAIN_S = 0.1
_TOO_MANY = refusal(503, "There are too many connections.")
_UNREAD_BYTES = 64 << 10
DEFAULT_TIMEOUTS = ClientTimeouts()
"""Default timeouts."""

_T = TypeVar("_T")


class LoopThread:
    """One uvloop event loop in one thread; code on it must not block or compute for long.

    Attributes:
        loop: The event loop; available after `start`.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, name: str = "conch-http") -> None:
        self._name = name
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread if it does not run."""
        if self._thread is None:
            self.loop = uvloop.new_event_loop()
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stops the thread and cancels its tasks."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)
            thread.join()

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
    ) -> Listener:
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
        bound = bound_socket(host, port, reuse_port)
        self.start()
        with ExitStack() as undo:
            undo.callback(bound.close)
            listener = Listener(self, handler, bound, tls, timeouts, most_connections)
            self.run(listener.start()).result()
            undo.pop_all()
        return listener

    def _run(self) -> None:
        loop = self.loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            asyncio.set_event_loop(None)
            loop.close()


class Acceptor:
    """Accepts the connections of a bound socket; event loop only.

    Args:
        loop: The event loop.
        bound: The socket, which `stop` closes.
        take: Takes each connection.
    """

    # The loop's own servers count no connection before the end of its handshake, and where descriptors are
    # exhausted they close all that wait.

    def __init__(
        self, loop: asyncio.AbstractEventLoop, bound: socket.socket, take: Callable[[socket.socket], None]
    ) -> None:
        self._loop = loop
        self._bound = bound
        self._take = take

    def start(self) -> None:
        """Starts accepting."""
        self._bound.listen(_BACKLOG)
        self._listen()

    def _listen(self) -> None:
        self._accepting: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._bound, self._accept)

    def _accept(self) -> None:
        """Accepts some of the connections that wait."""
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, _ = self._bound.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:  # descriptors or memory are exhausted
                port = self._bound.getsockname()[1]
                log.warning("port %d can't accept connections: %s", port, error.strerror)
                self._loop.remove_reader(self._bound)
                self._accepting = self._loop.call_later(_ACCEPT_AGAIN_S, self._listen)
                return
            accepted.setblocking(False)
            self._take(accepted)

    def stop(self) -> None:
        """Stops accepting."""
        if self._accepting is not None:
            self._accepting.cancel()
        self._loop.remove_reader(self._bound)
        self._bound.close()


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
        loop: asyncio.AbstractEventLoop,
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
        self._state = ListenerState(loop, most_connections, self._lost)
        self._on_left = on_left
        self._none = asyncio.Event()
        self._entries: set[asyncio.Task[None]] = set()
        self._check_clients()

    def __len__(self) -> int:
        return len(self._state.entering) + len(self._state.connections)

    @property
    def full(self) -> bool:
        """True if the limit of connections is reached."""
        return self._state.full

    def serve(self, accepted: socket.socket) -> None:
        """Serves a connection."""
        connection = Connection(self._handler, self._state)
        self._state.entering.add(connection)
        task = self._loop.create_task(self._enter(connection, accepted))
        self._entries.add(task)
        task.add_done_callback(self._entries.discard)

    async def _enter(self, connection: Connection, accepted: socket.socket) -> None:
        """Opens a connection, with TLS's handshake if there is one."""
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else _HANDSHAKE_S,
            )
        except OSError:  # the client disconnected, or the TLS handshake failed
            accepted.close()
        finally:
            if connection in self._state.entering:
                self._state.entering.discard(connection)
                self._on_left()

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
        self._look: asyncio.TimerHandle = self._loop.call_later(timeouts.every_s, self._check_clients)

    async def finish_begun(self, handler: Handler, grace_s: float) -> bool:
        """See `Listener.finish_begun`; a request has begun if it has come whole."""
        self._handler = handler
        begun = [each for connection in self._state.connections for each in connection.begun()]
        return await ended_in_time(begun, grace_s)

    async def close(self, grace_s: float) -> bool:
        """Waits up to `grace_s` seconds for requests in flight, and closes.

        Returns:
            True if all requests finished.
        """
        if self._entries:  # without TLS they are open at once
            _, late = await asyncio.wait(list(self._entries), timeout=min(grace_s, _ENTRY_S))
            for task in late:
                task.cancel()
        state = self._state
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
                connection.transport.abort()
            await in_time(self._none.wait(), ABORT_S)
        await end_tasks(state.tasks)
        return ended


class Listener:
    """A listening port and its connections; connections over the limit are refused."""

    def __init__(
        self,
        thread: LoopThread,
        handler: Handler,
        bound: socket.socket,
        tls: ssl.SSLContext | None,
        timeouts: ClientTimeouts,
        most_connections: int,
    ) -> None:
        self._thread = thread
        self._tls = tls
        self._make = partial(ConnectionSet, thread.loop, handler, tls, timeouts, most_connections)
        self._acceptor = Acceptor(thread.loop, bound, self._take)
        self.port: int = bound.getsockname()[1]

    async def start(self) -> None:
        """Starts accepting connections; runs on the loop."""
        self._connections = self._make()
        self._acceptor.start()

    def _take(self, accepted: socket.socket) -> None:
        if self._connections.full:
            refuse_crowded(accepted, self._tls is not None)
        else:
            self._connections.serve(accepted)

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
        self._acceptor.stop()
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


def bound_socket(host: str, port: int, reuse_port: bool) -> socket.socket:
    """Binds an address. Raises UnavailableError: it can't be listened on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UnavailableError(f"address '{host}' is not known: {error.strerror}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise UnavailableError(f"Socket '{host}:{port}' already in use ") from None
        raise UnavailableError(f"address {host}:{port} can't be listened on: {error.strerror}") from None
    return bound
