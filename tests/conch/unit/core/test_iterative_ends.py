"""Iterative requests that end while they wait for their next run, by the model, the client or the server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.async_instance import Done, make_beginning
from tests.support.core import WAIT_S, Answers, LoadedModel, Shifted, make_model, make_request, make_spec

from conch.core.errors import UnavailableError
from conch.core.execution.response_order import ResponseOrder
from conch.core.model_version import Model
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.scheduling.sequence.table import LiveSequence
from conch.core.servable import InlineClaim
from conch.core.spec import DynamicBatching, ModelSpec, SequenceBatching

HOUR = 3_600_000_000_000


def iterative(strategy: Any, decoupled: bool) -> ModelSpec:
    sequence = SequenceBatching(strategy, HOUR, max_candidates=4, iterative=True)
    return dataclasses.replace(make_spec(4, sequence=sequence), decoupled=decoupled)


class Driven:
    """A model that runs each request again until the test ends it; run by the test's own thread."""

    def __init__(self, spec: ModelSpec, again: int) -> None:
        self.again = again
        self.runs: list[InferenceRequest] = []
        self.between: Callable[[InferenceRequest], None] | None = None
        self.clock = Shifted()
        if spec.decoupled:  # whose claims are given for instances that only begin batches
            self.model, _ = make_beginning(spec, self.begin, self.clock)
        else:
            self.model = Model.create(spec, LoadedModel(self.execute), self.clock)
        self.answers = Answers()

    def begin(self, batch: Batch, done: Done) -> None:
        done(self.execute(batch))

    def execute(self, batch: Batch) -> list[InferenceResponse | None]:
        for request in batch.requests:
            self.runs.append(request)
            if len(self.runs) < self.again:
                request.rescheduled = True
            else:
                request.respond(InferenceResponse([]), True)
        return [None] * len(batch.requests)


def claim_of(model: Model, request: InferenceRequest) -> InlineClaim:
    """Submits a request that no thread of the model's own runs."""
    claim = model.submit(request, may_claim=True)
    assert claim is not None
    return claim


def submitted(driven: Driven, **changes: Any) -> tuple[InferenceRequest, InlineClaim]:
    """A request that has run once and waits to run again, and the claim that runs it."""
    request = make_request(driven.answers, 1, **changes)
    claim = claim_of(driven.model, request)
    assert claim.run_inline(0)
    assert len(driven.runs) == 1 and driven.answers.finals == 0
    return request, claim


@pytest.mark.parametrize("strategy", ["DIRECT", "OLDEST"])
def test_an_answer_that_comes_while_it_waits_is_the_last_one(strategy: str) -> None:
    driven = Driven(iterative(strategy, decoupled=True), 5)
    request, claim = submitted(driven)
    request.respond(InferenceResponse([]), True)
    claim.run_inline(0)
    assert len(driven.runs) == 1, "it runs although it has been answered"
    assert driven.answers.finals == 1
    # The model goes on.
    driven.again = 0
    claim_of(driven.model, make_request(driven.answers, 1)).run_inline(0)
    assert driven.answers.wait(2)
    assert driven.model.pending == 0
    seen = driven.model.statistics.snapshot()
    assert (seen.success.count, seen.fail.count, seen.running) == (2, 0, 0)
    driven.model.fail_queued(UnavailableError("over"))
    assert driven.model.close(WAIT_S)


@pytest.mark.parametrize("strategy", ["DIRECT", "OLDEST"])
@pytest.mark.parametrize("end", ["cancel", "fail_queued", "expire"])
@pytest.mark.parametrize("decoupled", [False, True])
def test_one_that_is_ended_while_it_waits_counts_once(strategy: str, end: str, decoupled: bool) -> None:
    driven = Driven(iterative(strategy, decoupled), 5)
    request, claim = submitted(driven, deadline_ns=driven.clock() + HOUR)
    if end == "cancel":
        assert driven.model.cancel(request)
    elif end == "fail_queued":
        assert driven.model.fail_queued(UnavailableError("over")) == 1
    else:
        driven.clock.ahead_ns += 2 * HOUR
        claim.run_inline(0)
        assert driven.answers.wait(1)
    assert driven.answers.finals == 1
    seen = driven.model.statistics.snapshot()
    assert (seen.success.count, seen.fail.count, seen.pending, seen.running) == (0, 1, 0, 0)
    driven.model.fail_queued(UnavailableError("over"))
    assert driven.model.close(WAIT_S)


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_sequence_that_rests_keeps_no_tensors_of_its_last_request(decoupled: bool) -> None:
    driven = Driven(iterative("OLDEST", decoupled), 2)
    request = make_request(driven.answers, 1, correlation_id=7, sequence_start=True)
    claim = claim_of(driven.model, request)
    while driven.answers.finals == 0:
        claim.run_inline(0)
    assert isinstance(request.sequence, LiveSequence)
    assert request.sequence.inputs is None
    driven.model.fail_queued(UnavailableError("over"))
    assert driven.model.close(WAIT_S)


def test_what_comes_after_a_last_response_does_not_hold_up_the_line() -> None:
    """Two threads may answer one request at once, and the line must not wait for ever for the later one."""
    order = ResponseOrder()
    answers = Answers()
    first, second = make_request(answers), make_request(answers)

    def meanwhile(*call: object) -> None:
        """Answers twice while a response is passed on, so that both answers are kept together."""
        place(first, InferenceResponse([]), True)
        place(first, InferenceResponse([]), False)

    before = make_request(meanwhile)
    for request in (before, first, second):
        order.enter(request)
    place = first.responder
    before.respond(InferenceResponse([]), True)
    second.respond(InferenceResponse([]), True)
    place(first, InferenceResponse([]), False)
    assert [request for request, _, final in answers.calls if final] == [first, second]


def test_a_responder_that_raises_keeps_nobody_from_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    answers = Answers()

    def raising(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        raise ValueError("no luck")

    model = make_model(make_spec(4, batching=DynamicBatching()))
    claim = claim_of(model, make_request(raising, 1))
    model.submit(make_request(answers, 1))
    assert claim.run_inline(None) is False
    assert answers.finals == 1
    assert "could not be delivered" in caplog.text
    assert model.close(WAIT_S)
