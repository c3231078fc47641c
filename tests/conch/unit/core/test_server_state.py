"""The front ends' door: swaps that no request notices, liveness and readiness, cancelling."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
from tests.support.core import WAIT_S, Answers, make_model, make_request, make_spec

from conch.core.errors import InvalidArgumentError, NotFoundError, UnavailableError
from conch.core.model_control import IndexEntry, LoadParameter
from conch.core.registry import Entry, Registry
from conch.core.scheduling.scheduler import Batch
from conch.core.servable import ClosedError, Servable
from conch.core.server_state import ServerState


class NoAgent:
    """A control plane without callers."""

    def index(self, ready_only: bool) -> list[IndexEntry]:
        raise AssertionError

    def load(self, name: str, parameters: Mapping[str, LoadParameter], may_upload: bool = True) -> None:
        raise AssertionError

    def unload(self, name: str, unload_dependents: bool) -> None:
        raise AssertionError

    def set_label(self, name: str, label: str, version: int | None) -> None:
        raise AssertionError


class Readiness:
    """Says whether models are ready, for the server or as the check of one."""

    def __init__(self) -> None:
        self.ready = True

    def __call__(self) -> bool:
        return self.ready

    def start(self) -> None:
        pass

    def result(self) -> bool:
        return self.ready


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def readiness() -> Readiness:
    return Readiness()


@pytest.fixture
def core(registry: Registry, readiness: Readiness) -> ServerState:
    return ServerState(registry, NoAgent(), "id", "1.0", readiness)


def test_no_request_notices_a_swap(core: ServerState, registry: Registry) -> None:
    model = make_model(make_spec(version=1, instances=2))
    registry.publish("m", Entry({1: model}))
    stop = threading.Event()
    served = threading.Semaphore(0)

    def client(number: int) -> None:
        while not stop.is_set():
            answers = Answers()
            request = make_request(answers)
            runner = core.admission("test").admit(request, may_claim=number != 0)
            if runner is not None:
                if number == 1:
                    runner.run_inline()
                else:
                    runner.release()
            assert answers.wait(1)
            assert len(answers.calls) == 1
            assert answers.response(request).error is None
            served.release()

    with ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(client, number) for number in range(3)]
        try:
            for version in range(2, 40):
                assert served.acquire(timeout=WAIT_S), "no traffic"
                successor = make_model(make_spec(version=version, instances=2))
                registry.publish("m", Entry({version: successor}))
                assert model.close(WAIT_S)
                model = successor
        finally:
            stop.set()
        for future in clients:
            future.result(WAIT_S)
    assert model.close(WAIT_S)


def test_a_model_that_closed_after_it_was_looked_up_is_looked_up_again(
    core: ServerState, registry: Registry
) -> None:
    old, new = make_model(make_spec(version=1)), make_model(make_spec(version=2))
    registry.publish("m", Entry({2: new}))
    assert old.close()
    answers = Answers()
    request = make_request(answers)
    runner = core.admission("test").admit(request, may_claim=True, model=old)
    assert runner is not None
    assert not runner.run_inline()
    assert answers.response(request).error is None
    assert request.model is new
    assert new.close()


def test_a_model_that_is_gone_is_not_found(core: ServerState, registry: Registry) -> None:
    old = make_model(make_spec())
    assert old.close()
    with pytest.raises(NotFoundError):
        core.admission("test").admit(make_request(), model=old)
    with pytest.raises(ClosedError):
        old.submit(make_request())


def test_a_request_that_does_not_fit_is_refused(core: ServerState, registry: Registry) -> None:
    model = make_model(make_spec(4))
    registry.publish("m", Entry({1: model}))
    with pytest.raises(InvalidArgumentError):
        core.admission("test").admit(make_request(rows=9))
    assert core.model("m", "1") is model
    assert model.close()


def test_cancelling_before_and_after_submission(core: ServerState, registry: Registry) -> None:
    early = make_request()
    core.admission("test").cancel(early)
    assert early.cancelled
    gate = threading.Event()
    entered = threading.Event()

    def wait(batch: Batch) -> None:
        entered.set()
        assert gate.wait(WAIT_S)
        for request in batch.requests:
            request.respond(None, True)

    model = make_model(make_spec(decoupled=True), wait)
    registry.publish("m", Entry({1: model}))
    answers = Answers()
    running, queued = make_request(answers), make_request(answers)
    core.admission("test").admit(running)
    assert entered.wait(WAIT_S)
    core.admission("test").admit(queued)
    core.admission("test").cancel(queued)
    assert answers.finals_of(queued) == 1
    gate.set()
    assert model.close()


def test_live_and_ready(core: ServerState, readiness: Readiness) -> None:
    assert (core.live, core.ready) == (True, False)
    core.started()
    assert (core.live, core.ready) == (True, True)
    readiness.ready = False
    assert (core.live, core.ready) == (True, False)


class Watched:
    """Stands in for a model, and counts how often its readiness is looked at."""

    def __init__(self, *checks: Readiness, workers: int = 0) -> None:
        self.spec = make_spec()
        self.workers = ["serving"] * workers
        self.checks = checks
        self.looks = 0

    @property
    def readiness(self) -> tuple[Readiness, ...]:
        self.looks += 1
        return self.checks


def test_a_check_looks_only_at_models_that_have_checks(core: ServerState, registry: Registry) -> None:
    plain, asked, worker = Watched(), Watched(Readiness()), Watched(workers=1)
    for name, model in {"plain": plain, "asked": asked, "worker": worker}.items():
        registry.publish(name, Entry({1: cast(Servable, model)}))
    core.started()
    before = plain.looks
    seen = [(core.ready, any(core.readiness()))]
    worker.checks = (Readiness(),)  # its worker has been lost
    worker.checks[0].ready = False
    seen.append((core.ready, any(core.readiness())))
    registry.publish("worker", Entry())
    seen.append((core.ready, any(core.readiness())))
    registry.remove("asked")
    seen.append((core.ready, any(core.readiness())))
    assert seen == [(True, True), (False, True), (True, True), (True, False)]
    assert plain.looks == before


def test_a_stopping_server_says_so(core: ServerState) -> None:
    core.started()
    core.stopping()
    for ask in (lambda: core.live, lambda: core.ready, core.check_running):
        with pytest.raises(UnavailableError) as caught:
            ask()
        assert caught.value.message == "Server exiting"
