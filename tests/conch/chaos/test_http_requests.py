"""Requests over HTTP that break off, do not fit their headers, flood or smuggle: refused, and harmless."""

from __future__ import annotations

import json
import random
import select
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from tests.support.calls import counts
from tests.support.raw_http import head, infer_body, raw_http, request
from tests.support.served_http import BODY, INFER, LIVE, check_served, resident
from tests.support.server_fixtures import server_fixture
from tests.support.servers import (
    WAIT_S,
    ServerProcess,
    client_of,
    eventually,
)

MOST_BYTES = 1 << 20
"""Limit of a body as JSON, at the server of these tests."""
ROOM = 96 << 20
"""For what the server may keep while it is flooded, and the allocator keeps for ever."""
SMUGGLED = request("GET", LIVE)


server = server_fixture(flags=[f"--http-max-input-size={MOST_BYTES}"], process=True, scope="function")
"""A server with a low limit for bodies."""


shared = server_fixture(flags=[f"--http-max-input-size={MOST_BYTES}"], process=True)
"""The same, for tests that need none of their own: it is to be unharmed by all that it has met before."""


@pytest.mark.parametrize(
    "beginning",
    [
        b"P",
        f"POST {INFER} HTTP/1.1\r\nHost: con".encode(),
        head("POST", INFER, "Content-Length: 100"),
        head("POST", INFER, "Content-Length: 100") + b'{"inputs"',
        head("POST", INFER, "Transfer-Encoding: chunked") + b"10\r\nabc",
        head("POST", "/v2/models/probe/generate", "Content-Length: 100") + b'{"IN"',
        head("POST", "/v2/repository/index", "Content-Length: 100") + b"{",
    ],
)
def test_requests_that_break_off(shared: ServerProcess, beginning: bytes) -> None:
    """They hold up no other client while they wait, and leave nothing when their client goes."""
    process = psutil.Process(shared.process.pid)
    check_served(shared)
    before = process.num_fds()
    with ExitStack() as stack, client_of(shared) as client:
        connections = [stack.enter_context(raw_http(shared.http_address)) for _ in range(20)]
        for connection in connections:
            connection.send(beginning)
        check_served(shared)
        ran = counts(client)
        for connection in connections[::2]:
            connection.half_close()
        for connection in connections[::2]:
            assert all(response.status >= 400 for response in connection.responses())
        stack.close()
        eventually(lambda: process.num_fds() <= before + 3, "the connections are gone")  # gRPC's among them
        assert counts(client) == ran
    check_served(shared)


def test_a_body_that_is_longer_than_it_says(server: ServerProcess) -> None:
    """Bytes beyond the stated length begin the next request, and are none."""
    with raw_http(server.http_address) as connection:
        connection.send(request("POST", INFER, BODY) + b"\0more of it\r\n\r\n")
        statuses = [response.status for response in connection.responses()]
    assert statuses in ([200, 400], [200], [400])
    check_served(server)


def test_a_body_that_is_shorter_than_it_says(server: ServerProcess) -> None:
    """The next request on the connection is a part of it, and the model sees neither."""
    with raw_http(server.http_address) as connection, client_of(server) as client:
        ran = counts(client)
        connection.send(head("POST", INFER, f"Content-Length: {len(BODY) + len(SMUGGLED)}") + BODY + SMUGGLED)
        response = connection.response()
        assert response is not None
        assert response.status >= 400
        assert counts(client)[0] == ran[0]
    check_served(server)


def test_pipelined_requests_are_answered_in_order(server: ServerProcess) -> None:
    numbers = range(40)
    with raw_http(server.http_address) as connection:
        requests = []
        for number in numbers:
            requests.append(
                request("POST", INFER, infer_body("IN", "FP32", [float(number)], id=f"r{number}"))
            )
            requests.append(request("GET", "/nowhere"))
        connection.send(b"".join(requests))
        for number in numbers:
            response, other = connection.response(), connection.response()
            assert response is not None and other is not None
            assert response.status == 200
            assert response.json()["id"] == f"r{number}"
            assert response.json()["outputs"][0]["data"] == [float(number)]
            assert (other.status, other.json()) == (404, {"error": "Not Found"})


def test_pipelined_requests_whose_client_does_not_read(server: ServerProcess) -> None:
    """No more is taken in than can be answered."""
    floats = 100_000
    data = b"1.25," * (floats - 1) + b"1.25"
    tensor = b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[1,%d],"data":[%s]}]}' % (floats, data)
    one = request("POST", INFER, tensor)
    check_served(server)
    before = resident(server)
    with raw_http(server.http_address, receive_buffer=1 << 14) as connection:
        connection.socket.settimeout(1.0)
        sent = 0
        try:
            while sent < 2000:
                connection.send(one)
                sent += 1
        except TimeoutError:
            pass  # it waits for us to read
        assert sent < 2000, "the server has taken in everything"
        assert resident(server) - before < ROOM
        check_served(server)
    check_served(server)


@pytest.mark.parametrize("path", [LIVE, INFER])
def test_a_client_that_pipelines_without_end(server: ServerProcess, path: str) -> None:
    """It reads, but sends far more than it can be answered in the time: what it sends waits at its side."""
    one = request("GET", path) if path == LIVE else request("POST", path, BODY)
    block = one * (200_000 // len(one))
    check_served(server)
    before = resident(server)
    most = 0
    with raw_http(server.http_address) as connection:
        connection.socket.setblocking(False)
        left, answers = b"", 0
        while answers < 3000:
            readable, writable, _ = select.select([connection.socket], [connection.socket], [], WAIT_S)
            assert readable or writable, "it neither reads nor answers"
            if writable:
                left = left or block
                left = left[connection.socket.send(left) :]
            if readable:
                answers += connection.socket.recv(1 << 16).count(b"HTTP/1.1 200 OK")
                most = max(most, resident(server))
    assert most - before < ROOM
    check_served(server)


def test_uploads_that_never_end(server: ServerProcess) -> None:
    """A body without a length that goes on beyond the limit is not kept."""
    check_served(server)
    before = resident(server)
    chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
    with raw_http(server.http_address) as connection:
        connection.send(head("POST", INFER, "Transfer-Encoding: chunked"))
        sent = 0
        while sent < 4096 and connection.send_while_taken(chunk):
            sent += 1
        assert sent < 4096 or resident(server) - before < ROOM
        check_served(server)
        if sent == 4096:
            connection.send(b"0\r\n\r\n")
        response = connection.response()
        assert response is None or response.status == 400, response
    assert resident(server) - before < ROOM
    check_served(server)


def test_bodies_of_more_than_the_limit(server: ServerProcess) -> None:
    body = b" " * MOST_BYTES + BODY
    with raw_http(server.http_address) as connection:
        connection.send_while_taken(request("POST", INFER, body))
        response = connection.response()
        assert response is not None
        assert response.status == 400
        assert "Use --http-max-input-size to increase the limit." in response.json()["error"]
    check_served(server)


def test_bodies_in_very_many_chunks(server: ServerProcess) -> None:
    check_served(server)
    before = resident(server)
    with raw_http(server.http_address) as connection:
        connection.send(head("POST", INFER, "Transfer-Encoding: chunked"))
        for _ in range(100):
            if not connection.send_while_taken(b"1\r\n \r\n" * 1000):
                break
        connection.send_while_taken(b"0\r\n\r\n")
        response = connection.response()
    if response is not None:  # it may have been lost behind what was still being sent
        assert response.status == 400
        assert "65536 non-empty chunks" in response.json()["error"]
    assert resident(server) - before < ROOM
    check_served(server)


@pytest.mark.parametrize("path", [INFER, "/v2/models/probe/generate"])
def test_the_most_chunks_a_body_may_have(shared: ServerProcess, path: str) -> None:
    for chunks, refused in ((65536, False), (65537, True)):
        with raw_http(shared.http_address) as connection:
            flood = head("POST", path, "Transfer-Encoding: chunked") + b"1\r\n \r\n" * chunks
            connection.send_while_taken(flood + b"0\r\n\r\n")
            response = connection.response()
        assert response is not None
        assert ("65536 non-empty chunks" in response.json()["error"]) == refused
        assert (response.status, response.headers.get("connection")) == (
            (400, "close") if refused else (500, None)
        )


@pytest.mark.parametrize("kind", ["many headers", "one header", "name", "target", "endless"])
def test_floods_of_headers(server: ServerProcess, kind: str) -> None:
    check_served(server)
    before = resident(server)
    flood = {
        "many headers": b"GET /v2 HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % n for n in range(500_000)),
        "one header": b"GET /v2 HTTP/1.1\r\nx: " + b"y" * (8 << 20),
        "name": b"GET /v2 HTTP/1.1\r\n" + b"y" * (8 << 20),
        "target": b"GET /" + b"y" * (8 << 20),
        "endless": b"GET /v2 HTTP/1.1\r\n" + b"x: y\r\n" * (4 << 20),
    }[kind]
    with raw_http(server.http_address) as connection:
        taken = connection.send_while_taken(flood) and connection.send_while_taken(b"\r\n\r\n")
        check_served(server)
        if not taken or kind != "endless":
            assert all(400 <= response.status < 500 for response in connection.responses())
    assert resident(server) - before < ROOM
    check_served(server)


SMUGGLING = {
    "two lengths": head("POST", INFER, "Content-Length: 0", f"Content-Length: {len(SMUGGLED)}"),
    "two lengths in one": head("POST", INFER, f"Content-Length: 0, {len(SMUGGLED)}"),
    "chunks twice": head("POST", INFER, "Transfer-Encoding: chunked", "Transfer-Encoding: chunked")
    + b"0\r\n\r\n",
    "chunks and two lengths": head(
        "POST", INFER, "Content-Length: 5", "Transfer-Encoding: chunked", "Content-Length: 6"
    )
    + b"0\r\n\r\n",
    "chunks and no length": head("POST", INFER, "Content-Length: x", "Transfer-Encoding: chunked")
    + b"0\r\n\r\n",
    "chunked is not last": head("POST", INFER, "Transfer-Encoding: chunked, identity") + b"0\r\n\r\n",
    "another encoding": head("POST", INFER, "Transfer-Encoding: xchunked") + b"0\r\n\r\n",
    "space before the colon": head("POST", INFER, "Transfer-Encoding : chunked") + b"0\r\n\r\n",
    "tab in the name": head("POST", INFER, "Transfer-Encoding\t: chunked") + b"0\r\n\r\n",
    "folded": head("POST", INFER, "X: y", " Content-Length: 5"),
    "sign": head("POST", INFER, "Content-Length: +0"),
    "negative": head("POST", INFER, "Content-Length: -1"),
    "hexadecimal": head("POST", INFER, "Content-Length: 0x10"),
    "huge": head("POST", INFER, f"Content-Length: {1 << 64}"),
    "no number": head("POST", INFER, "Content-Length: none"),
    "chunk size too large": head("POST", INFER, "Transfer-Encoding: chunked") + b"1" + b"0" * 16 + b"\r\n",
    "chunk size with a sign": head("POST", INFER, "Transfer-Encoding: chunked") + b"+0\r\n\r\n",
    "chunk size in words": head("POST", INFER, "Transfer-Encoding: chunked") + b"zero\r\n\r\n",
    "chunk without its end": head("POST", INFER, "Transfer-Encoding: chunked") + b"1\r\nab0\r\n\r\n",
    "zero byte in a header": head("POST", INFER, "X: a\0b", "Content-Length: 0"),
    "carriage return alone": b"POST " + INFER.encode() + b" HTTP/1.1\rHost: conch\rContent-Length: 0\r\r",
}


@pytest.mark.parametrize("name", SMUGGLING)
def test_smuggled_requests_are_not_answered(shared: ServerProcess, name: str) -> None:
    """A request whose end two readers might see in different places is the last one of its connection."""
    with raw_http(shared.http_address) as connection:
        connection.send_while_taken(SMUGGLING[name] + SMUGGLED)
        connection.half_close()
        statuses = [response.status for response in connection.responses()]
    assert 200 not in statuses, statuses
    assert len(statuses) <= 1, statuses
    check_served(shared)


@pytest.mark.parametrize("path", [INFER, "/v2/models/probe/generate", "/v2/repository/index"])
@pytest.mark.parametrize("length", [0, 5, len(SMUGGLED) + 5, 1 << 40])
def test_a_length_beside_chunks_says_nothing(shared: ServerProcess, path: str, length: int) -> None:
    """The request is read by its chunks, whatever the length is, and is the last one of its connection."""
    body = {INFER: BODY, "/v2/models/probe/generate": b'{"IN": 1.0}'}.get(path, b"{}")
    chunks = b"3\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (body[:3], len(body) - 3, body[3:])
    if len(body) == 2:
        chunks = b"2\r\n{}\r\n0\r\n\r\n"
    lines = [f"Content-Length: {length}", "Transfer-Encoding: chunked"]
    for order in (lines, lines[::-1]):
        with raw_http(shared.http_address) as connection:
            connection.send_while_taken(head("POST", path, *order) + chunks + SMUGGLED)
            first = connection.response()
            assert first is not None and first.status == 200, first
            assert first.headers["connection"] == "close"
            assert first.body
            assert connection.response() is None


@pytest.mark.parametrize("path", [INFER, "/v2/models/probe/generate", "/v2/models/probe/generate_stream"])
def test_a_client_that_sends_no_more_gets_its_answers(
    shared: ServerProcess, tmp_path: Path, path: str
) -> None:
    """Also those that take a while, and to all that it has sent."""
    go = tmp_path / "go"
    orders = {"wait_for": str(go)}
    body = infer_body("IN", "FP32", [4.5], parameters=orders)
    if path != INFER:
        body = json.dumps({"IN": 4.5, **orders}).encode()
    with raw_http(shared.http_address) as connection:
        connection.send(request("GET", "/v2") + request("GET", "/nowhere") + request("POST", path, body))
        connection.half_close()
        for status in (200, 404):
            first = connection.response()
            assert first is not None and first.status == status
        # It is looked at whether the client is there: what it is sent for that is no answer.
        between = connection.response()
        assert between is not None and between.status == 100
        go.touch()
        answers = [each for each in connection.responses() if each.status != 100]
    assert [answer.status for answer in answers] == [200]
    assert b"4.5" in answers[0].body


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + random.Random(1).randbytes(64),
        random.Random(2).randbytes(4096),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 99,
        b"GET /v2/health/live\r\n\r\n",
        b"GET /v2/health/live HTTP/9.9\r\n\r\n",
        b"NONSENSE /v2/health/live HTTP/1.1\r\nHost: conch\r\n\r\n",
        b"\r\n" * 5000,
        b"GET /%ff%00/\xff\xfe HTTP/1.1\r\nHost: conch\r\n\r\n",
        b"CONNECT conch:443 HTTP/1.1\r\nHost: conch\r\n\r\n",
        b"GET /v2/health/live HTTP/1.1\r\nHost: conch\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"GET /v2/health/live HTTP/1.1\r\nHost: conch\r\nUpgrade: h2c\r\n"
        b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
    ],
)
def test_garbage(shared: ServerProcess, garbage: bytes) -> None:
    with raw_http(shared.http_address) as connection:
        connection.send_while_taken(garbage)
        connection.half_close()
        connection.rest()
    check_served(shared)


def test_bodies_that_are_no_json(server: ServerProcess) -> None:
    """Deeply nested ones among them, on all routes that read one."""
    bodies = [
        b"",
        b"{",
        b"[" * 250_000,
        b'{"a":' * 100_000,
        b"\xff\xfe",
        b"null",
        b'{"inputs":' + b"[" * 100_000,
    ]
    paths = [INFER, "/v2/models/probe/generate", "/v2/repository/index", "/v2/logging"]
    paths += ["/v2/systemsharedmemory/region/r/register", "/v2/cudasharedmemory/region/r/register"]
    with raw_http(server.http_address) as connection:
        for path in paths:
            for body in bodies:
                connection.send(request("POST", path, body))
                response = connection.response()
                assert response is not None, (path, body[:20])
                if response.status != 200:
                    assert isinstance(json.loads(response.body)["error"], str), (path, body[:20], response)
    check_served(server)
