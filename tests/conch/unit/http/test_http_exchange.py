"""Requests and responses on one connection: order, bodies, forms of responses, and clients that go away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.support.raw_http import head, request
from tests.support.rest import Wire
from tests.support.waiting import PATIENCE_S

from conch.frontends.http.http_connection import Handler
from conch.frontends.http.http_exchange import ClientDisconnectError, HttpExchange

GET = request("GET", "/")
OK = b"HTTP/1.1 200 OK\r\n"


def hello(exchange: HttpExchange) -> None:
    exchange.respond(200, [(b"x-path", exchange.path.encode())], b"hi")


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, PATIENCE_S))


async def written(handler: Handler, *sent: bytes) -> bytes:
    """Everything that is written to a client that sends this."""
    wire = Wire(handler)
    for each in sent:
        wire.send(each)
    for _ in range(1000):
        await asyncio.sleep(0)
    return b"".join(wire.written)


def answer_of(handler: Handler, *sent: bytes) -> bytes:
    answer: bytes = run(written(handler, *sent))
    return answer


def test_headers_in_order_with_the_length_behind_them() -> None:
    assert answer_of(hello, request("GET", "/a?b=c")) == OK + b"x-path: /a\r\ncontent-length: 2\r\n\r\nhi"


def test_the_response_to_head_has_no_body() -> None:
    assert answer_of(hello, request("HEAD", "/")).endswith(b"content-length: 2\r\n\r\n")


@pytest.mark.parametrize(
    ("line", "header", "closes"),
    [("1.1", "", False), ("1.1", "Connection: close", True), ("1.0", "Connection: keep-alive", True)],
)
def test_which_responses_end_their_connection(line: str, header: str, closes: bool) -> None:
    async def ask() -> None:
        wire = Wire(hello)
        wire.send(
            f"GET / HTTP/{line}\r\nHost: x\r\n{header}{chr(13) + chr(10) if header else ''}\r\n".encode()
        )
        assert (b"connection: close\r\n" in b"".join(wire.written)) is closes
        assert wire.closing is closes

    run(ask())


async def stream(exchange: HttpExchange) -> None:
    exchange.begin_response(200, [])
    for piece in (b"one", b"", b"three"):
        await exchange.send(piece)
    exchange.end()


def test_a_response_of_unknown_length() -> None:
    chunks = b"3\r\none\r\n5\r\nthree\r\n0\r\n\r\n"
    assert answer_of(stream, GET) == OK + b"transfer-encoding: chunked\r\n\r\n" + chunks
    assert answer_of(stream, b"GET / HTTP/1.0\r\n\r\n") == OK + b"connection: close\r\n\r\nonethree"


def test_pipelined_requests_are_answered_in_order_however_many() -> None:
    """Also those that are answered at once: none is begun within the answer to another."""
    count = 2000
    answers = answer_of(
        hello, b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % number for number in range(count))
    )
    paths = [each.partition(b"\r\n")[0] for each in answers.split(b"x-path: ")[1:]]
    assert paths == [b"/%d" % number for number in range(count)]


def test_a_request_waits_for_the_one_before_and_for_its_reader() -> None:
    async def ask() -> None:
        begun: list[HttpExchange] = []
        wire = Wire(begun.append, reads=1)
        wire.send(GET + GET)
        assert len(begun) == 1 and not wire.reading
        hello(begun[0])
        await asyncio.sleep(0)
        assert len(begun) == 1, "the client has not read the first response"
        wire.read()
        await asyncio.sleep(0)
        assert len(begun) == 2 and wire.reading

    run(ask())


def echo(most: int) -> Callable[[HttpExchange], Coroutine[Any, Any, None]]:
    async def answer(exchange: HttpExchange) -> None:
        await exchange.wait_body(most)
        if exchange.unread:
            exchange.respond(400, [], b"%d" % exchange.chunks, closes=True)
        else:
            exchange.respond(200, [], bytes(exchange.take_body()))

    return answer


@pytest.mark.parametrize("cut", [0, 4, 40])
def test_trailers_are_dropped(cut: int) -> None:
    """They come behind the checks of the headers, and would override those that a proxy sets."""

    async def answer(exchange: HttpExchange) -> None:
        await exchange.wait_body(10)
        exchange.respond(200, [], b"%r %r" % (exchange.headers, exchange.fields))

    given = head("POST", "/", "X-User: proxy", "Transfer-Encoding: chunked")
    end = b"1\r\nx\r\n0\r\n"
    trailers = b"X-User: mallory\r\nAuthorization: Bearer stolen\r\nContent-Length: 9\r\n\r\n"
    sent = given + end + trailers
    pieces = (sent[: len(sent) - cut], sent[len(sent) - cut :])
    expected = answer_of(answer, given + end + b"\r\n", GET)
    assert answer_of(answer, *filter(None, pieces), GET) == expected


@pytest.mark.parametrize("cut", [0, 3, 5])
def test_a_body_in_one_piece_or_in_several(cut: int) -> None:
    """Also of a request that waits: its body has come before it is begun."""
    ahead = request("POST", "/", b"ahead")
    whole = request("POST", "/", b"0123456789")
    split = len(whole) - cut
    for pieces in ((whole[:split], whole[split:]), (ahead + whole[:split], whole[split:])):
        assert answer_of(echo(10), *filter(None, pieces)).endswith(b"\r\n\r\n0123456789")


@pytest.mark.parametrize(
    "sent",
    [
        request("POST", "/", b"12345"),
        head("POST", "/", "Transfer-Encoding: chunked") + b"2\r\n12\r\n3\r\n345\r\n",
        GET + request("POST", "/", b"12345"),
    ],
)
def test_a_body_over_its_limit_ends_the_connection(sent: bytes) -> None:
    answer = answer_of(echo(4), sent, GET)
    assert answer.count(b"HTTP/1.1 400 ") == 1
    assert b"connection: close" in answer
    assert answer.count(b"HTTP/1.1 ") == 1 + (GET in sent), "nothing behind it is answered"


def test_a_body_is_asked_for_by_those_who_read_it() -> None:
    expecting = head("POST", "/", "Content-Length: 2", "Expect: 100-continue")
    assert answer_of(echo(2), expecting) == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert answer_of(hello, expecting).startswith(OK)


def test_a_body_that_is_not_read_is_dropped() -> None:
    answer = answer_of(hello, request("POST", "/a", b"x" * 100_000), request("GET", "/b"))
    assert [b"x-path: " + path in answer for path in (b"/a", b"/b")] == [True, True]


@pytest.mark.parametrize("asks", [False, True])
def test_a_body_that_is_not_asked_for_waits_at_its_sender(asks: bool) -> None:
    async def ask() -> list[bool]:
        go = asyncio.Event()

        async def answer(exchange: HttpExchange) -> None:
            await go.wait()
            if asks:
                await exchange.wait_body(1 << 20)
                assert len(exchange.take_body()) == exchange.length
            exchange.respond(200, [], b"")

        wire = Wire(answer)
        wire.send(head("POST", "/", "Content-Length: 100000") + b"x" * 90_000)
        seen = [wire.reading]
        go.set()
        for _ in range(3):
            await asyncio.sleep(0)
        seen.append(wire.reading)
        wire.send(b"x" * 10_000 + GET)
        for _ in range(10):
            await asyncio.sleep(0)
        assert b"".join(wire.written).count(OK) == 2
        return seen

    assert run(ask()) == [False, True]


def test_a_client_that_goes_away() -> None:
    async def ask() -> None:
        gone: list[str] = []

        async def wait(exchange: HttpExchange) -> None:
            try:
                await exchange.wait_body(100)
            except ClientDisconnectError:
                gone.append("body")

        def note(exchange: HttpExchange) -> None:
            exchange.on_disconnect = lambda: gone.append("response")

        wire = Wire(wait)
        wire.send(head("POST", "/", "Content-Length: 2"))
        await asyncio.sleep(0)
        wire.hang_up()
        await wire.ended()
        wire = Wire(note)
        wire.send(GET)
        wire.hang_up()
        wire = Wire(hello)
        wire.send(GET)
        wire.hang_up()
        assert gone == ["body", "response"]

    run(ask())


def test_a_response_to_a_client_that_is_gone_goes_nowhere() -> None:
    async def ask() -> list[bytes]:
        begun: list[HttpExchange] = []
        wire = Wire(begun.append)
        wire.send(GET)
        wire.hang_up()
        hello(begun[0])
        assert begun[0].done
        return wire.written

    assert run(ask()) == []


def test_a_task_that_ends_without_a_response_ends_the_connection() -> None:
    async def nothing(exchange: HttpExchange) -> None:
        """Does not respond."""

    async def ask() -> bool:
        wire = Wire(nothing)
        wire.send(GET)
        await wire.ended()
        await asyncio.sleep(0)
        return wire.closing

    assert run(ask())


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [("1.1", 0, b"400"), ("1.1", 1, b"200"), ("1.1", 2, b"400"), ("1.0", 0, b"200"), ("1.0", 2, b"400")],
)
def test_a_request_has_one_host(version: str, hosts: int, status: bytes) -> None:
    """A proxy and the server could each take another of two."""
    head = "".join([f"GET / HTTP/{version}\r\n", *(f"HOST: {number}\r\n" for number in range(hosts)), "\r\n"])
    assert answer_of(hello, head.encode()).startswith(b"HTTP/1.1 " + status)
