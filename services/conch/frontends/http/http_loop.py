"""A thread that runs an event loop, and the listeners on it."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

import uvloop

from conch.core.errors import UnavailableError
from conch.frontends.http.flow_control import ListenerState
from conch.frontends.http.http_connection import Connection, Handler, refusal
from conch.frontends.http.timeouts import ClientTimeouts

log = logging.getLogger(__name__)

_BACKLOG = 2048
_ABORT_S = 1.0
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
        bound = _bound_socket(host, port, reuse_port)
        self.start()
        listener = Listener(self, handler, bound.getsockname()[1], timeouts, most_connections)
        with ExitStack() as undo:
            undo.callback(bound.close)
            self.run(listener.start(bound, tls)).result()
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


class Listener:
    """A listening port and its connections; connections over the limit are refused."""

    def __init__(
        self, thread: LoopThread, handler: Handler, port: int, timeouts: ClientTimeouts, most_connections: int
    ) -> None:
        self._thread = thread
        self._handler = handler
        self._timeouts = timeouts
        self._state = ListenerState(thread.loop, most_connections)
        self._entries: set[asyncio.Task[None]] = set()
        self.port = port

    async def start(self, bound: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Starts accepting connections; runs on the loop."""
        self._bound, self._tls = bound, tls
        bound.listen(_BACKLOG)
        self._listen()
        self._check_clients(self._thread.loop)

    # The loop's own servers count no connection before the end of its handshake, and where descriptors are
    # exhausted they close all that wait.

    def _listen(self) -> None:
        self._accepting: asyncio.TimerHandle | None = None
        self._thread.loop.add_reader(self._bound, self._accept)

    def _accept(self) -> None:
        """Accepts some of the connections that wait; refuses those over the limit."""
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, _ = self._bound.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:  # descriptors or memory are exhausted
                log.warning("port %d can't accept connections: %s", self.port, error.strerror)
                self._thread.loop.remove_reader(self._bound)
                self._accepting = self._thread.loop.call_later(_ACCEPT_AGAIN_S, self._listen)
                return
            accepted.setblocking(False)
            if self._state.full:
                self._refuse(accepted)
            else:
                connection = Connection(self._handler, self._state)
                self._state.entering.add(connection)
                task = self._thread.loop.create_task(self._enter(connection, accepted))
                self._entries.add(task)
                task.add_done_callback(self._entries.discard)

    async def _enter(self, connection: Connection, accepted: socket.socket) -> None:
        """Opens a connection, with TLS's handshake if there is one."""
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._thread.loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else _HANDSHAKE_S,
            )
        except OSError:  # the client is gone, or it and TLS do not agree
            accepted.close()
        finally:
            self._state.entering.discard(connection)

    def _refuse(self, accepted: socket.socket) -> None:
        with accepted, suppress(OSError):
            if self._tls is None:
                accepted.send(_TOO_MANY)
                accepted.shutdown(socket.SHUT_WR)
                accepted.recv(_UNREAD_BYTES)  # else the kernel resets the connection before the client reads

    def _check_clients(self, loop: asyncio.AbstractEventLoop) -> None:
        """Closes connections that timed out; reschedules itself."""
        timeouts, now = self._timeouts, loop.time()
        if len(self._state.connections) > _CROWDED_SHARE * self._state.most_connections:
            timeouts = timeouts.while_crowded()
        for connection in list(self._state.connections):
            if connection.progress.timed_out(connection.snapshot(), timeouts, now):
                connection.give_up()
        self._look: asyncio.TimerHandle = loop.call_later(timeouts.every_s, self._check_clients, loop)

    def finish_begun(self, handler: Handler, grace_s: float) -> bool:
        """Waits up to `grace_s` seconds for the requests that have begun; `handler` answers new connections.

        Returns:
            True if these requests finished.
        """
        return self._thread.run(self._finish_begun(handler, grace_s)).result()

    async def _finish_begun(self, handler: Handler, grace_s: float) -> bool:
        self._handler = handler
        begun = [each for connection in self._state.connections for each in connection.begun()]

        async def ended() -> None:
            while any(not each.done and not each.lost for each in begun):
                await asyncio.sleep(_LOOK_S)

        return await _in_time(ended(), grace_s)

    def close(self, grace_s: float) -> bool:
        """Stops accepting, waits up to `grace_s` seconds for requests in flight, and closes.

        Returns:
            True if all requests finished.
        """
        return self._thread.run(self._close(grace_s)).result()

    async def _close(self, grace_s: float) -> bool:
        if self._accepting is not None:
            self._accepting.cancel()
        self._thread.loop.remove_reader(self._bound)
        self._bound.close()
        if self._entries:  # without TLS they are open at once
            _, late = await asyncio.wait(list(self._entries), timeout=min(grace_s, _ENTRY_S))
            for task in late:
                task.cancel()
        state = self._state
        none = asyncio.Event()

        def lost() -> None:
            if not state.connections:
                none.set()

        state.on_lost = lost
        for connection in list(state.connections):
            connection.shutdown()
        lost()
        self._look.cancel()
        self._timeouts = self._timeouts.while_stopping()
        self._check_clients(self._thread.loop)
        ended = await _in_time(none.wait(), grace_s)
        self._look.cancel()
        if not ended:
            for connection in list(state.connections):
                connection.transport.abort()
            await _in_time(none.wait(), _ABORT_S)
        if state.tasks:
            _, late = await asyncio.wait(list(state.tasks), timeout=_ABORT_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=_ABORT_S)
        return ended


async def _in_time(work: Coroutine[Any, Any, Any], seconds: float) -> bool:
    try:
        await asyncio.wait_for(work, max(seconds, 0.001))
    except TimeoutError:
        return False
    return True


def _bound_socket(host: str, port: int, reuse_port: bool) -> socket.socket:
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
