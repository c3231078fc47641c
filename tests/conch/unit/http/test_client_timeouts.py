"""Clients that take too long: what counts as that, and what a listener does with them."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.support.servers import WAIT_S, eventually

from conch.frontends.http.http_exchange import ClientDisconnectError, HttpExchange
from conch.frontends.http.http_loop import HttpListener, HttpLoop
from conch.frontends.http.timeouts import ClientTimeouts, ConnectionSnapshot, ProgressCheck, WaitsFor
from conch.ipc.loop import SharedLoop

DEFAULT_TIMEOUTS = ClientTimeouts(stalled_s=10.0, least_bytes=100, idle_s=50.0)
SHORT = ClientTimeouts(stalled_s=0.1, idle_s=0.1, every_s=0.01)


def test_a_request_that_comes_too_slowly() -> None:
    progress = ProgressCheck()
    assert not progress.timed_out(ConnectionSnapshot(WaitsFor.REST, 1, 10, 0), DEFAULT_TIMEOUTS, 0.0)
    assert not progress.timed_out(ConnectionSnapshot(WaitsFor.REST, 1, 50, 0), DEFAULT_TIMEOUTS, 9.0)
    assert not progress.timed_out(ConnectionSnapshot(WaitsFor.REST, 1, 110, 0), DEFAULT_TIMEOUTS, 10.0), (
        "as much as it has to be"
    )
    assert not progress.timed_out(ConnectionSnapshot(WaitsFor.REST, 1, 209, 0), DEFAULT_TIMEOUTS, 19.0)
    assert progress.timed_out(ConnectionSnapshot(WaitsFor.REST, 1, 209, 0), DEFAULT_TIMEOUTS, 20.0)


def test_each_request_has_its_own_time() -> None:
    progress = ProgressCheck()
    for number in range(10):
        assert not progress.timed_out(
            ConnectionSnapshot(WaitsFor.REST, number, number, 0), DEFAULT_TIMEOUTS, 9.0 * number
        )


@pytest.mark.parametrize(
    ("waits", "limit"), [(WaitsFor.REQUEST, 50.0), (WaitsFor.READER, 50.0), (WaitsFor.CLOSE, 10.0)]
)
def test_what_is_idle(waits: WaitsFor, limit: float) -> None:
    progress = ProgressCheck()
    snapshot = ConnectionSnapshot(waits, 1, 10, 5)
    assert not progress.timed_out(snapshot, DEFAULT_TIMEOUTS, 0.0)
    assert not progress.timed_out(snapshot._replace(unsent=4), DEFAULT_TIMEOUTS, limit), "it reads"
    assert not progress.timed_out(snapshot._replace(unsent=4), DEFAULT_TIMEOUTS, 2 * limit - 0.1)
    assert progress.timed_out(snapshot._replace(unsent=4), DEFAULT_TIMEOUTS, 2 * limit)


def test_what_is_worked_on_may_take_any_time() -> None:
    progress = ProgressCheck()
    for now in (0.0, 1e3, 1e6):
        assert not progress.timed_out(ConnectionSnapshot(WaitsFor.SERVER, 1, 10, 0), DEFAULT_TIMEOUTS, now)
    assert not progress.timed_out(ConnectionSnapshot(WaitsFor.REQUEST, 1, 10, 0), DEFAULT_TIMEOUTS, 2e6), (
        "idle from now on"
    )


class Held:
    """A handler whose answers wait for leave once a body has come.

    Attributes:
        entered: Set when a request has come as a whole.
    """

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._go = asyncio.Event()

    def release(self, thread: HttpLoop) -> None:
        """Gives leave."""
        thread.loop.call_soon_threadsafe(self._go.set)

    async def __call__(self, exchange: HttpExchange) -> None:
        try:
            await exchange.wait_body(100)
        except ClientDisconnectError:
            return
        self.entered.set()
        await self._go.wait()
        exchange.respond(200, [], b"hi")


@pytest.fixture
def thread() -> Iterator[HttpLoop]:
    """A thread that is stopped after the test."""
    thread = HttpLoop(SharedLoop("test-loop"))
    yield thread
    thread.stop()


def client_of(listener: HttpListener) -> socket.socket:
    return socket.create_connection(("127.0.0.1", listener.port), WAIT_S)


def sent_at_once(thread: HttpLoop, listener: HttpListener, data: bytes) -> socket.socket:
    """A client that is idle at no time before it has sent something: the loop stands still until then."""
    stands, go_on = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        assert go_on.wait(WAIT_S)

    thread.loop.call_soon_threadsafe(stand)
    assert stands.wait(WAIT_S)
    client = client_of(listener)
    client.sendall(data)
    go_on.set()
    return client


def rest_of(client: socket.socket) -> bytes:
    whole = b""
    while part := client.recv(1000):
        whole += part
    return whole


WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
HALVES = [WHOLE[:10], b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n123"]

EXPECTING = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n123"


@pytest.mark.parametrize("half", HALVES)
def test_half_requests_are_given_up(thread: HttpLoop, half: bytes) -> None:
    listener = thread.listen(Held(), "127.0.0.1", 0, timeouts=SHORT)
    with closing(sent_at_once(thread, listener, half)) as client:
        assert rest_of(client).startswith(b"HTTP/1.1 408 ")
    assert listener.close(WAIT_S)


def test_idle_connections_are_closed_and_requests_that_run_are_not(thread: HttpLoop) -> None:
    app = Held()
    listener = thread.listen(app, "127.0.0.1", 0, timeouts=SHORT)
    # Beside the beginning of another request, which waits for no other.
    with closing(sent_at_once(thread, listener, WHOLE + HALVES[0])) as busy:
        assert app.entered.wait(WAIT_S)
        for _ in range(2):
            with closing(client_of(listener)) as idle:
                assert rest_of(idle) == b""
        app.release(thread)
        first, _, second = rest_of(busy).partition(b"hi")
        assert first.startswith(b"HTTP/1.1 200 ") and second.startswith(b"HTTP/1.1 408 ")
    assert listener.close(WAIT_S)


def test_half_requests_do_not_hold_up_the_end(thread: HttpLoop) -> None:
    listener = thread.listen(Held(), "127.0.0.1", 0, timeouts=ClientTimeouts(stopping_s=0.1))
    with closing(client_of(listener)) as client:
        client.sendall(EXPECTING)
        assert client.recv(1000).startswith(b"HTTP/1.1 100 ")
        assert listener.close(100 * WAIT_S)
        assert rest_of(client).startswith(b"HTTP/1.1 408 ")


def test_a_body_that_still_comes_is_waited_for(thread: HttpLoop) -> None:
    app = Held()
    listener = thread.listen(app, "127.0.0.1", 0, timeouts=ClientTimeouts(stopping_s=WAIT_S))
    ended: list[bool] = []
    stop = threading.Thread(target=lambda: ended.append(listener.close(WAIT_S)))
    with closing(client_of(listener)) as client:
        client.sendall(EXPECTING)
        assert client.recv(1000).startswith(b"HTTP/1.1 100 ")
        stop.start()

        def refused() -> bool:
            try:
                client_of(listener).close()
            except ConnectionRefusedError:
                return True
            except ConnectionResetError:  # it closed its socket while this connection was opened
                return False
            return False

        eventually(refused, "it takes nobody else")
        client.sendall(b"456789")
        app.release(thread)
        assert rest_of(client).endswith(b"connection: close\r\n\r\nhi")
    stop.join()
    assert ended == [True]
