"""Clients over HTTP that read slowly, go away, or stay and say nothing: memory is bounded, others served."""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from tests.support.calls import FLOOD, FLOOD_CONFIG, blocked, counts
from tests.support.hazards import descriptors_besides_blocks_of
from tests.support.raw_http import RawHttp, head, infer_body, raw_http, request
from tests.support.served_http import INFER, LIVE, check_served, resident
from tests.support.servers import ServerProcess, client_of, eventually, serving_process, write_model

FLOATS = 1 << 20


def binary_request(floats: int) -> bytes:
    """A request whose tensor goes and comes as bytes."""
    tensor = {
        "name": "IN",
        "datatype": "FP32",
        "shape": [1, floats],
        "parameters": {"binary_data_size": 4 * floats},
    }
    outputs = [{"name": "OUT", "parameters": {"binary_data": True}}]
    prefix = json.dumps({"inputs": [tensor], "outputs": outputs}).encode()
    return request(
        "POST", INFER, prefix + bytes(4 * floats), f"Inference-Header-Content-Length: {len(prefix)}"
    )


@pytest.mark.parametrize("path", [INFER, "/v2/models/probe/generate", "/v2/models/probe/generate_stream"])
def test_clients_that_go_away_cancel_their_requests(server: ServerProcess, tmp_path: Path, path: str) -> None:
    begun, noticed = tmp_path / "started", tmp_path / "noticed"
    orders = {"started": str(begun), "until_cancelled": str(noticed)}
    body = infer_body("IN", "FP32", [0.0], parameters=orders)
    if path != INFER:
        body = json.dumps({"IN": 0.0, **orders}).encode()
    with raw_http(server.http_address) as connection:
        connection.send(request("POST", path, body))
        eventually(begun.exists, "the model runs")
    eventually(noticed.exists, "the model sees that its client is gone")
    check_served(server)


def test_those_that_wait_leave_the_queue(server: ServerProcess, tmp_path: Path) -> None:
    with client_of(server) as client, ExitStack() as stack:
        before = counts(client)
        with blocked(server, tmp_path):
            waiting = [stack.enter_context(raw_http(server.http_address)) for _ in range(20)]
            for connection in waiting:
                connection.send(request("POST", INFER, infer_body("IN", "FP32", [1.0])))
            # Others of the same connection's requests are answered behind it, so ask on another one.
            with raw_http(server.http_address) as other:
                other.send(request("GET", LIVE))
                assert other.response() is not None
            stack.close()
            eventually(lambda: counts(client)[1] >= before[1] + 1, "they are counted as failed")
        eventually(lambda: sum(counts(client)) >= sum(before) + 1, "what is left has run")
    check_served(server)


def test_a_slow_reader_of_large_answers(server: ServerProcess) -> None:
    """Unread answers are kept once; others are served, and a slow reader gets all when it reads."""
    check_served(server)
    before = resident(server)
    with ExitStack() as stack:
        slow = [stack.enter_context(raw_http(server.http_address, receive_buffer=1 << 14)) for _ in range(4)]
        for connection in slow:
            connection.send(binary_request(FLOATS))
        for _ in range(20):
            check_served(server)
        assert resident(server) - before < 4 * 6 * 4 * FLOATS
        for connection in slow:
            response = connection.response()
            assert response is not None and response.status == 200
            assert len(response.body) > 4 * FLOATS
    eventually(lambda: resident(server) - before < 100 << 20, "memory is given back")


def test_readers_that_go_away_within_large_answers(server: ServerProcess) -> None:
    check_served(server)
    descriptors = descriptors_besides_blocks_of(server.process.pid)
    for number in range(12):
        with raw_http(server.http_address, receive_buffer=1 << 14) as connection:
            connection.send(binary_request(FLOATS))
            assert connection.socket.recv(1000)
        if number == 3:
            before = resident(server)
    eventually(
        lambda: descriptors_besides_blocks_of(server.process.pid) <= descriptors + 1,
        "the connections are gone",
    )
    assert resident(server) - before < 64 << 20
    check_served(server)


def test_a_sender_a_byte_at_a_time(server: ServerProcess) -> None:
    whole = request("POST", INFER, infer_body("IN", "FP32", [4.5]))
    with raw_http(server.http_address) as connection:
        for number in range(len(whole)):
            connection.send(whole[number : number + 1])
            if number % 50 == 0:
                check_served(server)
        response = connection.response()
    assert response is not None
    assert response.json()["outputs"][0]["data"] == [4.5]


def test_a_reader_of_a_stream_that_does_not_read(repository: Path, tmp_path: Path) -> None:
    """The model waits for it, in bounded memory, and is notified when it goes."""
    write_model(tmp_path, "flood", FLOOD_CONFIG, {"model.py": FLOOD})
    with serving_process(repository, tmp_path) as server:
        check_served(server)
        before = resident(server)
        path = "/v2/models/flood/generate_stream"
        with raw_http(server.http_address, receive_buffer=1 << 14) as connection:
            connection.send(request("POST", path, json.dumps({"COUNT": 500}).encode()))
            assert connection.socket.recv(100)
            for _ in range(20):
                check_served(server)
            assert resident(server) - before < 600 << 20
        check_served(server)


@contextmanager
def idle_connections(server: ServerProcess, count: int) -> Iterator[list[RawHttp]]:
    """Connections each of which has had one answer."""
    with ExitStack() as stack:
        connections = []
        for _ in range(count):
            connections.append(stack.enter_context(raw_http(server.http_address)))
            connections[-1].send(request("GET", LIVE))
            response = connections[-1].response()
            assert response is not None and response.status == 200
        yield connections


def check_idle(server: ServerProcess, count: int) -> None:
    """They cost little, and all of them are good for one more request."""
    process = psutil.Process(server.process.pid)
    check_served(server)
    before, threads = resident(server), process.num_threads()
    descriptors = descriptors_besides_blocks_of(process.pid)
    with idle_connections(server, count) as connections:
        assert resident(server) - before < (32 << 20) + count * (32 << 10)
        eventually(lambda: process.num_threads() <= threads + 2, "they have no threads")
        for _ in range(10):
            check_served(server)
        for connection in connections:
            connection.send(request("GET", "/v2/models/probe/ready"))
        for connection in connections:
            response = connection.response()
            assert response is not None and response.status == 200
    eventually(
        lambda: descriptors_besides_blocks_of(process.pid) <= descriptors + 2, "the connections are gone"
    )
    check_served(server)


def test_idle_connections(server: ServerProcess) -> None:
    check_idle(server, 300)


@pytest.mark.slow
def test_five_thousand_idle_connections(repository: Path) -> None:
    count = 5000
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * count + 1000
    if limits[1] != resource.RLIM_INFINITY and limits[1] < wanted:
        pytest.skip(f"no more than {limits[1]} descriptors are allowed here")
    # The server inherits it.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], wanted), limits[1]))
    try:
        with serving_process(repository, flags=["--model-control-mode=explicit", "--load-model=*"]) as server:
            check_idle(server, count)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_stop_beside_clients_that_do_nothing(repository: Path) -> None:
    """Neither idle connections nor half requests keep the server from ending."""
    with (
        serving_process(repository, flags=["--exit-timeout-secs=300"]) as server,
        idle_connections(server, 20),
        raw_http(server.http_address) as half,
        raw_http(server.http_address) as body,
        raw_http(server.http_address) as other,
    ):
        half.send(b"POST /v2/mod")
        body.send(head("POST", INFER, "Content-Length: 100") + b"{")
        other.send(head("POST", "/v2/repository/index", "Content-Length: 100") + b"{")
        check_served(server)
        assert server.stop() == 0
        assert half.rest() == b""
        for connection in (body, other):
            response = connection.response()
            assert response is not None and response.status == 408


def test_many_at_once(server: ServerProcess) -> None:
    """Fifty clients, each of whom makes a connection for each of its requests."""
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            for _ in range(10):
                check_served(server)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
