"""One client that sends the worst it can over gRPC: others are answered, and memory stays bounded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import grpc
import psutil
import pytest
from tests.support.attacks import INFER, STREAM, STRINGS, STRINGS_CONFIG, infer_bodies
from tests.support.raw_http2 import (
    END_HEADERS,
    HEADERS,
    RESET,
    RawConnection,
    call_headers,
    frame,
    indexed,
    literal,
)
from tests.support.servers import (
    WAIT_S,
    RawClient,
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

SOON_S = 1.0
"""Before messages were bounded, health checks took 2 to 5 s beside these."""

MOST_GROWTH = 150 << 20


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory, grpc_is_warm: None) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("models")
    write_model(repository, "strings", STRINGS_CONFIG, {"model.py": STRINGS})
    copy_example(repository, "simple")
    with serving_process(repository) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("model", ["strings", "unknown"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        "empty raw_input_contents",
        "empty bytes_contents",
        "empty inputs",
        "empty outputs",
        "empty parameters",
        "raw strings",
        "int64_contents",
    ],
)
def test_health_is_answered_beside_millions_of_elements(
    attacked: ServerProcess, body: str, stream: bool, model: str
) -> None:
    message = infer_bodies(model, 6 << 20)[body]()
    done = threading.Event()

    def attack() -> None:
        with closing(RawClient(attacked.address)) as raw, suppress(grpc.RpcError):
            if stream:
                list(raw.channel.stream_stream(STREAM)(iter([message]), timeout=WAIT_S))
            else:
                raw.channel.unary_unary(INFER)(message, timeout=WAIT_S)
        done.set()

    with client_of(attacked) as client:
        assert client.is_server_live()
        threading.Thread(target=attack, daemon=True).start()
        while not done.is_set():
            assert client.is_server_live(client_timeout=SOON_S)
            assert client.is_server_ready(client_timeout=SOON_S)
        check_simple(client.infer("simple", simple_inputs()))


def test_a_load_with_millions_of_parameters_is_refused(attacked: ServerProcess) -> None:
    message = b"\x12\x06simple" + b"\x1a\x00" * 1_000_000
    with closing(RawClient(attacked.address)) as raw, pytest.raises(grpc.RpcError) as raised:
        raw("/inference.GRPCInferenceService/RepositoryModelLoad", message)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert raised.value.details().startswith("the request message has more than 65536 fields")


def resident(server: ServerProcess) -> int:
    return int(psutil.Process(server.process.pid).memory_info().rss)


def still_serves(server: ServerProcess) -> None:
    with client_of(server) as client:
        check_simple(client.infer("simple", simple_inputs(), client_timeout=WAIT_S))


def test_open_streams_are_limited(attacked: ServerProcess) -> None:
    before = resident(attacked)
    headers = call_headers(STREAM)
    with closing(RawConnection(attacked.address)) as connection:
        assert connection.settings()[3] == 1024
        for first in range(0, 50_000, 100):
            streams = range(2 * first + 1, 2 * first + 201, 2)
            if not connection.send(b"".join(frame(HEADERS, END_HEADERS, one, headers) for one in streams)):
                break
            connection.received()
        still_serves(attacked)
        assert resident(attacked) < before + MOST_GROWTH


def test_streams_that_are_reset_at_once_leave_nothing(attacked: ServerProcess) -> None:
    before = resident(attacked)
    headers, cancel = call_headers(STREAM), b"\0\0\0\x08"
    with closing(RawConnection(attacked.address)) as connection:
        for first in range(0, 100_000, 100):
            streams = range(2 * first + 1, 2 * first + 201, 2)
            frames = [
                frame(HEADERS, END_HEADERS, one, headers) + frame(RESET, 0, one, cancel) for one in streams
            ]
            if not connection.send(b"".join(frames)):
                break
            connection.received()
        still_serves(attacked)
        assert resident(attacked) < before + MOST_GROWTH


@pytest.mark.slow
def test_a_client_that_names_one_header_thousands_of_times_is_disconnected(attacked: ServerProcess) -> None:
    """It does not acknowledge the server's settings: until then the C core takes 16 MiB a call."""
    before = resident(attacked)
    with closing(RawConnection(attacked.address)) as connection:
        connection.send(
            frame(HEADERS, END_HEADERS, 1, call_headers(STREAM) + literal("x-a", "a" * 4000, index=True))
        )
        bomb = call_headers(STREAM) + indexed(62) * 15_000
        for stream in range(3, 4_003, 2):
            if not connection.send(frame(HEADERS, END_HEADERS, stream, bomb)):
                break
            connection.received()
        else:
            pytest.fail("the client is still connected")
    still_serves(attacked)
    assert resident(attacked) < before + MOST_GROWTH


@pytest.mark.slow
def test_connections_above_the_limit_are_closed_at_once(tmp_path: Path, grpc_is_warm: None) -> None:
    copy_example(tmp_path, "simple")
    with serving_process(tmp_path, flags=["--grpc-max-connections=20"]) as server:
        connections = [RawConnection(server.address) for _ in range(20)]
        for connection in connections:
            assert connection.settings()
        with closing(RawConnection(server.address)) as one_more, pytest.raises(OSError):
            one_more.settings()
        for connection in connections:
            connection.close()
        eventually(lambda: connected(server), "there is a place again")
        still_serves(server)


def connected(server: ServerProcess) -> bool:
    with suppress(OSError), closing(RawConnection(server.address)) as connection:
        return bool(connection.settings())
    return False


def test_metadata_above_the_limit_is_refused(attacked: ServerProcess) -> None:
    with closing(RawClient(attacked.address)) as raw:
        live = service_pb2.ServerLiveRequest()
        assert raw("ServerLive", live, [("x-a", "a" * 12_000)]).live
        with pytest.raises(grpc.RpcError) as raised:
            raw("ServerLive", live, [("x-a", "a" * 20_000)])
        assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
