"""The loop's thread, its listeners, and the mailbox to it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from tests.support.servers import WAIT_S, eventually

from conch.core.errors import UnavailableError
from conch.frontends.connections.places import RESERVED_CONNECTIONS
from conch.frontends.http.http_exchange import HttpExchange
from conch.frontends.http.http_loop import HttpLoop
from conch.frontends.http.infer.infer_route import ReplyMailbox
from conch.ipc.loop import SharedLoop


@pytest.fixture
def thread() -> Iterator[HttpLoop]:
    """A thread that is stopped after the test."""
    thread = HttpLoop(SharedLoop("test-loop"))
    yield thread
    thread.stop()


def hello(exchange: HttpExchange) -> None:
    exchange.respond(200, [], b"hi")


def client_of(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), WAIT_S)


def test_several_listeners_on_one_thread(thread: HttpLoop) -> None:
    listeners = [thread.listen(hello, "127.0.0.1", 0) for _ in range(2)]
    assert len({listener.port for listener in listeners}) == 2
    assert [each.name for each in threading.enumerate()].count("test-loop") == 1
    for listener in listeners:
        with closing(client_of(listener.port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(1000).endswith(b"hi")
        assert listener.close(WAIT_S)
        with pytest.raises(ConnectionRefusedError):
            client_of(listener.port)


def test_idle_connections_are_closed_at_once(thread: HttpLoop) -> None:
    listener = thread.listen(hello, "127.0.0.1", 0)
    with ExitStack() as stack:
        clients = [stack.enter_context(closing(client_of(listener.port))) for _ in range(50)]
        for client in clients[:25]:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(1000).endswith(b"hi")
        assert listener.close(WAIT_S)
        assert all(client.recv(1) == b"" for client in clients)


def test_what_does_not_end_is_cut_off(thread: HttpLoop) -> None:
    entered, cancelled = threading.Event(), threading.Event()

    async def never(exchange: HttpExchange) -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    listener = thread.listen(never, "127.0.0.1", 0)
    with closing(client_of(listener.port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert entered.wait(WAIT_S)
        assert not listener.close(0.01)
        assert cancelled.wait(WAIT_S)


def asked(client: socket.socket, path: str) -> bytes:
    client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return client.recv(1000)


def test_an_idle_connection_gives_way(thread: HttpLoop) -> None:
    listener = thread.listen(hello, "127.0.0.1", 0, most_connections=1)
    with ExitStack() as stack:
        first, second = (stack.enter_context(closing(client_of(listener.port))) for _ in range(2))
        assert first.recv(1000) == b""
        assert asked(second, "/").endswith(b"hi")
    assert listener.close(WAIT_S)


def test_health_checks_have_places_where_all_connections_have_requests(thread: HttpLoop) -> None:
    """Also beside clients that are refused and stay."""
    entered, go = threading.Semaphore(0), threading.Event()

    async def held(exchange: HttpExchange) -> None:
        entered.release()
        while not go.is_set():
            await asyncio.sleep(0.01)
        exchange.respond(200, [], b"hi")

    def handler(exchange: HttpExchange) -> Coroutine[Any, Any, None] | None:
        if exchange.query != "now":
            return held(exchange)
        hello(exchange)
        return None

    listener = thread.listen(handler, "127.0.0.1", 0, most_connections=1)

    def client() -> socket.socket:
        return stack.enter_context(closing(client_of(listener.port)))

    with ExitStack() as stack:
        stack.callback(go.set)
        client().sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert entered.acquire(timeout=WAIT_S)
        assert asked(client(), "/?now").startswith(b"HTTP/1.1 503 ")
        assert asked(client(), "/v2/health/ready?now").endswith(b"hi")
        for _ in range(RESERVED_CONNECTIONS):
            client().sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
            assert entered.acquire(timeout=WAIT_S)
        stays = client()
        assert stays.recv(1000).startswith(b"HTTP/1.1 503 ")
        go.set()
        eventually(lambda: asked(client(), "/?now").endswith(b"hi"), "there is a place again")
    assert listener.close(WAIT_S)


def test_a_taken_port(thread: HttpLoop) -> None:
    listener = thread.listen(hello, "127.0.0.1", 0)
    with pytest.raises(UnavailableError, match=f"Socket '127.0.0.1:{listener.port}' already in use "):
        thread.listen(hello, "127.0.0.1", listener.port)
    with pytest.raises(UnavailableError, match=r"address 'no\.such\.host\.invalid' is not known"):
        thread.listen(hello, "no.such.host.invalid", 0)
    listener.close(0.0)


@pytest.mark.pure("puts what is no call into the mailbox")
def test_the_mailbox_loses_nothing_and_keeps_order(thread: HttpLoop) -> None:
    thread.start()
    mailbox = ReplyMailbox(thread)
    got: list[tuple[int, int]] = []

    class Collector:
        def send(self, item: tuple[int, int]) -> None:
            got.append(item)

    collector = Collector()

    def put(who: int) -> None:
        for number in range(2000):
            mailbox.put(collector, (who, number))  # type: ignore[arg-type]

    writers = [threading.Thread(target=put, args=(who,)) for who in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    eventually(lambda: len(got) == 8000, "all have arrived")
    for who in range(4):
        assert [number for each, number in got if each == who] == list(range(2000))


@pytest.mark.pure("puts what is no call into the mailbox")
def test_a_mailbox_of_a_closed_loop(thread: HttpLoop) -> None:
    thread.start()
    mailbox = ReplyMailbox(thread)
    thread.stop()
    mailbox.put(object(), 1)  # type: ignore[arg-type]
