"""The measured load: shares of instance time, rates, and when they are measured."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from tests.support.core import WAIT_S, Answers, LoadedModel, make_request, make_spec

from conch.core.model_version import Model
from conch.core.registry import Entry, Registry, VersionState
from conch.core.request import InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.observability.metrics.load_meter import WINDOW_NS, LoadMeter


class Now:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.ns = 5 * WINDOW_NS

    def __call__(self) -> int:
        return self.ns


class Gate:
    """Holds executions until it is let go, and then has them fail if it has an error."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.error: Exception | None = None

    def __call__(self, batch: Batch) -> list[InferenceResponse | None]:
        self.entered.release()
        assert self.go.acquire(timeout=WAIT_S)
        if self.error is not None:
            raise self.error
        return [InferenceResponse([]) for _ in batch.requests]


@pytest.fixture
def now() -> Now:
    return Now()


def serve(now: Now, execute: Callable[[Batch], list[InferenceResponse | None]]) -> tuple[Model, LoadMeter]:
    """A model with two instances, and a meter that has just begun."""
    model = Model.create(make_spec(instances=2), LoadedModel(execute), now)
    registry = Registry()
    registry.publish("m", Entry({1: model}, {1: VersionState("READY")}))
    return model, LoadMeter(registry, now)


def test_a_long_batch_counts_in_each_window_that_it_runs_in(now: Now) -> None:
    gate, answers = Gate(), Answers()
    model, meter = serve(now, gate)
    shares = []

    def measure() -> None:
        shares.append(meter.read().saturation[model.statistics.identity])

    now.ns += WINDOW_NS
    measure()
    model.submit(make_request(answers))
    assert gate.entered.acquire(timeout=WAIT_S)
    for _ in range(2):
        now.ns += WINDOW_NS
        measure()
    load = meter.read()
    assert (load.running, load.requests_per_s, load.utilization) == (1, 0.0, 0.5)
    now.ns += WINDOW_NS // 2
    assert meter.read() is load, "half a second is no window"
    gate.error = ValueError("it fails")  # which takes time all the same
    gate.go.release()
    assert answers.wait(1)
    assert model.close(WAIT_S)  # its batch is finished
    now.ns += WINDOW_NS * 3 // 2
    measure()
    now.ns += WINDOW_NS
    measure()
    assert shares == [0.0, 0.5, 0.5, 0.125, 0.0]


def test_requests_and_errors_per_second(now: Now) -> None:
    gate, answers = Gate(), Answers()
    model, meter = serve(now, gate)
    for number in range(6):
        gate.error = None if number < 4 else ValueError("it fails")
        model.submit(make_request(answers))
        gate.go.release()
        assert answers.wait(number + 1)
    now.ns += 2 * WINDOW_NS
    load = meter.read()
    assert (load.requests_per_s, load.errors_per_s) == (3.0, 1.0)
    assert model.close(WAIT_S)
