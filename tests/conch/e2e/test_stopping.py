"""Stops of a server: requests in flight are finished, and it never takes for ever."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.servers import (
    IN_PROCESS,
    NUMBER_CONFIG,
    WAIT_S,
    RawClient,
    ServerProcess,
    client_of,
    eventually,
    probe,
    simple_inputs,
    started,
    write_model,
)
from tests.support.waiting_models import WAITING
from tritonclient.grpc import InferenceServerClient, service_pb2
from tritonclient.utils import InferenceServerException

# As an engine does that leaves a native thread: C++ aborts a process that destroys it at its exit.
_ABORTS_AT_EXIT = """
import ctypes


class TritonPythonModel:
    def initialize(self, args):
        libc = ctypes.CDLL(None)
        register = libc["__cxa_atexit"]
        register.argtypes = [ctypes.c_void_p] * 3
        register(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)

    def execute(self, requests):
        return []
"""
STOPPING = "Waiting for in-flight requests to complete."


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "started", tmp_path / "go"


@contextmanager
def busy(
    repository: Path, files: tuple[Path, Path], *flags: str
) -> Iterator[tuple[ServerProcess, list[Any]]]:
    """A server with a request running until the second file exists, and where its outcome goes."""
    outcome: list[Any] = []
    running, go = files

    def ask(server: ServerProcess) -> None:
        with client_of(server) as client:
            try:
                outcome.append(probe(client, parameters={"started": str(running), "wait_for": str(go)}))
            except InferenceServerException as error:
                outcome.append(error)

    with started(f"--model-repository={repository}", "--grpc-port=0", *flags) as server:
        server.wait_ready()
        thread = threading.Thread(target=ask, args=(server,))
        thread.start()
        try:
            eventually(running.exists, "the request runs")
            yield server, outcome
        finally:
            server.kill()
            thread.join(WAIT_S)


def refusal(client: InferenceServerClient) -> str:
    """The status of a request that is refused; empty if it is answered."""
    try:
        client.infer("simple", simple_inputs(), client_timeout=WAIT_S)
    except InferenceServerException as error:
        return str(error.status())
    return ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_requests_in_flight_are_finished(
    repository: Path, files: tuple[Path, Path], number: signal.Signals
) -> None:
    with busy(repository, files) as (server, outcome):
        server.signal(number)
        with client_of(server) as late:
            assert eventually(lambda: refusal(late), "it takes no more") == "StatusCode.UNAVAILABLE"
        assert server.process.poll() is None, "it did not wait"
        files[1].touch()
        assert server.wait() == 0
        eventually(lambda: outcome, "the request is answered")
    assert outcome[0]["config"] == "probe"


def test_queued_requests_are_finished(repository: Path, files: tuple[Path, Path]) -> None:
    with busy(repository, files) as (server, outcome):
        with closing(RawClient(server.address)) as raw:
            call = raw.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            request = service_pb2.ModelInferRequest(model_name="probe", raw_input_contents=[b"\0" * 4])
            request.inputs.add(name="IN", datatype="FP32", shape=[1, 1])
            queued = [call.future(request.SerializeToString(), timeout=WAIT_S) for _ in range(20)]
            # On the same connection, so the server has read the requests before this one.
            raw("ServerLive", service_pb2.ServerLiveRequest())
            server.signal(signal.SIGTERM)
            eventually(lambda: STOPPING in server.errors, "it begins to stop")
            files[1].touch()
            for future in queued:
                assert service_pb2.ModelInferResponse.FromString(future.result()).model_name == "probe"
            assert server.wait() == 0
        eventually(lambda: outcome, "the request is answered")
    assert outcome[0]["config"] == "probe"


def test_second_signal_ends_at_once(repository: Path, files: tuple[Path, Path]) -> None:
    with busy(repository, files) as (server, outcome):
        server.signal(signal.SIGTERM)
        eventually(lambda: STOPPING in server.errors, "it begins to stop")
        server.signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM
        eventually(lambda: outcome, "the client notices")
    assert outcome[0].status() == "StatusCode.UNAVAILABLE"


def test_exit_timeout(repository: Path, files: tuple[Path, Path]) -> None:
    with busy(repository, files, "--exit-timeout-secs=1") as (server, outcome):
        server.signal(signal.SIGTERM)
        assert server.wait() == 1
        assert server.logs()[-1]["message"] == "Exit timeout expired. Exiting immediately."
        eventually(lambda: outcome, "the client notices")
    assert isinstance(outcome[0], InferenceServerException)


def test_exit_timeout_while_a_model_loads(repository: Path, files: tuple[Path, Path]) -> None:
    running, go = files
    write_model(
        repository, "slow", NUMBER_CONFIG, {"model.py": WAITING.format(running=str(running), go=str(go))}
    )
    flags = ["--model-control-mode=explicit", "--exit-timeout-secs=1", IN_PROCESS]
    with started(f"--model-repository={repository}", "--grpc-port=0", *flags) as server:
        server.wait_ready()
        with closing(RawClient(server.address)) as raw:
            method = raw.channel.unary_unary("/inference.GRPCInferenceService/RepositoryModelLoad")
            request = service_pb2.RepositoryModelLoadRequest(model_name="slow")
            loading = method.future(request.SerializeToString(), timeout=WAIT_S)
            eventually(running.exists, "the model loads")
            server.signal(signal.SIGTERM)
            assert server.wait() == 1
            assert isinstance(loading.exception(WAIT_S), grpc.RpcError)


def test_exit_timeout_with_a_hung_request_and_a_load(repository: Path, tmp_path: Path) -> None:
    files = tmp_path / "started", tmp_path / "go"
    loads = tmp_path / "loads"
    never = str(tmp_path / "never")
    write_model(repository, "slow", NUMBER_CONFIG, {"model.py": WAITING.format(running=str(loads), go=never)})
    flags = ["--model-control-mode=explicit", "--load-model=probe", "--exit-timeout-secs=2"]
    with busy(repository, files, *flags) as (server, outcome), closing(RawClient(server.address)) as raw:
        method = raw.channel.unary_unary("/inference.GRPCInferenceService/RepositoryModelLoad")
        request = service_pb2.RepositoryModelLoadRequest(model_name="slow")
        loading = method.future(request.SerializeToString(), timeout=WAIT_S)
        eventually(loads.exists, "the model loads")
        before = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.wait() == 1
        assert time.monotonic() - before >= 2
        assert server.logs()[-1]["message"] == "Exit timeout expired. Exiting immediately."
        assert isinstance(loading.exception(WAIT_S), grpc.RpcError)
        eventually(lambda: outcome, "the client notices")
    assert isinstance(outcome[0], InferenceServerException)


def test_open_streams_do_not_hold_up_the_end(repository: Path, tmp_path: Path) -> None:
    with started(f"--model-repository={repository}", "--grpc-port=0") as server:
        server.wait_ready()
        release = threading.Event()

        def nothing() -> Iterator[Any]:
            release.wait(WAIT_S)
            yield from ()

        with closing(RawClient(server.address)) as raw:
            method = raw.channel.stream_stream(
                "/inference.GRPCInferenceService/ModelStreamInfer",
                request_serializer=service_pb2.ModelInferRequest.SerializeToString,
                response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
            )
            call = method(nothing(), timeout=WAIT_S)
            call.initial_metadata()  # the stream is open
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
            with pytest.raises(grpc.RpcError):
                next(call)
            release.set()
            assert call.code() == grpc.StatusCode.UNAVAILABLE
            text = "GRPC server is shutting down and has stopped accepting new requests."
            assert call.details() == text


def test_idle_server_ends_at_once_with_clients_connected(repository: Path) -> None:
    with started(f"--model-repository={repository}", "--grpc-port=0") as server:
        server.wait_ready()
        with client_of(server) as client:
            assert client.is_server_live()
            server.signal(signal.SIGTERM)
            assert server.wait() == 0


@pytest.mark.parametrize("failed", [False, True], ids=["stopped", "failed to start"])
def test_a_process_ends_cleanly_whatever_engines_leave(tmp_path: Path, failed: bool) -> None:
    for placement in ("in_process", "worker"):
        more = f'parameters {{ key: "CONCH_PLACEMENT" value {{ string_value: "{placement}" }} }}'
        write_model(tmp_path, placement, NUMBER_CONFIG + more, {"model.py": _ABORTS_AT_EXIT})
    if failed:
        write_model(tmp_path, "broken", NUMBER_CONFIG, {"model.py": "raise ValueError"})
    with started(f"--model-repository={tmp_path}", "--grpc-port=0") as server:
        if failed:
            assert server.wait() == 1
        else:
            server.wait_ready()
            assert server.stop() == 0
        assert server.errors.count("successfully loaded") == 2
        assert "died" not in server.errors
