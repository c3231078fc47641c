"""Histograms of times in nanoseconds: log-linear, 128 steps for each power of two, so within 0.8 %.

A load process appends times to an ``array`` for a second and then counts them here, all at once. Counts of
processes and of seconds are added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

# A time below this is counted exactly; from here on each power of two has so many steps.
_STEPS = 128
_STEP_BITS = 7
# Up to 2 ** 47 ns, some 39 hours.
_SIZE = _STEPS * (47 - _STEP_BITS + 1)


@dataclass(slots=True)
class Histogram:
    """Counts of times, by step.

    Attributes:
        counts: int64, one for each step.
        total_ns: Sum of all times, exact.
        largest_ns: The largest of all times, exact.
    """

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_SIZE, np.int64))
    total_ns: int = 0
    largest_ns: int = 0

    @classmethod
    def of(cls, times_ns: ArrayLike) -> Histogram:
        """A histogram of these times."""
        histogram = cls()
        histogram.record(times_ns)
        return histogram

    @property
    def count(self) -> int:
        """Number of counted times."""
        return int(self.counts.sum())

    @property
    def mean_ns(self) -> float:
        """0 without a time."""
        count = self.count
        return self.total_ns / count if count else 0.0

    def record(self, times_ns: ArrayLike) -> None:
        """Counts times; one below 0 counts as 0."""
        times = np.maximum(np.asarray(times_ns, np.int64), 0)
        if not times.size:
            return
        self.counts += np.bincount(_steps_of(times), minlength=_SIZE)
        self.total_ns += int(times.sum())
        self.largest_ns = max(self.largest_ns, int(times.max()))

    def add(self, other: Histogram) -> None:
        """Adds another's counts."""
        self.counts += other.counts
        self.total_ns += other.total_ns
        self.largest_ns = max(self.largest_ns, other.largest_ns)

    def quantile_ns(self, share: float) -> float:
        """The time that ``share`` of all times do not exceed; the middle of its step; 0 without a time."""
        count = self.count
        if not count:
            return 0.0
        rank = min(int(share * (count - 1) + 0.5), count - 1)
        step = int(np.searchsorted(np.cumsum(self.counts), rank, side="right"))
        return min(_bucket_middle(step), float(self.largest_ns))

    def up_to(self, time_ns: float) -> int:
        """Number of times of at most `time_ns`, within a step."""
        if time_ns < 0:
            return 0
        (step,) = _steps_of(np.array([int(time_ns)], np.int64))
        return int(self.counts[: step + 1].sum())

    def to_json(self) -> dict[str, object]:
        """Only the steps with counts, as ``{step: count}``."""
        used = np.flatnonzero(self.counts)
        steps = {str(step): int(self.counts[step]) for step in used}
        return {"steps": steps, "total_ns": self.total_ns, "largest_ns": self.largest_ns}

    @classmethod
    def from_json(cls, found: Mapping[str, object]) -> Histogram:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: It was written by something else.
        """
        steps, total_ns, largest_ns = (found.get(key) for key in ("steps", "total_ns", "largest_ns"))
        if not isinstance(steps, dict) or not isinstance(total_ns, int) or not isinstance(largest_ns, int):
            raise ValueError("a histogram needs 'steps', 'total_ns' and 'largest_ns'")
        histogram = cls(total_ns=total_ns, largest_ns=largest_ns)
        for step, count in steps.items():
            if not 0 <= int(step) < _SIZE:
                raise ValueError(f"a histogram has no step {step}: it has 0 to {_SIZE - 1}")
            histogram.counts[int(step)] = count
        return histogram


def merged(histograms: Iterable[Histogram]) -> Histogram:
    """The sum of histograms."""
    whole = Histogram()
    for histogram in histograms:
        whole.add(histogram)
    return whole


def _steps_of(times: NDArray[np.int64]) -> NDArray[np.int64]:
    # How far a time is shifted until it has 8 bits: its upper bit chooses the power, the others the step.
    # A float64 would round times of over 2 ** 53 only.
    _, exponents = np.frexp(times.astype(np.float64))
    shifts = np.maximum(exponents.astype(np.int64) - _STEP_BITS - 1, 0)
    steps = (shifts << _STEP_BITS) + (times >> shifts)
    return np.minimum(steps, _SIZE - 1)


def _bucket_middle(step: int) -> float:
    shift = max((step >> _STEP_BITS) - 1, 0)
    lowest = (step - (shift << _STEP_BITS)) << shift
    return lowest + ((1 << shift) - 1) / 2
