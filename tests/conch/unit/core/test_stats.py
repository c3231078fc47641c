"""The counters, as Triton's statistics extension defines them."""

from __future__ import annotations

import itertools

import pytest
from tests.support.core import Answers, Execute, Instance, echo, make_request, make_spec

from conch.core.errors import UnavailableError
from conch.core.execution.executor import Executor
from conch.core.model_statistics import Duration, ModelStatistics
from conch.core.request import InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.statistics_snapshot import Gauges


def run_batch(
    statistics: ModelStatistics,
    sizes: list[int],
    execute: Execute = echo,
    ticks: tuple[int, ...] = (1_000, 1_500),
) -> Batch:
    """Runs one batch of requests received at 100, 200, ... and queued 50 later; returns it."""
    requests = [
        make_request(rows=size, batch_size=size, received_ns=100 * number, queued_ns=100 * number + 50)
        for number, size in enumerate(sizes, 1)
    ]
    clock = itertools.chain(ticks, itertools.repeat(ticks[-1])).__next__
    batch = Batch(requests, sum(sizes))
    Executor(make_spec(8), statistics, clock).run(Instance(execute), batch)
    return batch


def test_nothing_yet() -> None:
    counted = ModelStatistics().snapshot()
    assert counted.inference_count == counted.execution_count == counted.last_inference_ms == 0
    assert counted.batches == {}
    assert counted.success == counted.fail == counted.queue == Duration(0, 0)


def test_answers_of_the_cache_are_successes_and_nothing_else() -> None:
    statistics = ModelStatistics()
    run_batch(statistics, [1])
    without = statistics.snapshot()
    statistics.record_hit(7, 2, 100)
    statistics.record_hit(3, 0, 50)
    statistics.record_miss(11)
    statistics.record_miss(5, 0)
    counted = statistics.snapshot()
    assert counted.cache_hit == Duration(2, 10)
    assert counted.cache_miss == Duration(1, 16)
    assert counted.success == Duration(3, without.success.ns + 150)
    assert counted.queue == Duration(3, without.queue.ns + 2)
    assert counted.compute_infer == without.compute_infer
    assert counted.inference_count == counted.execution_count == 1
    assert counted.batches == without.batches


def test_a_batch_counts_once_and_its_rows_all() -> None:
    statistics = ModelStatistics()
    run_batch(statistics, [1, 3])
    counted = statistics.snapshot()
    assert counted.inference_count == 4
    assert counted.execution_count == 1
    assert counted.success == Duration(2, 1_400 + 1_300)
    assert counted.queue == Duration(2, 850 + 750)
    assert counted.compute_infer == Duration(2, 2 * 500)
    assert counted.compute_input == counted.compute_output == Duration(2, 0)
    assert counted.fail == Duration(0, 0)
    assert counted.last_inference_ms > 0
    assert list(counted.batches) == [4]
    assert counted.batches[4].compute_infer == Duration(1, 500)


def test_a_backend_can_say_where_its_time_went() -> None:
    def timed(batch: Batch) -> list[InferenceResponse | None]:
        batch.compute_input_end_ns = 1_100
        batch.compute_output_start_ns = 1_400
        batch.bytes_copied = 77
        return echo(batch)

    statistics = ModelStatistics()
    run_batch(statistics, [1, 1], timed)
    counted = statistics.snapshot()
    assert counted.compute_input == Duration(2, 200)
    assert counted.compute_infer == Duration(2, 600)
    assert counted.compute_output == Duration(2, 200)
    row = counted.batches[2]
    assert (row.compute_input.ns, row.compute_infer.ns, row.compute_output.ns) == (100, 300, 100)
    assert counted.bytes_copied == 77


def test_batches_are_counted_by_size() -> None:
    statistics = ModelStatistics()
    for sizes in ([4], [1, 3], [2], [2]):
        run_batch(statistics, sizes)
    counted = statistics.snapshot()
    assert {size: row.compute_infer.count for size, row in counted.batches.items()} == {2: 2, 4: 2}
    assert (counted.execution_count, counted.inference_count, counted.success.count) == (4, 12, 5)


def test_a_failed_batch_counts_as_failures_only() -> None:
    def fail(batch: Batch) -> list[InferenceResponse | None]:
        raise UnavailableError("no")

    statistics = ModelStatistics()
    run_batch(statistics, [1, 3], fail)
    counted = statistics.snapshot()
    assert counted.fail == Duration(2, 1_400 + 1_300)
    assert counted.inference_count == counted.execution_count == counted.last_inference_ms == 0
    assert counted.success.count == counted.queue.count == counted.compute_infer.count == 0
    assert counted.batches == {}


def test_a_failed_request_of_a_batch_is_no_inference() -> None:
    def first_fails(batch: Batch) -> list[InferenceResponse | None]:
        return [InferenceResponse([], UnavailableError("no")), *echo(batch)[1:]]

    statistics = ModelStatistics()
    run_batch(statistics, [1, 3], first_fails)
    counted = statistics.snapshot()
    assert counted.fail == Duration(1, 1_400)
    assert counted.success == Duration(1, 1_300)
    assert counted.inference_count == 3
    assert counted.execution_count == 1
    assert list(counted.batches) == [4], "the size that was executed"
    assert counted.queue.count == counted.compute_infer.count == 1


def test_failures_before_execution() -> None:
    statistics = ModelStatistics()
    statistics.record_failure(30)
    statistics.record_failure(12)
    counted = statistics.snapshot()
    assert counted.fail == Duration(2, 42)
    assert counted.failed_in_model == 0


def test_failures_are_told_apart() -> None:
    def fail(batch: Batch) -> list[InferenceResponse | None]:
        raise UnavailableError("no")

    statistics = ModelStatistics(lambda: Gauges(5, 7))
    run_batch(statistics, [1], fail)
    statistics.record_rejection(10, "timeout")
    statistics.record_rejection(10, "queue full")
    statistics.record_rejection(10, "timeout")
    statistics.record_cancellation(1, "queued")
    statistics.record_cancellation(1, "running")
    statistics.record_failure(1)
    counted = statistics.snapshot()
    assert counted.fail == Duration(7, 1_400 + 33)
    assert counted.failed_in_model == 1
    assert counted.rejected == {"timeout": 2, "queue full": 1}
    assert counted.cancelled == {"queued": 1, "running": 1}
    assert (counted.pending, counted.running) == (5, 7)


def test_a_client_that_has_its_answer_finds_it_counted() -> None:
    statistics = ModelStatistics()
    seen: list[int] = []
    request = make_request(lambda *_: seen.append(statistics.snapshot().success.count))
    Executor(make_spec(), statistics, lambda: 0).run(Instance(), Batch([request], 1))
    assert seen == [1]


@pytest.mark.parametrize("changed", ["success", "queue"])
def test_a_snapshot_does_not_change(changed: str) -> None:
    statistics = ModelStatistics()
    run_batch(statistics, [1])
    counted = statistics.snapshot()
    before = getattr(counted, changed)
    row = counted.batches[1].compute_infer
    run_batch(statistics, [1])
    assert getattr(counted, changed) == before
    assert counted.batches[1].compute_infer == row
    assert statistics.snapshot() != counted


def test_only_the_first_final_response_gets_through() -> None:
    answers = Answers()
    request = make_request(answers)
    request.fail(UnavailableError("no"))
    request.fail(UnavailableError("again"))
    request.respond(InferenceResponse([]))
    assert answers.finals == len(answers.calls) == 1
