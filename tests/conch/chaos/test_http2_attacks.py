"""Clients that abuse HTTP/2: they are disconnected or bounded, others are served, and memory returns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from select import select

import numpy as np
import psutil
import pytest
from tests.support.attacks import INFER, health_probe
from tests.support.certificates import Authority
from tests.support.floods import FLOODS, LARGE, LARGE_CONFIG, OWN, streams_of
from tests.support.grpc_transports import TRANSPORTS
from tests.support.http2_peer import (
    END_STREAM,
    MAX_WINDOW,
    PREFACE,
    FrameType,
    Http2Peer,
    Setting,
    call,
    call_pairs,
    data,
    header_block,
    headers,
    window_update,
)
from tests.support.metrics import scrape, value
from tests.support.servers import (
    IN_PROCESS,
    WAIT_S,
    ServerProcess,
    check_simple,
    client_of,
    copy_example,
    eventually,
    serving_process,
    simple_inputs,
    write_model,
)
from tritonclient.grpc import service_pb2

MOST_GROWTH = 150 << 20
KEPT = 256 << 20
"""Freed memory that the allocator keeps, see `allocator.keep_large_blocks`."""
ANSWERS, ROUNDS = 200, 3
IDLE, IDLE_BYTES = 300, 100_000
NO_PROGRESS_S = 60.0
"""After which a stream is cancelled whose client grants no window."""

TRICKLE_S = 0.5
MOST_RECEIVED, BEGUN, MANY = (64 << 20) + 4096, 2 << 20, 100
"""A bound of received messages, bytes of each message that is begun, and connections that begin one."""

MOST_S = 2.0
"""Processor time that the server may take for others while a health check beside an attack waits."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, grpc_is_warm: None) -> Path:
    """`simple`, and a model with large answers to small requests."""
    directory = tmp_path_factory.mktemp("models")
    copy_example(directory, "simple")
    write_model(directory, "large", LARGE_CONFIG, {"model.py": LARGE})
    return directory


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """The name of a transport of the gRPC port."""
    return str(request.param)


@pytest.fixture(scope="module")
def attacked(transport: str, repository: Path) -> Iterator[ServerProcess]:
    """A server with that transport."""
    with serving_process(repository, flags=[*TRANSPORTS[transport], IN_PROCESS]) as server:
        for _ in range(3):
            still_serves(server)
        yield server


def resident(server: ServerProcess) -> int:
    return int(psutil.Process(server.process.pid).memory_info().rss)


def still_serves(server: ServerProcess) -> None:
    with client_of(server) as client:
        check_simple(client.infer("simple", simple_inputs(), client_timeout=WAIT_S))


@contextmanager
def others_are_served(server: ServerProcess, kept: int = 0) -> Iterator[int]:
    """Another client is answered while the block runs, and the server's memory returns after it.

    Args:
        server: The server.
        kept: Memory that may stay.

    Yields:
        The memory before.
    """
    before = resident(server)
    with health_probe(server) as probe:
        yield before
        still_serves(server)
    assert probe.worst_cpu_s < MOST_S
    eventually(lambda: resident(server) < before + kept + MOST_GROWTH, "the server's memory returns")


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_ends_or_is_bounded(attacked: ServerProcess, transport: str, name: str) -> None:
    flood = FLOODS[name]
    with (
        others_are_served(attacked) as before,
        closing(Http2Peer(attacked.address, acknowledges=flood.acknowledges)) as peer,
    ):
        peer.start()
        for number in range(flood.rounds):
            if not taken(peer, flood.frames(number)):
                break
            assert resident(attacked) < before + MOST_GROWTH
            if flood.reads:
                peer.drain()
        if transport in flood.ended_by:
            peer.wait_closed()


def taken(peer: Http2Peer, frames: bytes) -> bool:
    """Sends frames; False if the server has closed the connection or reads nothing more."""
    try:
        return peer.send(frames)
    except TimeoutError:
        return False


def ask_for_answers(peer: Http2Peer, count: int) -> None:
    request = service_pb2.ModelInferRequest(
        model_name="large", raw_input_contents=[np.zeros(1, np.int32).tobytes()]
    )
    request.inputs.add(name="IN", datatype="INT32", shape=[1])
    peer.send(*(call(stream, request.SerializeToString(), INFER) for stream in range(1, 2 * count, 2)))


@pytest.mark.slow
def test_answers_without_a_window_leave_nothing(attacked: ServerProcess, transport: str) -> None:
    if transport not in OWN:
        pytest.skip(f"{transport} keeps up to four times as much, also when the client is gone")
    with others_are_served(attacked, KEPT) as before:
        for _ in range(ROUNDS):
            with closing(Http2Peer(attacked.address)) as peer:
                peer.handshake((Setting.INITIAL_WINDOW_SIZE, 0))
                ask_for_answers(peer, ANSWERS)
                for stream in range(1, 2 * ANSWERS, 2):
                    peer.wait_frame(FrameType.HEADERS, stream)
                # What is kept of the rounds before is used again.
                assert resident(attacked) < before + KEPT + MOST_GROWTH


@pytest.mark.slow
def test_calls_without_progress_are_cancelled(attacked: ServerProcess, transport: str) -> None:
    """One client grants a byte of its window, and sends a byte of a message, again and again; one waits."""
    if transport not in OWN:
        pytest.skip(f"{transport} waits without end")
    with (
        others_are_served(attacked),
        closing(Http2Peer(attacked.address)) as peer,
        closing(Http2Peer(attacked.address, NO_PROGRESS_S + WAIT_S)) as waiting,
    ):
        for each in (peer, waiting):
            each.handshake((Setting.INITIAL_WINDOW_SIZE, 0))
            ask_for_answers(each, 1)
        peer.wait_frame(FrameType.HEADERS, 1)
        peer.send(headers(3, header_block(*call_pairs(INFER))) + data(3, b"\0\x40\0\0\0"))
        ended: set[int] = set()
        end = time.monotonic() + NO_PROGRESS_S + WAIT_S
        while ended != {1, 3} and time.monotonic() < end:
            select([peer.socket], [], [], TRICKLE_S)
            ended |= {each.stream for each in peer.drain() if each.kind == FrameType.RST_STREAM}
            if 1 not in ended:
                peer.send(window_update(1, 1))
            if 3 not in ended:
                peer.send(data(3, b"x"))
        assert ended == {1, 3}
        waiting.wait_frame(FrameType.RST_STREAM, 1)
        found = scrape(attacked.metrics_url)
        for reason in ("slow_reader", "slow_sender"):
            assert value(found, "conch_grpc_calls_ended_total", reason=reason)


@pytest.mark.slow
def test_messages_that_many_connections_begin_are_bounded(transport: str, repository: Path) -> None:
    if transport not in OWN:
        pytest.skip(f"{transport} bounds them a call, not together")
    flags = [*TRANSPORTS[transport], IN_PROCESS, f"--grpc-max-received-bytes={MOST_RECEIVED}"]
    begun = headers(1, header_block(*call_pairs(INFER))) + data(1, b"\0\x40\0\0\0" + bytes(BEGUN))
    with serving_process(repository, flags=flags) as server:
        still_serves(server)
        with others_are_served(server) as before, ExitStack() as stack:
            refused = 0
            for _ in range(MANY):
                peer = stack.enter_context(closing(Http2Peer(server.address)))
                peer.handshake()
                peer.send(begun, call(3))
                while not ((each := peer.wait_any()).ends and each.stream == 3):
                    refused += each.ends and each.stream == 1
                assert received_bytes(server) <= MOST_RECEIVED
                assert resident(server) < before + MOST_RECEIVED + MOST_GROWTH
            found = scrape(server.metrics_url)
            assert refused == value(found, "conch_grpc_calls_ended_total", reason="received_bytes")
            assert MANY - refused == MOST_RECEIVED // BEGUN
            still_serves(server)
        eventually(lambda: received_bytes(server) == 0, "all is forgotten")


def received_bytes(server: ServerProcess) -> float:
    found = value(scrape(server.metrics_url), "conch_grpc_received_bytes")
    assert found is not None
    return found


@pytest.mark.slow
def test_answers_that_are_not_read_leave_nothing(attacked: ServerProcess, transport: str) -> None:
    if transport not in OWN:
        pytest.skip(f"{transport} keeps up to four times as much, also when the client is gone")
    with others_are_served(attacked, KEPT) as before:
        for _ in range(ROUNDS):
            with closing(Http2Peer(attacked.address)) as peer:
                peer.handshake((Setting.INITIAL_WINDOW_SIZE, MAX_WINDOW))
                peer.send(window_update(0, MAX_WINDOW - 65535))
                all_executed = partial(has_executed, attacked, executions(attacked) + ANSWERS)
                ask_for_answers(peer, ANSWERS)
                eventually(all_executed, "all requests are executed")
                assert resident(attacked) < before + KEPT + MOST_GROWTH


def has_executed(server: ServerProcess, count: int) -> bool:
    return executions(server) == count


def executions(server: ServerProcess) -> int:
    with client_of(server) as client:
        (stats,) = client.get_inference_statistics("large").model_stats
        return int(stats.inference_count)


@pytest.mark.slow
def test_announced_messages_take_no_memory(attacked: ServerProcess) -> None:
    gigabyte = b"\0\x40\0\0\0"
    block = header_block(*call_pairs(INFER))
    with others_are_served(attacked) as before, closing(Http2Peer(attacked.address)) as peer:
        peer.handshake()
        for number in range(5):
            *streams, last = streams_of(number)
            for stream in streams:
                peer.send(headers(stream, block) + data(stream, gigabyte + b"x"))
            peer.send(call(last))
            peer.wait_frame(FrameType.HEADERS, last, END_STREAM)
            assert resident(attacked) < before + MOST_GROWTH


@pytest.mark.slow
def test_idle_connections_take_little_memory(attacked: ServerProcess) -> None:
    with others_are_served(attacked) as before, ExitStack() as stack:
        for _ in range(IDLE):
            peer = stack.enter_context(closing(Http2Peer(attacked.address)))
            peer.handshake()
        assert resident(attacked) < before + IDLE * IDLE_BYTES + MOST_GROWTH
        still_serves(attacked)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent", [b"", PREFACE[:10], PREFACE], ids=["nothing", "half a preface", "no settings"]
)
def test_a_connection_without_a_preface_is_closed(
    attacked: ServerProcess, transport: str, sent: bytes
) -> None:
    if transport not in OWN:
        pytest.skip(f"{transport} waits for two minutes")
    with others_are_served(attacked), closing(Http2Peer(attacked.address)) as peer:
        peer.send(sent)
        peer.wait_closed()


@pytest.mark.slow
def test_a_connection_without_a_tls_handshake_is_closed(
    transport: str, repository: Path, tmp_path: Path
) -> None:
    if transport not in OWN:
        pytest.skip(f"{transport} waits for two minutes")
    key, certificate = Authority(tmp_path / "authority").issue("server")
    flags = ["--grpc-use-ssl", f"--grpc-server-cert={certificate}", f"--grpc-server-key={key}"]
    with (
        serving_process(repository, flags=[*TRANSPORTS[transport], *flags]) as server,
        closing(Http2Peer(server.address)) as peer,
    ):
        peer.wait_closed()
