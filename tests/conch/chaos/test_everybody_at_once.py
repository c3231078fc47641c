"""Clients, operators and a planner that load and unload one model at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.loading import answer, load, write_number
from tests.support.servers import WAIT_S, RawClient, ServerProcess, eventually, serving_process
from tritonclient.grpc import service_pb2

from conch.core.errors import ConchError
from conch_control.remote_api.client import ModelControlClient
from conch_control.remote_api.connection_options import ConnectionOptions
from conch_control.version_phase import Phase

OUTDATED = "Newer operation has been applied to the model lifecycle, current load operation is out-dated."
ASKED = "model 'm' is new or has changed: loading it"
FOLLOW = ["--repository-poll-secs=0.1", "--repository-settle-secs=0.05"]


@dataclass
class Place:
    """A server with models `m`, which all clients load and unload, and `other`, which stays."""

    repository: Path
    server: ServerProcess
    client: RawClient
    operator: ModelControlClient
    planners_log: Path | None = None

    def publish(self, number: int) -> None:
        """Has the model's files say another number, all at once."""
        aside = write_number(self.repository.parent / "aside", "m", number) / "1" / "model.py"
        os.replace(aside, self.repository / "m" / "1" / "model.py")

    def planned(self) -> int:
        """Number of loads of `m` that the planner has asked for."""
        return self._log().count(ASKED)

    def rests(self) -> bool:
        """True if the planner's last load of `m` has ended well."""
        log = self._log()
        return log.rfind("reloaded 'm' in") > log.rfind(ASKED)

    def _log(self) -> str:
        return self.server.errors if self.planners_log is None else self.planners_log.read_text()

    def phases(self, name: str) -> list[Phase]:
        """The phases of a model's versions."""
        return [
            version.phase
            for model in self.operator.models().models
            if model.name == name
            for version in model.versions
        ]


@contextmanager
def planner_process(target: str, repository: Path, log: Path) -> Iterator[None]:
    """`conch control`."""
    command = [str(Path(sys.executable).with_name("conch")), "control", f"--target={target}"]
    command += [f"--model-repository={repository}", "--model-control-mode=poll", *FOLLOW]
    with log.open("w") as output:
        running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            yield
            running.terminate()
            assert running.wait(WAIT_S) == 0
        finally:
            running.kill()
            running.wait()


@pytest.fixture(params=["in process", "of its own"])
def place(request: pytest.FixtureRequest, tmp_path: Path, grpc_is_warm: None) -> Iterator[Place]:
    """With a planner in the server's process or in its own; clients may load in the latter case only."""
    repository = tmp_path / "models"
    for name in ("m", "other"):
        write_number(repository, name, 1)
    target = f"unix:{tmp_path}/control"
    own = request.param == "of its own"
    flags = ["--model-control-mode=explicit", "--load-model=*"] if own else ["--model-control-mode=poll"]
    with ExitStack() as stack:
        flags += [f"--control-address={target}", *([] if own else FOLLOW)]
        server = stack.enter_context(serving_process(repository, flags=flags))
        client = stack.enter_context(closing(RawClient(server.address)))
        options = ConnectionOptions(target, None, None)
        operator = stack.enter_context(closing(ModelControlClient(options, WAIT_S)))
        made = Place(repository, server, client, operator)
        if own:
            made.planners_log = tmp_path / "planner"
            stack.enter_context(planner_process(target, repository, made.planners_log))
            eventually(lambda: made.planned() == 1, "it asks for what it does not know to be loaded")
        yield made


@contextmanager
def asking_the_other(place: Place) -> Iterator[None]:
    """Requests to the model that stays, of which none may fail."""
    stop = threading.Event()
    answers: list[object] = []

    def ask() -> None:
        with closing(RawClient(place.server.address)) as client:
            while not stop.is_set():
                answers.append(answer(client, "other"))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(WAIT_S)
    assert set(answers) == {1.0}


def at_once(calls: Sequence[Callable[[], object]], pool: ThreadPoolExecutor) -> list[object]:
    """Makes calls that all begin at the same time; what they return."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> object:
        barrier.wait(WAIT_S)
        return call()

    return [future.result(WAIT_S) for future in [pool.submit(run, call) for call in calls]]


def of_operator(call: Callable[[], None]) -> object:
    """Error that a client would get from an operator's call; empty for none."""
    try:
        call()
    except ConchError as error:
        return error.code, error.message
    return {}


@pytest.mark.parametrize("editions", [pytest.param(20), pytest.param(150, marks=pytest.mark.slow)])
def test_loads_and_unloads_of_one_model(place: Place, editions: int) -> None:
    """Each call is answered, with an error only if a later one has overtaken it, and all agree in the end."""

    def load_it() -> object:
        return of_operator(lambda: place.operator.load("m", {}))

    def unload_it() -> object:
        return of_operator(lambda: place.operator.unload("m", False))

    def clients_load() -> object:
        return load(place.client, "m") if place.planners_log else load_it()

    begun = place.planned()
    answers: list[object] = []
    with asking_the_other(place), ThreadPoolExecutor(3) as pool:
        for number in range(2, editions):
            place.publish(number)
            while place.planned() < begun + number - 1:
                answers += at_once([load_it, clients_load, unload_it], pool)
        asked = place.planned()
        place.publish(editions)
        # The files have changed last, so the planner has the last word.
        eventually(lambda: place.planned() > asked and place.rests(), "the planner loads the newest")
        assert answer(place.client, "m") == float(editions)
        assert place.phases("m") == [Phase.READY]
        place.operator.unload("m", False)
        eventually(lambda: place.phases("m") == [Phase.UNLOADED], "it is unloaded")
        assert answer(place.client, "m")[0] in ("NOT_FOUND", "UNAVAILABLE")
        request = service_pb2.RepositoryIndexRequest()
        index = {line.name: line.state for line in place.client("RepositoryIndex", request).models}
        assert index == {"m": "UNAVAILABLE", "other": "READY"}
    assert {} in answers
    assert [each for each in answers if each not in ({}, ("UNAVAILABLE", OUTDATED))] == []
