"""Measures a model in a closed loop: each request is sent when the one before has been answered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conch.core.clock import Clock, monotonic_ns

_WARM_RUNS = 3
_FEWEST_RUNS = 10
_LEAST_GAIN = 1.05
_MOST_WITHOUT_GAIN = 2
_NS_PER_S = 1_000_000_000
_NS_PER_US = 1000


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """Figures of one batch size; the throughput is in samples per second."""

    batch: int
    p50_us: float
    p99_us: float
    throughput: float
    requests: int


def measure(
    run: Callable[[int], None], largest: int, seconds: float, clock: Clock = monotonic_ns
) -> list[ProfileRow]:
    """Measures batches of 1, 2, 4, ... samples, until the throughput gains less than 5 % twice in a row.

    Args:
        run: Runs a batch of a size.
        largest: The largest size.
        seconds: Time for each size; slow models take longer, for at least 10 runs.
        clock: The time in nanoseconds.
    """
    rows: list[ProfileRow] = []
    size, best, without_gain = 1, 0.0, 0
    while size <= largest and without_gain < _MOST_WITHOUT_GAIN:
        rows.append(_measure_size(run, size, seconds, clock))
        without_gain = 0 if rows[-1].throughput >= _LEAST_GAIN * best else without_gain + 1
        best = max(best, rows[-1].throughput)
        size *= 2
    return rows


def _measure_size(run: Callable[[int], None], size: int, seconds: float, clock: Clock) -> ProfileRow:
    for _ in range(_WARM_RUNS):
        run(size)
    taken: list[int] = []
    end = clock() + int(seconds * _NS_PER_S)
    while (started := clock()) < end or len(taken) < _FEWEST_RUNS:
        run(size)
        taken.append(max(clock() - started, 1))
    taken.sort()
    return ProfileRow(
        size,
        percentile(taken, 50) / _NS_PER_US,
        percentile(taken, 99) / _NS_PER_US,
        size * len(taken) * _NS_PER_S / sum(taken),
        len(taken),
    )


def percentile(ordered: Sequence[int], percent: float) -> int:
    """The nearest rank."""
    return ordered[max(math.ceil(percent / 100 * len(ordered)) - 1, 0)]
