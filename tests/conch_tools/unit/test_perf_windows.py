"""Ends of perf_analyzer's measurements."""

from __future__ import annotations

import numpy as np
import pytest

from conch_tools.perf.measure.histogram import Histogram
from conch_tools.perf.measure.results import Generator, Load, Point
from conch_tools.perf.measure.slices import Slice
from conch_tools.perf.perf_analyzer.windows import Windows


def _slices(*rates: int, latency_ms: float = 4) -> list[Slice]:
    found = []
    for second, rate in enumerate(rates):
        times = Histogram.of(np.full(rate, latency_ms * 1e6))
        found.append(Slice(second, rate, rate, rate, latency=times, service=times))
    return found


@pytest.mark.parametrize(
    ("windows", "rates", "over", "counted"),
    [
        (Windows(800), (100, 100), False, (100, 100)),
        (Windows(800), (100, 109, 105), True, (100, 109, 105)),
        (Windows(800), (100, 111, 105), False, (100, 111, 105)),
        (Windows(800), (10, 100, 109, 105), True, (100, 109, 105)),
        (Windows(800), (0, 0, 0), False, (0, 0, 0)),
        (Windows(800, most=3), (1, 2, 4), True, (1, 2, 4)),
        (Windows(1000), (1, 9, 5, 5, 2, 8), True, (1, 9, 5, 5, 2, 8)),
        (Windows(requests=10), (5, 5, 10, 2), False, (5, 5, 10)),
        (Windows(requests=10, spread=1), (5, 5, 10, 2, 8), True, (5, 5, 10, 2, 8)),
    ],
)
def test_measurement_ends(
    windows: Windows, rates: tuple[int, ...], over: bool, counted: tuple[int, ...]
) -> None:
    slices = _slices(*rates)
    assert windows.enough(slices) is over
    found = windows.counted(slices)
    assert tuple(one.answered for one in found) == counted
    assert windows.stable(found) is windows.stable(slices)


def test_latency_is_compared_by_the_chosen_percentile() -> None:
    slices = _slices(100, 100, 100)
    slow = _slices(100, 100, 100)[2]
    slow.service = Histogram.of(np.array([4e6] * 95 + [40e6] * 5))
    slices[2] = slow
    assert not Windows(800).stable(slices)
    assert Windows(800, percentile=90).stable(slices)
    assert not Windows(800, percentile=99).stable(slices)


def test_failures_fill_a_window_by_count() -> None:
    slices = [Slice(second) for second in range(10)]
    for one in slices:
        one.errors["UNAVAILABLE"] = 10
    assert Windows(requests=10).enough(slices)
    assert not Windows(requests=10).stable(slices)


def test_latency_threshold_ends_the_walk() -> None:
    point = Point(Load("concurrency", 1), tuple(_slices(10, latency_ms=4)), 1.0, 1, Generator(1, 0, 1))
    assert Windows(threshold_ms=3).ends_walk(point)
    assert not Windows(threshold_ms=5).ends_walk(point)
    assert not Windows().ends_walk(point)
