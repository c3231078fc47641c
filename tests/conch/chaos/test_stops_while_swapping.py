"""Servers that are asked to stop while a model is being swapped under load: no accepted request fails."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.draining import Load
from tests.support.loading import load as load_model
from tests.support.servers import RawClient, ServerProcess, eventually, serving_process
from tests.support.steered import Steering
from tests.support.waiting import given_time

MODES = {
    "explicit": ["--load-model=m"],
    "poll": ["--repository-poll-secs=0.1", "--repository-settle-secs=0.05"],
    "watch": ["--repository-settle-secs=0.05"],
}
IN_EACH_MODE = pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=() if mode == "poll" else pytest.mark.slow) for mode in MODES]
)
DELAY_S = 3.0


@dataclass
class Place:
    """A repository with model `m`, of which versions come."""

    path: Path
    steering: Steering

    def publish(self, version: int) -> None:
        """Adds a version, all at once."""
        aside = self.steering.write(self.path / "aside", "m", version)
        (self.path / "models" / "m").mkdir(exist_ok=True, parents=True)
        os.rename(aside / str(version), self.path / "models" / "m" / str(version))
        if not (config := self.path / "models" / "m" / "config.pbtxt").exists():
            config.write_bytes((aside / "config.pbtxt").read_bytes())

    @contextmanager
    def serving(self, mode: str, *more: str) -> Iterator[ServerProcess]:
        """A server of it."""
        flags = [f"--model-control-mode={mode}", *MODES[mode], *more]
        with serving_process(self.path / "models", flags=flags) as server:
            yield server


def place_at(path: Path) -> Place:
    """A place with version 1."""
    (path / "steering").mkdir(parents=True)
    made = Place(path, Steering(path / "steering"))
    made.publish(1)
    return made


@pytest.fixture
def place(tmp_path: Path, grpc_is_warm: None) -> Place:
    return place_at(tmp_path)


def ask_for_load(address: str) -> object:
    """Loads the model as clients do; what came of it."""
    with closing(RawClient(address)) as client:
        return load_model(client, "m")


@IN_EACH_MODE
@pytest.mark.parametrize("moment", ["load", "warm-up"])
def test_the_next_version_is_under_way(place: Place, mode: str, moment: str) -> None:
    with place.serving(mode) as server, ThreadPoolExecutor(1) as pool:
        load = Load(server.address, "m", polite=False)
        eventually(lambda: load.completed > 50, "there is load")
        place.steering.hold(moment, 2)
        place.publish(2)
        swap = pool.submit(ask_for_load, server.address) if mode == "explicit" else None
        place.steering.wait_held(moment, 2)
        server.signal(signal.SIGTERM)
        eventually(lambda: "Waiting for in-flight requests" in server.errors, "it stops")
        place.steering.let_go()
        assert server.wait() == 0
        load.enough.set()
        load.join()
        if swap is not None:
            assert swap.result() in ({}, ("UNAVAILABLE", "Server exiting"))
    assert {code for code, _ in load.failures} <= {"UNAVAILABLE"}, load.failures
    assert place.steering.ran() == load.completed, f"what was run was answered: {load.failures}"


@IN_EACH_MODE
def test_the_version_before_still_answers(place: Place, mode: str) -> None:
    """It has requests of unary calls and of streams in it; the new one has others."""
    with place.serving(mode) as server, ThreadPoolExecutor(1) as pool:
        old = Load(server.address, "m", polite=False)
        eventually(lambda: old.completed > 50, "there is load")
        place.steering.hold("run", 1)
        place.steering.wait_held("run", 1)
        place.publish(2)
        swap = pool.submit(ask_for_load, server.address) if mode == "explicit" else None
        eventually(lambda: server.errors.count("successfully loaded 'm'") == 2, "it is swapped")
        new = Load(server.address, "m", polite=False)
        eventually(lambda: new.completed > 50, "the new one answers")
        server.signal(signal.SIGTERM)
        eventually(lambda: "Waiting for in-flight requests" in server.errors, "it stops")
        place.steering.let_go()
        assert server.wait() == 0
        for load in (old, new):
            load.enough.set()
            load.join()
            assert {code for code, _ in load.failures} <= {"UNAVAILABLE"}, load.failures
        assert swap is None or swap.result() == {}
    assert place.steering.ran() == old.completed + new.completed, "what was run was answered"


@IN_EACH_MODE
def test_swaps_go_on_during_the_drain_delay(tmp_path: Path, grpc_is_warm: None, mode: str) -> None:
    """Clients that stop when readiness goes off lose no request, though the model is swapped all the time."""
    given_time(lambda delay_s: swaps_go_on(place_at(tmp_path / f"{delay_s:g}"), mode, delay_s), DELAY_S)


def swaps_go_on(place: Place, mode: str, delay_s: float) -> bool:
    """Swaps a model of a server that drains; False if the delay was over before that was seen."""
    enough = threading.Event()

    def swap(server: ServerProcess) -> None:
        for version in itertools.count(2):
            if enough.wait(0.1):
                return
            place.publish(version)
            if mode == "explicit":
                said = ask_for_load(server.address)
                assert said == {} or server.process.poll() is not None or enough.is_set(), said

    with place.serving(mode, f"--drain-delay={delay_s:g}") as server, ThreadPoolExecutor(1) as pool:
        load = Load(server.address, "m", polite=True)
        swapping = pool.submit(swap, server)
        try:
            eventually(lambda: load.completed > 50, "there is load")
            eventually(lambda: swaps(server) > 3, "it is swapped under load")
            before, ends = swaps(server), time.monotonic() + delay_s
            server.signal(signal.SIGTERM)
            load.join()
            stopped = server.process.poll() is not None
            eventually(
                lambda: swaps(server) > before + 2 or time.monotonic() > ends, "it is swapped while it drains"
            )
            in_time = time.monotonic() < ends
            assert not (in_time and stopped), "they stopped before the server did"
        finally:
            enough.set()
        assert server.wait() == 0
        swapping.result()
    assert not (in_time and load.failures), load.failures
    assert place.steering.ran() == load.completed
    return in_time


def swaps(server: ServerProcess) -> int:
    return server.errors.count("successfully loaded 'm'")
