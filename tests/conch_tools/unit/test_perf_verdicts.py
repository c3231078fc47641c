"""Intervals against known truths, and the verdicts on simulated loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import starmap
from typing import Literal

import numpy as np
import pytest

from conch_tools.perf.measure.histogram import Histogram
from conch_tools.perf.measure.intervals import (
    mean_interval,
    quantile_interval,
    t_quantile,
)
from conch_tools.perf.measure.results import Generator, Load, Point
from conch_tools.perf.measure.slices import Slice
from conch_tools.perf.measure.verdicts import Verdict, judge

MS = 1_000_000
Shape = Callable[[int], float]


def simulated(
    seed: int = 1,
    *,
    seconds: int = 20,
    mode: Literal["concurrency", "rate"] = "concurrency",
    rate: Shape = lambda _: 1000,
    median_ms: Shape = lambda _: 2,
    answered: float = 1.0,
    late: float = 0.0,
    shed: int = 0,
    failed: float = 0.0,
) -> Point:
    """A point whose requests are answered in log-normal times."""
    random = np.random.default_rng(seed)

    def one(second: int, sent: int) -> Slice:
        errors = int(sent * failed)
        done = int(sent * answered) - errors
        times = Histogram.of(random.lognormal(np.log(median_ms(second) * MS), 0.3, done))
        return Slice(
            second,
            sent,
            done,
            done,
            Counter({"UNAVAILABLE": errors} if errors else {}),
            int(sent * late),
            shed,
            times,
            times,
        )

    sent = [(second, int(random.normal(rate(second), 10))) for second in range(seconds)]
    generator = Generator(2, 0.5 * seconds, float(seconds))
    return Point(Load(mode, 1000), tuple(starmap(one, sent)), float(seconds), 8, generator)


@pytest.mark.parametrize(
    ("share", "freedom", "true"),
    [(0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 3, 3.182), (0.975, 9, 2.262), (0.995, 29, 2.756)],
)
def test_t_quantile(share: float, freedom: int, true: float) -> None:
    assert t_quantile(share, freedom) == pytest.approx(true, rel=2e-3)


@pytest.mark.parametrize(("correlation", "seconds"), [(0.0, 10), (0.0, 40), (0.5, 60)])
def test_interval_of_a_rate_covers_the_truth(correlation: float, seconds: int) -> None:
    random = np.random.default_rng(7)
    covered = 0
    runs = 600
    for _ in range(runs):
        values = [float(random.normal())]
        for step in random.normal(size=seconds - 1):
            values.append(correlation * values[-1] + (1 - correlation**2) ** 0.5 * float(step))
        interval = mean_interval([1000 + 10 * value for value in values])
        assert interval is not None
        covered += interval.low <= 1000 <= interval.high
    assert 0.91 <= covered / runs <= 0.985


def test_interval_of_p99_covers_the_truth() -> None:
    truth = 2 * MS * np.exp(0.3 * 2.3263)
    covered = 0
    for seed in range(200):
        interval = quantile_interval(simulated(seed, seconds=8, rate=lambda _: 300), 0.99)
        assert interval is not None
        covered += interval.low * 0.996 <= truth <= interval.high * 1.004
    assert 0.91 <= covered / 200 <= 1


def test_bursts_widen_the_interval_of_p99() -> None:
    even = quantile_interval(simulated(), 0.99)
    bursts = quantile_interval(simulated(median_ms=lambda second: 4 if second % 10 == 0 else 2), 0.99)
    assert even is not None
    assert bursts is not None
    assert bursts.relative > even.relative


@pytest.mark.parametrize(
    ("point", "verdict", "reason"),
    [
        (simulated(), Verdict.STABLE, "No trend"),
        (simulated(mode="rate"), Verdict.STABLE, "No trend"),
        (simulated(rate=lambda second: 1000 - 10 * second), Verdict.DRIFTING, "The rate falls"),
        (simulated(median_ms=lambda second: 2 + 0.03 * second), Verdict.DRIFTING, "The median latency rises"),
        (simulated(rate=lambda second: (600, 1400)[second % 2]), Verdict.NOISY, "The rate is known"),
        (simulated(seconds=1), Verdict.NOISY, "There are 1 whole seconds"),
        (simulated(rate=lambda _: 20, seconds=3), Verdict.NOISY, "known to"),
        (simulated(mode="rate", answered=0.9), Verdict.SATURATED, "below 95%"),
        (simulated(mode="rate", shed=3), Verdict.SATURATED, "60 requests were shed"),
        (simulated(mode="rate", median_ms=lambda second: 2 + second), Verdict.SATURATED, "latency grows"),
        (simulated(late=0.05), Verdict.GENERATOR_TOO_SLOW, "25% of a core in each of 2 processes"),
        (simulated(failed=0.05), Verdict.FAILING, "UNAVAILABLE"),
        (simulated(answered=0), Verdict.FAILING, "No request was answered"),
        (Point(Load("rate", 5), (), 0.0, 0, Generator(1, 0, 0)), Verdict.FAILING, "0 sent"),
    ],
)
def test_verdicts(point: Point, verdict: Verdict, reason: str) -> None:
    found = judge(point)
    assert found.verdict is verdict, found.reason
    assert reason in found.reason
    assert found.reason.endswith(".")


def test_steady_loads_are_rarely_called_unsteady() -> None:
    verdicts = Counter(judge(simulated(seed)).verdict for seed in range(100))
    assert verdicts[Verdict.STABLE] >= 95
