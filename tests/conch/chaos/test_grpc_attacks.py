"""One client that sends the worst it can over gRPC: others are answered, and memory stays bounded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import grpc
import pytest
from tests.support.attacks import INFER, STREAM, STRINGS, STRINGS_CONFIG, cpu_s, infer_bodies
from tests.support.http2_peer import Http2Peer
from tests.support.servers import (
    WAIT_S,
    RawClient,
    ServerProcess,
    check_simple,
    client_of,
    copy_example,
    serving_process,
    simple_inputs,
    write_model,
)
from tritonclient.grpc import service_pb2

MOST_RECEIVED = 128 << 20
MOST_S = 0.15
"""Processor time of the server in a check: 0.02 s, and without the bound of fields 0.3 to 0.6 s."""


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
            for check in (client.is_server_live, client.is_server_ready):
                before = cpu_s(attacked.process.pid)
                assert check(client_timeout=WAIT_S)
                assert cpu_s(attacked.process.pid) - before < MOST_S
        check_simple(client.infer("simple", simple_inputs()))


def test_a_load_with_millions_of_parameters_is_refused(attacked: ServerProcess) -> None:
    message = b"\x12\x06simple" + b"\x1a\x00" * 1_000_000
    with closing(RawClient(attacked.address)) as raw, pytest.raises(grpc.RpcError) as raised:
        raw("/inference.GRPCInferenceService/RepositoryModelLoad", message)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert raised.value.details().startswith("the request message has more than 65536 fields")


def still_serves(server: ServerProcess) -> None:
    with client_of(server) as client:
        check_simple(client.infer("simple", simple_inputs(), client_timeout=WAIT_S))


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--front-ends=2"]], ids=["one_process", "fronts"])
def test_idle_connections_above_the_limit_make_room(
    tmp_path: Path, grpc_is_warm: None, more: list[str]
) -> None:
    copy_example(tmp_path, "simple")
    with (
        serving_process(tmp_path, flags=["--grpc-max-connections=20", *more]) as server,
        ExitStack() as stack,
    ):
        peers = [stack.enter_context(closing(Http2Peer(server.address))) for _ in range(100)]
        for peer in peers:
            peer.start()
        still_serves(server)
        for peer in peers[:50]:
            peer.wait_closed()


def test_metadata_above_the_limit_is_refused(attacked: ServerProcess) -> None:
    with closing(RawClient(attacked.address)) as raw:
        live = service_pb2.ServerLiveRequest()
        assert raw("ServerLive", live, [("x-a", "a" * 12_000)]).live
        with pytest.raises(grpc.RpcError) as raised:
            raw("ServerLive", live, [("x-a", "a" * 20_000)])
        assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.slow
def test_a_gzip_bomb_takes_no_more_memory_than_the_server_may_hold(
    tmp_path: Path, grpc_is_warm: None
) -> None:
    """The server unpacks of 1 GB only what its bound allows."""
    copy_example(tmp_path, "simple")
    with serving_process(tmp_path, flags=[f"--grpc-max-received-bytes={MOST_RECEIVED}"]) as server:
        still_serves(server)
        before = peak_bytes(server)
        with closing(RawClient(server.address)) as raw:
            infer = raw.channel.unary_unary(INFER)
            for _ in range(3):
                with pytest.raises(grpc.RpcError) as raised:
                    infer(bytes(8 * MOST_RECEIVED), timeout=WAIT_S, compression=grpc.Compression.Gzip)
                assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert peak_bytes(server) - before < 2 * MOST_RECEIVED
        still_serves(server)


def peak_bytes(server: ServerProcess) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10
