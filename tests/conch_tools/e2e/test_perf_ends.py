"""Ends of loads that do not end by themselves: processes that are lost, Ctrl-C and SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import active_children
from pathlib import Path

import pytest
from tests.support.known_peers import http_peer
from tests.support.servers import CONCH, WAIT_S, client_of, copy_example, eventually, serving
from tests.support.waiting import given_time

from conch_tools.connection import parse_url
from conch_tools.perf.load.coordinator import LoadOutcome, run_load
from conch_tools.perf.load.load_process import LoadPlan
from conch_tools.perf.load.ready_requests import ReadyRequest
from conch_tools.perf.measure.results import Load
from conch_tools.perf.measure.slices import Slice

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.mark.parametrize(
    ("number", "told"), [(signal.SIGKILL, "(killed by SIGKILL)"), (signal.SIGSTOP, "did not end after")]
)
def test_a_process_that_is_lost_is_told_of_and_the_others_count(number: signal.Signals, told: str) -> None:
    begun, ends = list[float](), list[tuple[LoadOutcome, float]]()

    def answer(number: int) -> str:
        begun.append(time.monotonic())
        return "200 OK"

    def run(grace_s: float) -> bool:
        lasted = list[float]()

        def lose(counts: Slice) -> None:
            if counts.second == 0:
                pid = active_children()[0].pid
                assert pid is not None
                os.kill(pid, number)
                lasted.append(time.monotonic() - begun[0])

        begun.clear()
        ends.append((run_load(plan, 2, lose, grace_s=grace_s), lasted[0]))
        return len(ends[-1][0].lost) == 1  # the other process has ended in time

    with http_peer(answer) as peer:
        plan = LoadPlan(
            parse_url(f"http://127.0.0.1:{peer.port}"),
            "/",
            streams=False,
            decoupled=False,
            requests=[ReadyRequest(b"{}", 2)],
            load=Load("rate", 100),
            connections=4,
            seconds=4,
        )
        given_time(run, 1.0)
    found, lasted_s = ends[-1]
    (lost,) = found.lost
    assert told in lost
    assert found.generator.lost == 1
    assert found.generator.cpu_s > 0
    assert len(found.slices) == found.length_s == 4
    assert any(each.answered for each in found.slices[1:])
    # Each process sends half of the rate, for as long as it lasts.
    assert sum(each.answered for each in found.slices) <= 50 * (4 + lasted_s) + 10


@contextmanager
def _perf(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`conch perf` in a process group of its own."""
    process = subprocess.Popen(
        [str(CONCH), "perf", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[str], number: signal.Signals) -> tuple[str, str]:
    """Sends a signal as a terminal or a supervisor does, and waits; what the process has written."""
    (os.killpg if number is signal.SIGINT else os.kill)(process.pid, number)
    output, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    return output, errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("flags", [["-c", "2,4"], ["--rate", "50,100"]], ids=["closed", "open"])
def test_a_signal_ends_a_load_with_the_figures_so_far(
    flags: Sequence[str], number: signal.Signals, tmp_path: Path
) -> None:
    copy_example(tmp_path, "simple")
    names = set(os.listdir("/dev/shm"))
    with serving(tmp_path) as server, client_of(server) as client:

        def requests() -> int:
            statistics = client.get_inference_statistics("simple").model_stats
            return sum(each.inference_stats.success.count for each in statistics)

        arguments = ["-u", f"grpc://{server.address}", "--shm", "system", "--duration", "1", "--warmup", "0"]
        with _perf("simple", *arguments, "--json", "--processes", "2", *flags) as process:
            first = eventually(requests, "the first load has begun", 2 * WAIT_S)
            eventually(lambda: requests() > first + 50, "the load goes on")
            output, _ = _end(process, number)
        assert not client.get_system_shared_memory_status().regions
    result = json.loads(output)
    assert result["interrupted"]
    assert sum(one["answered"] for one in result["points"][0]["slices"]) > 0
    assert set(os.listdir("/dev/shm")) <= names


def test_an_interrupt_ends_it_while_the_server_does_not_answer() -> None:
    asked = threading.Event()
    released = threading.Event()

    def wait(number: int) -> str:
        asked.set()
        released.wait(WAIT_S)
        return "200 OK"

    with http_peer(wait) as peer:
        try:
            with _perf("simple", "-u", f"http://127.0.0.1:{peer.port}") as process:
                assert asked.wait(2 * WAIT_S)
                output, errors = _end(process, signal.SIGINT)
        finally:
            released.set()
    assert not output
    assert errors == "conch perf: interrupted before anything was measured\n"
