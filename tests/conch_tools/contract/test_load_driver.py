"""The loop of a load process against servers of known behaviour."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import count, cycle, islice
from pathlib import Path
from time import monotonic_ns
from typing import Any

import grpc
import pytest
from tests.support.known_peers import DROP, http_peer
from tests.support.servers import WAIT_S, eventually, free_port

from conch.frontends.grpc.http2.connection import Http2Connection
from conch.frontends.grpc.http2.events import DataReceived
from conch.protocol import inference_pb2
from conch_tools.connection import parse_url
from conch_tools.perf.load import schedules
from conch_tools.perf.load.calls import Client
from conch_tools.perf.load.driver import Driver
from conch_tools.perf.load.http1_client import Http1Client
from conch_tools.perf.load.http2_client import Http2Client
from conch_tools.perf.load.ready_requests import ReadyRequest
from conch_tools.perf.load.recorder import Recorder
from conch_tools.perf.measure.slices import Slice

_LONG_NS = 60_000_000_000
_METHOD = "/inference.GRPCInferenceService/ModelInfer"
_BODY = inference_pb2.ModelInferRequest(model_name="some").SerializeToString()


class _Load:
    """One load process's part, in this process, until so many calls have ended."""

    def __init__(
        self,
        connect: Callable[[Driver], Client],
        connections: int = 4,
        enough: Callable[[], bool] | None = None,
    ) -> None:
        self.begin_ns = monotonic_ns()
        self.counts = Slice(0)
        self.ended = self.failed = 0
        self.wanted = 0
        load = self

        class Counted(Recorder):
            def ended(self, call: Any, error: str, now_ns: int) -> None:
                super().ended(call, error, now_ns)
                load.ended += 1

            def shed(self, now_ns: int) -> None:
                super().shed(now_ns)
                load.ended += 1

            def failed(self, error: str, now_ns: int) -> None:
                super().failed(error, now_ns)
                load.failed += 1

        recorder = Counted(self.begin_ns, self.counts.add)
        self.request = ReadyRequest(_BODY, 2)
        self.driver = Driver(
            connect, connections, lambda slot: self.request, recorder, enough or self._enough
        )

    def _enough(self) -> bool:
        return self.ended >= self.wanted

    def closed(self, slots: int, calls: int) -> Slice:
        self.wanted = calls
        self.driver.run_closed(slots, self.begin_ns + _LONG_NS)
        self.driver.close()
        return self.counts

    def open(self, rate: float, calls: int, most: int = 10_000) -> Slice:
        self.wanted = calls
        times = (self.begin_ns + int(time) for time in islice(schedules.constant(rate), calls))
        self.driver.run_open(times, self.begin_ns + _LONG_NS, most)
        self.driver.close()
        return self.counts


def _http(port: int) -> Callable[[Driver], Client]:
    endpoint = parse_url(f"http://127.0.0.1:{port}")
    return lambda driver: Http1Client(endpoint, "/", driver)


def test_counts_errors_and_dropped_connections_and_goes_on() -> None:
    answers = ["200 OK", "503 Busy", DROP, "400 Wrong"]
    with http_peer(lambda number: answers[number % 4]) as peer:
        found = _Load(_http(peer.port)).closed(4, 400)
    kinds = {"HTTP 503": 1, "connection lost": 1, "HTTP 400": 1}
    assert found.errors.keys() == kinds.keys()
    assert found.answered + found.errors.total() >= 400
    # All but what was in flight at the end is counted as it was answered.
    for counted in (found.answered, *found.errors.values()):
        assert abs(counted - peer.received / 4) <= 5
    assert found.latency.count == found.service.count == found.answered == found.responses


def _stalls(at: int) -> Callable[[int], str]:
    """Answers at once, but one request after a second."""

    def answer(number: int) -> str:
        if number == at:
            time.sleep(1)
        return "200 OK"

    return answer


def test_an_open_loop_sees_a_stall_that_a_closed_one_hides() -> None:
    with http_peer(_stalls(100)) as peer:
        closed = _Load(_http(peer.port), 1).closed(1, 1000)
    with http_peer(_stalls(100)) as peer:
        corrected = _Load(_http(peer.port), 1).open(500, 1000)
    # One call of 1000 waits in a closed loop; in an open one the next 500 come due meanwhile.
    assert closed.latency.largest_ns > 0.9e9
    assert corrected.answered == corrected.latency.count == 1000
    assert corrected.latency.quantile_ns(0.99) > 0.8e9
    assert corrected.latency.mean_ns > 4 * closed.latency.mean_ns
    assert corrected.service.mean_ns < corrected.latency.mean_ns / 4
    assert corrected.late > 300


def test_sheds_what_is_beyond_the_limit() -> None:
    with http_peer(_stalls(0)) as peer:
        found = _Load(_http(peer.port), 1).open(1000, 100, most=10)
    assert found.sent + found.shed == 100
    assert found.answered == found.sent >= 10
    assert found.shed


def test_counts_a_server_that_is_not_there_yet() -> None:
    refused = _Load(_http(free_port()))
    end_ns = refused.begin_ns + 500_000_000
    refused.wanted = 1
    refused.driver.run_closed(4, end_ns)
    refused.driver.close()
    assert sum(refused.counts.errors.values()) >= 2
    assert all(error.startswith("can't connect: ") for error in refused.counts.errors)
    assert not refused.counts.answered


def test_goes_on_once_a_slow_server_is_there() -> None:
    port = free_port()
    with ExitStack() as peers:
        started: list[object] = []

        def enough() -> bool:
            if load.failed >= 2 and not started:
                started.append(peers.enter_context(http_peer(lambda number: "200 OK", port)))
            return load.ended >= 100

        load = _Load(_http(port), enough=enough)
        found = load.closed(4, 0)
    assert found.answered >= 100 - 4
    assert set(found.errors) == {"can't connect: Connection refused"}


def test_a_connection_that_takes_long_to_open_holds_up_no_other_one() -> None:
    released = threading.Event()
    places = count()
    with http_peer(lambda number: "200 OK") as peer:
        connect = _http(peer.port)

        def slowly(driver: Driver) -> Client:
            if next(places):
                released.wait(WAIT_S)
            return connect(driver)

        load = _Load(slowly, 2)
        try:
            found = load.closed(2, 500)
        finally:
            released.set()
        # The other connection is closed by the thread that opens it.
        eventually(lambda: all(each.name != "connect" for each in threading.enumerate()), "the thread ends")
    assert found.answered >= 500
    assert not found.errors


class _Servicer(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers requests with these codes, in turn; None for an answer."""

    def __init__(self, *codes: grpc.StatusCode | None) -> None:
        self._codes = cycle(codes)
        self.sent: Counter[str] = Counter()
        self.peers: set[str] = set()

    def service(self, handler_call_details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._answer)

    def _answer(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        assert request == _BODY
        self.peers.add(context.peer())
        code = next(self._codes)
        self.sent[code.name if code else "OK"] += 1
        if code:
            context.abort(code, "as it was told")
        return b"x" * 70_000


@contextmanager
def _grpc_peer(
    servicer: grpc.GenericRpcHandler, *options: tuple[str, int], streams: bool = False
) -> Iterator[Callable[[Driver], Client]]:
    pool = futures.ThreadPoolExecutor(4)
    server = grpc.server(pool, [servicer], options=[*options, ("grpc.so_reuseport", 0)])
    endpoint = parse_url(f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    try:
        yield lambda driver: Http2Client(endpoint, _METHOD, streams, False, driver)
    finally:
        server.stop(None).wait()
        pool.shutdown()


@pytest.mark.parametrize("streams", [0, 2])
def test_grpcs_own_server_is_understood(streams: int) -> None:
    servicer = _Servicer(None, grpc.StatusCode.UNAVAILABLE, None, grpc.StatusCode.NOT_FOUND)
    options = [("grpc.max_concurrent_streams", streams)] if streams else []
    with _grpc_peer(servicer, *options) as connect:
        load = _Load(connect, 2)
        found = load.closed(8, 400)
    assert load.driver.stream_limit == streams
    assert load.driver.texts == dict.fromkeys(("UNAVAILABLE", "NOT_FOUND"), "as it was told")
    # Of a connection with few streams the server counts some for a moment after their end.
    refused = found.errors.pop("stream reset: REFUSED_STREAM", 0)
    assert found.errors.keys() == {"UNAVAILABLE", "NOT_FOUND"}
    assert streams or not refused
    counted = Counter({"OK": found.answered}) + found.errors
    for name, number in servicer.sent.items():
        assert 0 <= number - counted[name] <= 8


@pytest.mark.process
@pytest.mark.skipif(shutil.which("nghttpd") is None, reason="needs nghttpd, of Debian's nghttp2-server")
@pytest.mark.parametrize("streams", [3, 100])
def test_nghttp2s_server_is_understood(streams: int, tmp_path: Path) -> None:
    # Answers with what it has got, and a status as gRPC's servers send it.
    port = free_port()
    options = ["--no-tls", "--echo-upload", "--trailer=grpc-status: 0", f"--max-concurrent-streams={streams}"]
    server = subprocess.Popen(["nghttpd", *options, f"--htdocs={tmp_path}", str(port)])
    endpoint = parse_url(f"grpc://127.0.0.1:{port}")
    try:
        eventually(lambda: _listens(port), "nghttpd listens")
        load = _Load(lambda driver: Http2Client(endpoint, _METHOD, False, False, driver), 2)
        load.request = ReadyRequest(b"x" * 200_000, 0)  # more than a window
        found = load.closed(8, 400)
    finally:
        server.terminate()
        server.wait()
    found.errors.pop("stream reset: REFUSED_STREAM", None)
    assert not found.errors
    assert found.answered >= 400 - (streams == 3) * 8


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


class _Echo(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers each message of a stream."""

    def service(self, handler_call_details: Any) -> Any:
        response = inference_pb2.ModelInferResponse(model_name="some")
        answer = inference_pb2.ModelStreamInferResponse(infer_response=response).SerializeToString()
        return grpc.stream_stream_rpc_method_handler(lambda requests, context: (answer for _ in requests))


def test_slots_that_have_a_stream_go_on_where_a_server_allows_no_more_of_them() -> None:
    with _grpc_peer(_Echo(), ("grpc.max_concurrent_streams", 2), streams=True) as connect:
        load = _Load(connect, 1)
        found = load.closed(4, 200)
    assert load.driver.stream_limit == 2
    assert found.answered >= 200
    assert not found.errors


def _answer_together(listener: socket.socket, requests: int) -> None:
    """Answers so many requests by one write, again and again."""
    server, _ = listener.accept()
    connection, ended = Http2Connection(), deque[int]()
    with server, suppress(ConnectionError):
        while data := server.recv(1 << 16):
            events = connection.receive(data, monotonic_ns())
            while connection.unparsed:
                events += connection.receive(b"", monotonic_ns())
            ended += [each.stream_id for each in events if type(each) is DataReceived and each.end_stream]
            if len(ended) >= requests:
                for stream_id in ended:
                    connection.send_headers(stream_id, ((b":status", b"200"),))
                    connection.send_data(stream_id, [b"\0\0\0\0\0"])
                    connection.send_headers(stream_id, ((b"grpc-status", b"0"),), True)
                ended.clear()
            server.sendall(b"".join(connection.take_output()))


def test_many_answers_that_come_at_once_are_all_counted() -> None:
    """Parts of what one read brings were dropped, and their slots sent nothing more."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        peer = threading.Thread(target=_answer_together, args=(listener, 32))
        peer.start()
        endpoint = parse_url(f"grpc://127.0.0.1:{listener.getsockname()[1]}")
        found = _Load(lambda driver: Http2Client(endpoint, _METHOD, False, False, driver), 1).closed(32, 320)
        peer.join()
    assert found.answered >= 320
    assert not found.errors


def test_connects_again_when_a_server_goes_away() -> None:
    servicer = _Servicer(None)
    ages = ("grpc.max_connection_age_ms", 200), ("grpc.max_connection_age_grace_ms", 60_000)
    with _grpc_peer(servicer, *ages) as connect:
        load = _Load(connect, 1, lambda: len(servicer.peers) >= 3)
        found = load.closed(4, 0)
    assert len(servicer.peers) >= 3
    assert found.answered
    assert not found.errors
