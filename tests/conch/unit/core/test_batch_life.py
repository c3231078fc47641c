"""The states of a batch, one cell of the runner's table after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tests.support.core import WAIT_S, Answers, Instance, echo, make_request, make_spec

from conch.core.backend import PENDING, BackendInstance, BatchOutcome, Done, Pending
from conch.core.execution.executor import Executor
from conch.core.execution.runner import BatchState, Runner
from conch.core.model_statistics import ModelStatistics
from conch.core.request import InferenceResponse
from conch.core.scheduling.default import DefaultScheduler
from conch.core.scheduling.scheduler import Batch

MS = 1_000_000


class Starts(BackendInstance):
    """Starts batches, which end when a test says so.

    Attributes:
        batches: All batches, in order.
        early: Called within `start`.
    """

    blocks = False

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.early: Callable[[Batch], None] = lambda batch: None
        self._done: Done

    def start(self, batch: Batch, done: Done) -> BatchOutcome | Pending:
        assert batch.state is BatchState.TAKEN
        batch.compute_input_end_ns = batch.compute_start_ns
        self.batches.append(batch)
        self._done = done
        self.early(batch)
        return PENDING

    def end(self, batch: Batch) -> None:
        """Has the outcome of a batch come on the calling thread."""
        batch.compute_output_start_ns = batch.compute_start_ns + 1
        self._done(batch, echo(batch))


def make_runner(instance: BackendInstance) -> Runner:
    executor = Executor(make_spec(), ModelStatistics(), time.monotonic_ns)
    return Runner("m", DefaultScheduler(0), [instance], executor, time.monotonic_ns)


def test_an_outcome_that_start_returns_releases_the_batch() -> None:
    batches: list[Batch] = []

    def execute(batch: Batch) -> list[InferenceResponse | None]:
        assert batch.state is BatchState.TAKEN
        batches.append(batch)
        return echo(batch)

    runner, answers = make_runner(Instance(execute)), Answers()
    assert runner.submit(make_request(answers), True)
    assert not runner.run_inline()
    assert [batch.state for batch in batches] == [BatchState.RELEASED]
    assert runner.closing.close(WAIT_S)


def test_a_later_outcome_releases_a_started_batch_and_pulls_the_next_one() -> None:
    starts, answers = Starts(), Answers()
    runner = make_runner(starts)
    for _ in range(2):
        runner.submit(make_request(answers))
    (first,) = starts.batches
    assert first.state is BatchState.STARTED
    starts.end(first)
    assert [batch.state for batch in starts.batches] == [BatchState.RELEASED, BatchState.STARTED]
    starts.end(starts.batches[1])
    starts.end(first)  # an outcome after the first one is dropped
    assert answers.finals == 2
    assert runner.closing.close(WAIT_S)


def test_a_batch_that_ends_before_its_start_returns_is_released_by_its_starter() -> None:
    starts, answers = Starts(), Answers()
    runner = make_runner(starts)
    seen: list[BatchState] = []

    def early(batch: Batch) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(starts.end, batch).result(WAIT_S)
        seen.append(batch.state)

    starts.early = early
    runner.submit(make_request(answers))
    assert (seen, answers.finals) == ([BatchState.FINISHED], 1)
    assert starts.batches[0].state is BatchState.RELEASED
    assert runner.closing.close(WAIT_S)


def test_a_claimant_starts_a_batch_and_goes_on() -> None:
    starts, answers = Starts(), Answers()
    runner = make_runner(starts)
    assert runner.submit(make_request(answers), True)
    runner.submit(make_request(answers), True)
    assert not runner.run_inline(MS)
    assert [batch.state for batch in starts.batches] == [BatchState.STARTED]
    starts.end(starts.batches[0])
    assert [batch.state for batch in starts.batches] == [BatchState.RELEASED, BatchState.STARTED]
    starts.end(starts.batches[1])
    assert answers.finals == 2
    assert runner.closing.close(WAIT_S)


def test_a_released_claim_starts_a_batch() -> None:
    starts, answers = Starts(), Answers()
    runner = make_runner(starts)
    assert runner.submit(make_request(answers), True)
    runner.release()
    assert [batch.state for batch in starts.batches] == [BatchState.STARTED]
    starts.end(starts.batches[0])
    assert answers.finals == 1
    assert runner.closing.close(WAIT_S)
