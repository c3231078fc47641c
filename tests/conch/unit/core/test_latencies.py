"""Distribution of the times of requests, counted beside the statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st
from tests.support.core import make_request

from conch.core.latencies import PLACES
from conch.core.model_statistics import ModelStatistics, RequestEnd, StatisticsSnapshot
from conch.core.scheduling.scheduler import Batch

TIMES = st.integers(0, 2**40)


def run(statistics: ModelStatistics, waits: Sequence[int], failing: Sequence[bool] = ()) -> None:
    """Counts a batch of requests that were received 10 ns before they waited so long."""
    start = 2**41
    requests = [
        make_request(batch_size=1, received_ns=start - wait - 10, queued_ns=start - wait) for wait in waits
    ]
    batch = Batch(requests, len(requests))
    batch.compute_start_ns = start
    batch.compute_input_end_ns = start + 5
    batch.compute_output_start_ns = start + 105
    batch.compute_end_ns = start + 1105
    failed = {index for index, fails in enumerate(failing) if fails}
    ends = [RequestEnd.FAILED if each in failed else RequestEnd.SUCCEEDED for each in range(len(requests))]
    statistics.record_batch(batch, ends)


def place(ns: int) -> int:
    return next(place for place in range(PLACES) if ns < 2**place)


def totals(counted: StatisticsSnapshot) -> list[int]:
    assert counted.latencies is not None
    each = counted.latencies
    found = (each.request, each.queue, each.compute_input, each.compute_infer, each.compute_output)
    return [sum(places) for places in found]


def test_nothing_is_kept_unless_somebody_wants_it() -> None:
    statistics = ModelStatistics()
    run(statistics, [1, 2])
    assert statistics.snapshot().latencies is None
    statistics.keep_latencies()
    run(statistics, [1])
    assert totals(statistics.snapshot()) == [1] * 5


@given(st.lists(st.tuples(TIMES, st.booleans()), min_size=1, max_size=8))
def test_every_request_that_succeeds_is_in_its_place(requests: list[tuple[int, bool]]) -> None:
    statistics = ModelStatistics()
    statistics.keep_latencies()
    run(statistics, [wait for wait, _ in requests], [fails for _, fails in requests])
    counted = statistics.snapshot()
    good = [wait for wait, fails in requests if not fails]
    assert counted.success.count == len(good)
    assert counted.success.ns == sum(wait + 10 + 1105 for wait in good)
    assert counted.fail.ns == sum(wait + 10 + 1105 for wait, fails in requests if fails)
    assert counted.queue.ns == sum(good)
    assert totals(counted) == [len(good)] * 5
    assert counted.latencies is not None
    for wait in good:
        assert counted.latencies.queue[place(wait)] == sum(place(each) == place(wait) for each in good)
        assert counted.latencies.request[place(wait + 1115)] > 0
    assert counted.latencies.compute_infer[place(100)] == len(good)
    assert counted.latencies.compute_output[place(1000)] == len(good)


def test_hits_of_the_cache_have_a_request_and_a_queue_time_only() -> None:
    statistics = ModelStatistics()
    statistics.keep_latencies()
    statistics.record_hit(5, 7, 100)
    counted = statistics.snapshot()
    assert totals(counted) == [1, 1, 0, 0, 0]
    assert counted.latencies is not None
    assert counted.latencies.request[place(100)] == counted.latencies.queue[place(7)] == 1


def test_a_request_that_runs_again_counts_when_it_is_done() -> None:
    statistics = ModelStatistics()
    statistics.keep_latencies()
    request = make_request(received_ns=0, queued_ns=0)
    batch = Batch([request], 1)
    batch.compute_start_ns, batch.compute_input_end_ns, batch.compute_end_ns = 10, 20, 50
    statistics.record_batch(batch, [RequestEnd.RUNS_AGAIN])
    counted = statistics.snapshot()
    assert totals(counted) == [0] * 5
    assert (counted.success.count, counted.inference_count, counted.queue.ns) == (0, 0, 10)
    statistics.record_request(request, RequestEnd.SUCCEEDED, (10, 20, 50))
    counted = statistics.snapshot()
    assert totals(counted) == [1] * 5
    assert (counted.success.count, counted.queue.ns, counted.compute_infer.ns) == (1, 20, 60)


def test_whatever_is_counted_changes_the_mark() -> None:
    statistics = ModelStatistics()
    marks = [statistics.mark]
    counts: tuple[Callable[[], object], ...] = (
        lambda: run(statistics, [1]),
        lambda: run(statistics, [1], [True]),
        lambda: statistics.record_hit(0, 0, 0),
        lambda: statistics.record_miss(0),
        lambda: statistics.record_miss(5, 0),
        lambda: statistics.record_failure(0),
        lambda: statistics.record_rejection(0, "timeout"),
        lambda: statistics.record_cancellation(0, "queued"),
        lambda: statistics.record_request(make_request(), RequestEnd.SUCCEEDED, (0, 0, 0)),
        lambda: statistics.record_execution(Batch([], 1), 0),
    )
    for count in counts:
        count()
        assert statistics.mark not in marks
        marks.append(statistics.mark)
    assert statistics.mark == marks[-1]


@given(st.lists(TIMES, min_size=1, max_size=8))
def test_first_responses_are_counted_once_a_request(waits: list[int]) -> None:
    statistics = ModelStatistics()
    assert statistics.snapshot().first_responses is None
    statistics.keep_first_responses([1, 1000], decoupled=False)
    mark = statistics.mark
    run(statistics, waits)
    statistics.record_hit(1, 1, 500)
    assert statistics.mark != mark
    found = statistics.snapshot().first_responses
    assert found is not None
    times = [(wait + 1115) // 10**6 for wait in waits] + [0]  # whole milliseconds, as Triton observes them
    assert list(found.counts) == [*(sum(ms <= bound for ms in times) for bound in (1, 1000)), len(times)]
    assert found.ms == sum(times)


def test_the_first_response_of_a_decoupled_model_is_not_counted_again_with_its_last() -> None:
    statistics = ModelStatistics()
    statistics.keep_first_responses([1, 1000], decoupled=True)
    mark = statistics.mark
    statistics.record_first_response(2_999_999)
    assert statistics.mark != mark
    request = make_request(received_ns=0, queued_ns=0)
    statistics.record_request(request, RequestEnd.SUCCEEDED, (0, 1, 5_000_000_000))
    found = statistics.snapshot().first_responses
    assert found is not None
    assert (list(found.counts), found.ms) == ([0, 1, 1], 2)
