"""Requests that wait for too long, with real threads: answered once, counted, also while nothing is idle."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.support.core import WAIT_S, Answers, Shifted, echo, make_model, make_request, make_spec

from conch.core.errors import DeadlineExceededError, ResourceExhaustedError, UnavailableError
from conch.core.model_statistics import QUEUE_FULL
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.servable import ClosedError
from conch.core.spec import DynamicBatching, QueuePolicy

MS = 1_000_000


class Busy:
    """A model whose only instance is busy until it is let go, with the first request, which has no limit."""

    def __init__(self, *policies: QueuePolicy) -> None:
        self.clock = Shifted()
        self.go = threading.Event()
        self.answers = Answers()
        self._entered = threading.Event()
        batching = DynamicBatching(policies=(QueuePolicy(), *policies), default_level=2) if policies else None
        self.model = make_model(make_spec(8, batching=batching), self._execute, False, self.clock)
        self.first = self.submit(priority=1)
        assert self._entered.wait(WAIT_S)

    def _execute(self, batch: Batch) -> list[InferenceResponse | None]:
        self._entered.set()
        assert self.go.wait(WAIT_S)
        return echo(batch)

    def submit(self, **settings: Any) -> InferenceRequest:
        request = make_request(self.answers, 1, **settings)
        request.received_ns = self.clock()
        self.model.submit(request)
        return request

    def finish(self) -> None:
        self.go.set()
        assert self.model.close(WAIT_S)
        assert all(self.answers.finals_of(request) == 1 for request, _, _ in self.answers.calls)


def timeout_threads() -> int:
    return sum(thread.name.endswith("-timeouts") for thread in threading.enumerate())


def test_a_timeout_is_answered_while_the_only_instance_is_busy() -> None:
    busy = Busy(QueuePolicy(timeout_ns=20 * MS))
    late = busy.submit(id="x")
    assert busy.answers.wait(1)
    error = busy.answers.response(late).error
    assert isinstance(error, UnavailableError)
    assert error.message == "Request timeout expired"
    assert busy.model.statistics.snapshot().fail.count == 1
    assert busy.model.pending == 0
    assert not busy.model.cancel(late), "it has been answered"
    busy.finish()
    assert busy.answers.response(busy.first).error is None
    assert timeout_threads() == 0


def test_a_passed_deadline_is_answered_while_the_only_instance_is_busy() -> None:
    busy = Busy()
    now = time.monotonic_ns()
    distant = busy.submit(deadline_ns=now + 3_600_000 * MS)
    near = busy.submit(deadline_ns=now + 20 * MS)
    passed = busy.submit(deadline_ns=now - MS)
    assert busy.answers.wait(2)
    for request in (near, passed):
        error = busy.answers.response(request).error
        assert isinstance(error, DeadlineExceededError)
        assert error.message == "Deadline Exceeded"
    assert busy.answers.finals_of(distant) == 0
    busy.finish()
    assert busy.answers.response(distant).error is None
    assert busy.model.statistics.snapshot().fail.count == 2


def test_a_delayed_request_runs_in_the_end() -> None:
    busy = Busy(QueuePolicy(delays=True, timeout_ns=MS))
    late = busy.submit()
    busy.clock.ahead_ns += 10 * MS
    assert busy.answers.finals_of(late) == 0
    busy.finish()
    assert busy.answers.response(late).error is None


def test_what_has_expired_is_not_run_by_an_instance_that_comes_first() -> None:
    """With the claimant alone looking: the request is late before the instance asks."""
    model = make_model(make_spec(8))
    answers = Answers()
    late = make_request(answers, 1, deadline_ns=time.monotonic_ns() - 1)
    runner = model.submit(late, may_claim=True)
    assert runner is not None
    runner.run_inline()
    assert answers.wait(1)
    assert isinstance(answers.response(late).error, DeadlineExceededError)
    assert model.statistics.snapshot().execution_count == 0
    assert model.close(WAIT_S)


def test_close_waits_for_the_answers_to_what_expired() -> None:
    entered, go = threading.Event(), threading.Event()
    answered: list[InferenceRequest] = []

    def slow(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        entered.set()
        assert go.wait(WAIT_S)
        answered.append(request)

    model = make_model(make_spec(8))
    late = make_request(slow, 1, deadline_ns=time.monotonic_ns() - 1)
    runner = model.submit(late, may_claim=True)
    assert runner is not None
    runner.run_inline()
    assert entered.wait(WAIT_S)
    assert not model.close(0.01)
    go.set()
    assert model.close(WAIT_S)
    assert answered == [late]


def test_timeouts_beyond_what_the_platform_can_wait_for() -> None:
    busy = Busy(QueuePolicy(timeout_ns=(2**64 - 1) * 1000))
    waits = busy.submit()
    busy.finish()
    assert busy.answers.response(waits).error is None


def test_a_request_without_a_limit_starts_no_thread() -> None:
    busy = Busy()
    busy.submit()
    assert timeout_threads() == 0
    busy.finish()


def test_a_full_queue_counts_nothing_and_keeps_nothing() -> None:
    busy = Busy(QueuePolicy(max_size=1))
    busy.submit()
    with pytest.raises(UnavailableError, match="Exceeds maximum queue size"):
        busy.submit()
    assert busy.model.pending == 1
    busy.finish()
    assert busy.answers.finals == 2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("close_early", [False, True])
def test_everything_is_answered_once_whatever_ends_its_wait(seed: int, close_early: bool) -> None:
    policies = (
        QueuePolicy(timeout_ns=MS, allow_override=True),
        QueuePolicy(True, MS // 2),
        QueuePolicy(max_size=5),
    )
    spec = make_spec(4, batching=DynamicBatching((2,), MS // 4, policies, 2), instances=2)

    def execute(batch: Batch) -> list[InferenceResponse | None]:
        time.sleep(0.0005)
        return echo(batch)

    model = make_model(spec, execute)
    answers = Answers()
    accepted: list[InferenceRequest] = []

    def client(number: int) -> None:
        choose = random.Random(seed * 10 + number)
        for _ in range(60):
            now = time.monotonic_ns()
            request = make_request(
                answers,
                choose.choice((1, 2)),
                priority=choose.randrange(4),
                timeout_us=choose.choice((0, 100)),
                deadline_ns=choose.choice((None, now, now + MS, now + 1000 * MS)),
            )
            try:
                runner = model.submit(request, choose.random() < 0.5)
            except (UnavailableError, ResourceExhaustedError):
                continue
            except ClosedError:
                return
            accepted.append(request)
            if runner is not None:
                while runner.run_inline(choose.choice((None, 0))):
                    pass
            if choose.random() < 0.2:
                model.cancel(request)

    with ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(client, number) for number in range(3)]
        if close_early:
            assert model.close(WAIT_S)
        for future in clients:
            future.result(WAIT_S)
    assert answers.wait(len(accepted)), f"{len(accepted) - answers.finals} requests wait for ever"
    assert model.close(WAIT_S)
    assert sorted(id(request) for request, _, _ in answers.calls) == sorted(map(id, accepted))
    seen = model.statistics.snapshot()
    refused = seen.rejected.get(QUEUE_FULL, 0)
    assert seen.success.count + seen.fail.count - refused == len(accepted)
    assert timeout_threads() == 0
