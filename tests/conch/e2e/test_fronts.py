"""A server with front processes: what they share, what ends with one of them, and what does not."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt
import psutil
import pytest
import tritonclient.grpc as triton
from tests.support.fronts import front_metrics, front_processes
from tests.support.servers import (
    IN_PROCESS,
    WAIT_S,
    RawClient,
    ServerProcess,
    client_of,
    eventually,
    serving_process,
    write_probe,
)
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.slow
Values = npt.NDArray[np.float32]
_SIZES = (4, 20_000)
"""Elements of tensors that travel in a message, and in a block."""


def _infer(client: triton.InferenceServerClient, values: Values, timeout_s: float = WAIT_S) -> Values:
    given = triton.InferInput("IN", [1, len(values)], "FP32")
    given.set_data_from_numpy(values[None])
    answer = client.infer("probe", [given], client_timeout=timeout_s).as_numpy("OUT")
    assert answer is not None
    found: Values = answer[0]
    return found


def _answers(server: ServerProcess, values: Values) -> bool:
    """Whether a new client gets an answer soon."""
    with client_of(server) as client:
        try:
            return np.array_equal(_infer(client, values, timeout_s=0.5), values)
        except InferenceServerException:
            return False


@contextmanager
def _serving(tmp_path: Path, *flags: str) -> Iterator[ServerProcess]:
    write_probe(tmp_path)
    with serving_process(tmp_path, flags=["--front-ends=2", *flags]) as server:
        yield server


def test_each_client_gets_its_own_bytes(tmp_path: Path) -> None:
    """Also beside clients whose tensors have other sizes than their shapes: those are refused, alone."""
    wrong = Counter[str]()

    def ask(server: ServerProcess, number: int) -> None:
        random = np.random.default_rng(number)
        with client_of(server) as client:
            for _ in range(100):
                values = random.random(random.choice(_SIZES), np.float32)
                if not np.array_equal(_infer(client, values), values):
                    wrong["bytes of another"] += 1

    def ask_badly(server: ServerProcess, extra: int) -> None:
        request = service_pb2.ModelInferRequest(model_name="probe", raw_input_contents=[bytes(16 + extra)])
        request.inputs.add(name="IN", datatype="FP32", shape=[1, 4])
        with closing(RawClient(server.address)) as client:
            for _ in range(100):
                try:
                    client.infer(request)
                    wrong["accepted"] += 1
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                        wrong[error.details()] += 1

    with _serving(tmp_path, IN_PROCESS) as server:
        threads = [threading.Thread(target=ask, args=(server, number)) for number in range(3)]
        threads += [threading.Thread(target=ask_badly, args=(server, extra)) for extra in (4, -4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(count > 0 for count in front_metrics(server, "conch_front_cpu_seconds_total"))
    assert not wrong


def _kill_one(server: ServerProcess, values: Values) -> None:
    """Kills one of two fronts that have a client each: the other client notices nothing."""
    eventually(lambda: front_metrics(server, "conch_front_up") == [1, 1], "both serve")
    with client_of(server) as first, client_of(server) as second:
        for client in (first, second):
            assert np.array_equal(_infer(client, values), values)
        eventually(lambda: front_metrics(server, "conch_front_connections") == [1, 1], "each has a client")
        restarts = sum(front_metrics(server, "conch_front_restarts_total"))
        front_processes(server)[0].kill()
        failed = 0
        for client in (first, second):
            try:
                assert np.array_equal(_infer(client, values), values)
            except InferenceServerException:
                failed += 1
        assert failed <= 1
        eventually(
            lambda: sum(front_metrics(server, "conch_front_restarts_total")) > restarts, "it is noticed"
        )
        for client in (first, second):
            assert np.array_equal(_infer(client, values), values)
    eventually(lambda: front_metrics(server, "conch_front_connections") == [0, 0], "their clients have left")


@pytest.mark.parametrize("placement", ["in_process", "worker"])
def test_a_front_that_dies_takes_its_connections_only(tmp_path: Path, placement: str) -> None:
    values = np.arange(_SIZES[1], dtype=np.float32)
    with _serving(tmp_path, f"--backend-config=python,placement={placement}") as server:
        core = psutil.Process(server.process.pid)
        _kill_one(server, values)
        descriptors = core.num_fds()
        for _ in range(4):
            _kill_one(server, values)
        eventually(lambda: core.num_fds() <= descriptors, "its descriptors are closed")
        assert sum(front_metrics(server, "conch_front_restarts_total")) == 5
        assert front_metrics(server, "conch_pending_requests") == [0]


def test_a_front_that_hangs_delays_no_other(tmp_path: Path) -> None:
    values = np.arange(4, dtype=np.float32)
    with _serving(tmp_path, IN_PROCESS) as server, client_of(server) as first:
        assert np.array_equal(_infer(first, values), values)
        connections = front_metrics(server, "conch_front_connections")
        hanging = sorted(front_processes(server), key=lambda front: front.pid)[connections.index(0)]
        os.kill(hanging.pid, signal.SIGSTOP)
        try:
            for _ in range(3):
                assert np.array_equal(_infer(first, values), values)
            eventually(lambda: _answers(server, values), "a new client gets another front")
        finally:
            os.kill(hanging.pid, signal.SIGCONT)


def test_fronts_end_with_their_core(tmp_path: Path) -> None:
    with _serving(tmp_path, IN_PROCESS) as server:
        fronts = front_processes(server)
        assert len(fronts) == 2
        server.kill()
        gone, alive = psutil.wait_procs(fronts, WAIT_S)
        assert len(gone) == 2
        assert not alive
