"""A thread with an event loop of its own, and listeners on it."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import uvloop
from uvicorn.config import Config

from conch.core.errors import UnavailableError
from conch.frontends.http.fast_path import FastPath
from conch.frontends.http.http_connection import Connection, ListenerState
from conch.frontends.http.timeouts import ClientTimeouts

log = logging.getLogger(__name__)

App = Callable[[Any, Any, Any], Awaitable[None]]
"""An ASGI application."""

_BACKLOG = 2048
_ABORT_S = 1.0
_HANDSHAKE_S = 10.0
_CROWDED_SHARE = 0.75
DEFAULT_TIMEOUTS = ClientTimeouts()
"""How long clients may take, if nobody says otherwise."""

_T = TypeVar("_T")


class LoopThread:
    """One uvloop loop in one thread; what runs on it must never wait, nor compute for long.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str = "conch-http") -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop, which is there once `start` has been called."""
        assert self._loop is not None, "the thread has not been started"
        return self._loop

    def start(self) -> None:
        """Starts the thread, unless it runs."""
        if self._thread is None:
            self._loop = uvloop.new_event_loop()
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread; whatever still runs on it is cancelled."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)
            thread.join()

    def run(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Runs a coroutine on the loop, from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def listen(
        self,
        app: App,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        reuse_port: bool = False,
        fast_path: FastPath | None = None,
        timeouts: ClientTimeouts = DEFAULT_TIMEOUTS,
        most_connections: int = 256,
    ) -> Listener:
        """Listens on an address and has an ASGI application answer.

        Args:
            app: The application.
            host: A host name or address.
            port: The port; 0 for any free one.
            tls: TLS, or None for plain text.
            reuse_port: Whether other processes may listen on the same port.
            fast_path: What answers some requests without the application, or None.
            timeouts: How long clients may take.
            most_connections: How many connections there may be.

        Raises:
            UnavailableError: The address can't be listened on.
        """
        bound = _bound_socket(host, port, reuse_port)
        self.start()
        listener = Listener(self, bound.getsockname()[1], timeouts, most_connections)
        try:
            self.run(listener.start(app, bound, tls, fast_path)).result()
        except BaseException:
            bound.close()
            raise
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
    """A port that is listened on, and its connections.

    Args:
        thread: The thread that serves them.
        port: The port.
        timeouts: How long clients may take.
        most_connections: How many connections there may be; one more is refused.

    Attributes:
        port: The port.
    """

    def __init__(
        self, thread: LoopThread, port: int, timeouts: ClientTimeouts, most_connections: int
    ) -> None:
        self._thread = thread
        self._timeouts = timeouts
        self._state = ListenerState(most_connections)
        self._server: asyncio.AbstractServer | None = None
        self.port = port

    async def start(
        self, app: App, bound: socket.socket, tls: ssl.SSLContext | None, fast_path: FastPath | None
    ) -> None:
        """Begins to accept connections; on the loop."""
        config = Config(
            app,
            log_config=None,
            # What uvicorn does with these would hold for all of the process, which may use uvicorn as well.
            log_level=None,
            access_log=True,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            date_header=False,
        )
        config.load()
        loop = asyncio.get_running_loop()
        state = self._state
        self._server = await loop.create_server(
            lambda: Connection(config, state, loop, fast_path),
            sock=bound,
            backlog=_BACKLOG,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else _HANDSHAKE_S,
        )
        self._check_clients(loop)

    def _check_clients(self, loop: asyncio.AbstractEventLoop) -> None:
        """Gives up connections whose clients take too long, now and from time to time."""
        timeouts, now = self._timeouts, loop.time()
        if len(self._state.connections) > _CROWDED_SHARE * self._state.most_connections:
            timeouts = timeouts.while_crowded()
        for connection in list(self._state.connections):
            assert isinstance(connection, Connection), "others are not made here"
            if connection.progress.timed_out(connection.snapshot(), timeouts, now):
                connection.give_up()
        self._look: asyncio.TimerHandle = loop.call_later(timeouts.every_s, self._check_clients, loop)

    def close(self, grace_s: float) -> bool:
        """Accepts no more, lets requests in flight finish within the grace, and closes the connections.

        Args:
            grace_s: Seconds that requests in flight may take.

        Returns:
            Whether all of them were finished.
        """
        return self._thread.run(self._close(grace_s)).result()

    async def _close(self, grace_s: float) -> bool:
        if self._server is not None:
            self._server.close()
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
        if self._server is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._server.wait_closed(), _ABORT_S)
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
