"""Bodies over HTTP that take long to read, and connections without end: others are answered all the while."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.support.attacks import cpu_s
from tests.support.raw_http import RawHttp, head, infer_body, raw_http, request
from tests.support.served_http import INFER, LIVE, check_served
from tests.support.server_fixtures import LOAD_ALL, server_fixture
from tests.support.servers import ServerProcess, eventually, serving_process

READY = "/v2/health/ready"
GENERATE = "/v2/models/probe/generate"
PATHS = [
    "/v2/logging",
    "/v2/trace/setting",
    "/v2/repository/index",
    "/v2/repository/models/probe/load",
    "/v2/repository/models/none/unload",
    "/v2/systemsharedmemory/region/r/register",
    INFER,
    GENERATE,
]
MILLION = 1_000_000
BODIES = {
    "arrays in arrays": b"[" * 4 * MILLION,
    "objects in objects": b'{"a":' * MILLION,
    "objects": b"[" + b"{}," * MILLION,
    "members": b"{" + b'"a":1,' * MILLION,
    "members of one name": b'{"a":1,"a":2,"IN":[' + b"1," * 4 * MILLION + b"1]}",
    "spaces": b" " * 16 * MILLION,
    "digits": b"[" + b"1" * 16 * MILLION,
    "short and slow": b"{" + b'"a":1,' * 10_000 + b'"a":1}',
}
MOST_S = 0.25
"""Processor time of the server in a health check: more than any takes, far less than any body once took."""
SLOW = b'{"inputs":[' + b'["abcd",1],' * MILLION + b"1]}"
"""A body that takes seconds to read, and is worth an error at its end only."""


server = server_fixture(flags=LOAD_ALL, process=True)
"""A server whose clients may load."""


def dearest_check(server: ServerProcess, until: threading.Event) -> float:
    """The server's processor time in the dearest health check, each on a connection of its own."""
    dearest = 0.0
    ended = False
    while not ended:
        ended = until.is_set()
        begun = cpu_s(server.process.pid)
        with raw_http(server.http_address) as connection:
            connection.send(request("GET", READY))
            response = connection.response()
        assert response is not None and response.status == 200
        dearest = max(dearest, cpu_s(server.process.pid) - begun)
    return dearest


@contextmanager
def sending(server: ServerProcess, data: bytes, copies: int = 1) -> Iterator[threading.Event]:
    """Sends something on connections of its own; the event says that all have been answered."""
    answered = threading.Event()

    def send(connection: RawHttp) -> None:
        connection.send_while_taken(data)
        connection.response()

    def wait() -> None:
        for thread in threads:
            thread.join()
        answered.set()

    with ExitStack() as stack:
        connections = [stack.enter_context(raw_http(server.http_address)) for _ in range(copies)]
        threads = [threading.Thread(target=send, args=(connection,)) for connection in connections]
        for thread in threads:
            thread.start()
        waiting = threading.Thread(target=wait)
        waiting.start()
        try:
            yield answered
        finally:
            waiting.join()


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_health_checks_beside_bodies_that_no_client_needs(server: ServerProcess, path: str) -> None:
    for name, body in BODIES.items():
        copies = 20 if name == "short and slow" else 2
        with sending(server, request("POST", path, body), copies) as answered:
            assert dearest_check(server, answered) < MOST_S, name
    check_served(server)


@pytest.mark.parametrize(
    "flood",
    [
        b"GET /v2 HTTP/1.1\r\n" + b"a:\r\n" * MILLION,
        head("POST", INFER, "Transfer-Encoding: chunked") + b"1\r\n \r\n" * 60_000 + b"0\r\n\r\n",
        head("POST", "/nowhere", "Transfer-Encoding: chunked") + b"1\r\n \r\n" * 60_000 + b"0\r\n\r\n",
        request("POST", GENERATE, b'{"IN":1}', *[f"x{number}: y" for number in range(190)]) * 100,
    ],
    ids=["headers", "chunks", "chunks nowhere", "pipelined"],
)
def test_health_checks_beside_many_small_things(server: ServerProcess, flood: bytes) -> None:
    with sending(server, flood, 10) as answered:
        assert dearest_check(server, answered) < MOST_S


def test_large_bodies_take_turns(server: ServerProcess) -> None:
    """A short body does not wait for bodies that take long to parse."""
    large = infer_body("IN", "FP32", [1.0] * 50_000)
    with ExitStack() as stack:
        slow = [stack.enter_context(raw_http(server.http_address)) for _ in range(4)]
        for connection in slow:
            connection.send(request("POST", INFER, SLOW))
        with raw_http(server.http_address) as other:
            other.send(request("POST", INFER, large))
            response = other.response()
        assert response is not None and response.status == 200
        assert select.select([each.socket for each in slow], [], [], 0)[0] == [], "they are still being read"
    check_served(server)


@pytest.mark.parametrize("path", [INFER, GENERATE])
def test_a_body_is_not_read_on_for_a_client_that_is_gone(repository: Path, tmp_path: Path, path: str) -> None:
    log = tmp_path / "access.log"
    with serving_process(repository, flags=[f"--access-log={log}"]) as server:
        check_served(server)
        with raw_http(server.http_address) as connection:
            connection.send(request("POST", path, SLOW))
        eventually(lambda: "the client is gone" in log.read_text(), "reading is given up")
        check_served(server)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--front-ends=2"]], ids=["one_process", "fronts"])
def test_connections_without_end(repository: Path, more: list[str]) -> None:
    """There are so many and no more; idle ones make room for others."""
    flags = ["--http-max-connections=50", *more]
    with serving_process(repository, flags=flags) as server, ExitStack() as stack:
        connections = [stack.enter_context(raw_http(server.http_address)) for _ in range(50)]
        for connection in connections:
            connection.send(request("GET", LIVE))
        for connection in connections:
            assert connection.response() is not None
        check_served(server)
        for connection in connections[:40]:  # half a request each
            connection.send_while_taken(head("POST", INFER, "Content-Length: 9"))
        for _ in range(20):
            check_served(server)


@pytest.mark.slow
def test_idle_connections_go_when_their_time_is_over(repository: Path) -> None:
    with (
        serving_process(repository, flags=["--http-idle-timeout-secs=1"]) as server,
        raw_http(server.http_address) as silent,
        ExitStack() as stack,
    ):

        def answered() -> RawHttp | None:
            """A connection that has had an answer; a busy machine may ask too late for one."""
            connection = stack.enter_context(raw_http(server.http_address))
            connection.send_while_taken(request("GET", LIVE))
            return connection if connection.response() is not None else None

        idle = eventually(answered, "one is used in time")
        assert idle.response() is None
        assert silent.response() is None
