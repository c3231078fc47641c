"""Iterative requests that end while they wait for their next run, whoever ends them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.core import WAIT_S, Answers, make_model, make_request, make_spec

from conch.core.errors import UnavailableError
from conch.core.execution.response_order import ResponseOrder
from conch.core.model_version import Model
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.scheduling.sequence.table import LiveSequence
from conch.core.servable import InlineClaim
from conch.core.spec import DynamicBatching, ModelSpec, SequenceBatching

HOUR = 3_600_000_000_000


def iterative(strategy: Any, decoupled: bool = True) -> ModelSpec:
    sequence = SequenceBatching(strategy, HOUR, max_candidates=4, iterative=True)
    return dataclasses.replace(make_spec(4, sequence=sequence), decoupled=decoupled)


class Driven:
    """A model that runs each request again until it is told to end it; run by the test's own thread."""

    def __init__(self, spec: ModelSpec, again: int) -> None:
        self.again = again
        self.runs: list[InferenceRequest] = []
        self.between: Callable[[InferenceRequest], None] | None = None
        self.model = make_model(spec, self.execute)
        self.answers = Answers()

    def execute(self, batch: Batch) -> list[InferenceResponse | None]:
        for request in batch.requests:
            self.runs.append(request)
            if len(self.runs) < self.again:
                request.rescheduled = True
            else:
                request.respond(InferenceResponse([]), True)
        return [None] * len(batch.requests)


def run_once(model: Model) -> None:
    """Runs what is ready, once."""
    runner: InlineClaim = model._runner
    runner.run_inline(0)


def submitted(driven: Driven) -> InferenceRequest:
    """A request that has run once and waits to run again."""
    request = make_request(driven.answers, 1)
    driven.model._runner._claimed = True  # so that no thread of its own runs it
    driven.model.submit(request)
    run_once(driven.model)
    assert len(driven.runs) == 1 and driven.answers.finals == 0
    return request


@pytest.mark.parametrize("strategy", ["DIRECT", "OLDEST"])
def test_an_answer_that_comes_while_it_waits_is_the_last_one(strategy: str) -> None:
    driven = Driven(iterative(strategy), 5)
    request = submitted(driven)
    request.respond(InferenceResponse([]), True)
    run_once(driven.model)
    assert len(driven.runs) == 1, "it runs although it has been answered"
    assert driven.answers.finals == 1
    # The model goes on.
    driven.again = 0
    driven.model.submit(make_request(driven.answers, 1))
    run_once(driven.model)
    assert driven.answers.wait(2)
    assert driven.model.pending == 0
    seen = driven.model.statistics.snapshot()
    assert (seen.success.count, seen.fail.count, seen.running) == (2, 0, 0)
    driven.model.fail_queued(UnavailableError("over"))
    assert driven.model.close(WAIT_S)


@pytest.mark.parametrize("strategy", ["DIRECT", "OLDEST"])
@pytest.mark.parametrize("end", ["cancel", "fail_queued", "expire"])
def test_one_that_is_ended_while_it_waits_counts_once(strategy: str, end: str) -> None:
    driven = Driven(iterative(strategy), 5)
    request = submitted(driven)
    if end == "cancel":
        assert driven.model.cancel(request)
    elif end == "fail_queued":
        assert driven.model.fail_queued(UnavailableError("over")) == 1
    else:
        (taken,) = driven.model._runner.cancel(request)
        driven.model._executor.expire(taken, "over")
    assert driven.answers.finals == 1
    seen = driven.model.statistics.snapshot()
    assert (seen.success.count, seen.fail.count, seen.pending, seen.running) == (0, 1, 0, 0)
    driven.model.fail_queued(UnavailableError("over"))
    assert driven.model.close(WAIT_S)


def test_a_sequence_that_rests_keeps_no_tensors_of_its_last_request() -> None:
    driven = Driven(iterative("OLDEST"), 2)
    request = make_request(driven.answers, 1, correlation_id=7, sequence_start=True)
    driven.model._runner._claimed = True
    driven.model.submit(request)
    while driven.answers.finals == 0:
        run_once(driven.model)
    assert isinstance(request.sequence, LiveSequence)
    assert request.sequence.inputs is None
    driven.model.fail_queued(UnavailableError("over"))
    assert driven.model.close(WAIT_S)


def test_what_comes_after_a_last_response_does_not_hold_up_the_line() -> None:
    """Two threads may answer one request at once, and the line must not wait for ever for the later one."""
    order = ResponseOrder()
    answers = Answers()
    queue: list[InferenceRequest] = []
    submit = order.around(lambda request, now_ns: queue.append(request))
    first, second = make_request(answers), make_request(answers)
    for request in (first, second):
        submit(request, 0)
    place = first.responder
    # Kept together, as they are when another thread passes things on.
    order._forwarding = True
    place(first, InferenceResponse([]), True)
    place(first, InferenceResponse([]), False)
    order._forwarding = False
    second.respond(InferenceResponse([]), True)
    place(first, InferenceResponse([]), False)
    assert [request for request, _, final in answers.calls if final] == [first, second]


def test_a_responder_that_raises_keeps_nobody_from_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    answers = Answers()

    def raising(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        raise ValueError("no luck")

    model = make_model(make_spec(4, batching=DynamicBatching()))
    model._runner._claimed = True
    model.submit(make_request(raising, 1))
    model.submit(make_request(answers, 1))
    assert model._runner.run_inline(None) is False
    assert answers.finals == 1
    assert "could not be handed over" in caplog.text
    assert model.close(WAIT_S)
