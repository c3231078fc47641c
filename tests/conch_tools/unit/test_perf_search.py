"""The search for the highest rate, and the comparison of runs."""

from __future__ import annotations

import numpy as np
import pytest

from conch_tools.perf.measure.comparison import compare
from conch_tools.perf.measure.histogram import Histogram
from conch_tools.perf.measure.results import Generator, Load, PerfResult, Point
from conch_tools.perf.measure.slices import Slice
from conch_tools.perf.measure.slo_search import Limit, RateSearch, judge_points

MS = 1_000_000


def _point(rate: float, latency_ms: float, seed: int = 1) -> Point:
    random = np.random.default_rng(seed)
    slices = []
    for second in range(5):
        count = max(int(rate), 1)
        times = Histogram.of(random.normal(latency_ms * MS, latency_ms * MS / 50, count))
        slices.append(Slice(second, count, count, count, latency=times, service=times))
    return Point(Load("rate", rate), tuple(slices), 5.0, 1, Generator(1, 1, 5))


def _queue(capacity: float, rate: float) -> Point:
    # The latency of a queue with this capacity.
    return _point(rate, 1 / (1 - min(rate / capacity, 0.999)))


@pytest.mark.parametrize("capacity", [30, 500, 3000])
def test_finds_the_highest_rate(capacity: float) -> None:
    search = RateSearch([Limit.parse("p99=10ms"), Limit.parse("errors=1%")])
    while (rate := search.ask()) is not None:
        search.tell(_queue(capacity, rate))
    outcome = search.outcome()
    assert outcome.rate is not None
    # 10 ms are reached at 9/10 of the capacity; p99 of the normal distribution is 5 % above the mean.
    assert 0.8 * capacity <= outcome.rate <= 0.92 * capacity
    assert "doesn't: p99 is" in outcome.reason


def test_a_rate_that_the_server_does_not_take_is_not_met() -> None:
    search = RateSearch([Limit.parse("p99=1s")])
    while (rate := search.ask()) is not None:
        point = _point(min(rate, 150), 1)
        point.slices[0].shed = max(int(rate) - 150, 0)
        search.tell(point)
    assert search.outcome().rate == pytest.approx(150, rel=0.06)


def test_a_rate_at_which_the_generator_is_late_is_not_met() -> None:
    search = RateSearch([Limit.parse("p99=1s")])
    while (rate := search.ask()) is not None:
        point = _point(rate, 1)
        point.slices[0].late = max(int(rate) - 150, 0)
        search.tell(point)
    outcome = search.outcome()
    assert outcome.rate == pytest.approx(150, rel=0.1)
    assert "were sent over 1 ms late" in outcome.reason


@pytest.mark.parametrize(
    ("limit", "told"), [("ttft_p50=1s", "ttft_p50 was not measured"), ("errors=0%", "over errors=0%")]
)
def test_a_limit_that_is_missed_without_a_ratio_is_named(limit: str, told: str) -> None:
    point = _point(1000, 1)
    point.slices[0].errors["500"] = 1
    outcome = judge_points([Limit.parse(limit)], [point])
    assert not outcome.met
    assert told in outcome.reason


def test_says_how_far_off_the_nearest_was() -> None:
    search = RateSearch([Limit.parse("p50=1ms")])
    while (rate := search.ask()) is not None:
        search.tell(_point(rate, 4))
    outcome = search.outcome()
    assert outcome.rate is None
    assert "times p50=1ms" in outcome.reason
    assert "p50 is 4" in outcome.reason or "p50 is 3.9" in outcome.reason


def test_stops_at_the_highest_rate_allowed() -> None:
    search = RateSearch([Limit.parse("p99=1s")], most=300)
    rates = []
    while (rate := search.ask()) is not None:
        rates.append(rate)
        search.tell(_point(rate, 1))
    assert rates == [100, 200, 300]
    assert search.outcome().rate == 300


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("p99", "write NAME=VALUE"),
        ("_p99=1ms", "these with ttft_ or itl_ before"),
        ("p42=1ms", "'p42' is none of"),
        ("errors=1ms", "in %"),
        ("p99=1%", "a time"),
    ],
)
def test_refuses_limits(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Limit.parse(text)


def _run(latency_ms: float, seed: int, cpus: str) -> PerfResult:
    points = (_point(200, latency_ms, seed), _point(latency_ms * 1000, latency_ms, seed))
    return PerfResult("m", "1", "grpc", "grpc", 1, 1, ("x",), {"cpus": cpus}, "2026", points)


def test_comparison_tells_noise_from_change() -> None:
    noise = compare(_run(2, 1, "2"), _run(2, 2, "2"))
    assert not noise.differences
    assert not any(change.beyond_noise for _, changes in noise.points for change in changes)
    change = compare(_run(2, 1, "2"), _run(3, 2, "4"))
    ((load, changes),) = change.points
    assert load.value == 200
    by_name = {one.name: one for one in changes}
    assert by_name["p99"].beyond_noise is True
    assert by_name["p99"].ratio == pytest.approx(1.5, rel=0.03)
    assert by_name["rate"].beyond_noise is False
    assert by_name["max"].beyond_noise is None
    assert {load.value for load in change.only_one} == {2000, 3000}
    assert [(one.name, one.old, one.new) for one in change.differences] == [("machine: cpus", "2", "4")]
