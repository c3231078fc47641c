"""How long requests took of late: quantiles of their times, from counts of times that are about the same.

Times are counted in steps of a thirty-second of a power of two, so a quantile is off by 1.6 % at most. The
counts are kept in slices of time; those of a minute and less are looked at, as in Triton.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conch.core.request import InferenceRequest

SLICE_NS = 12_000_000_000
SLICES = 5

REQUEST, QUEUE, COMPUTE_INPUT, COMPUTE_INFER, COMPUTE_OUTPUT, CACHE_HIT, CACHE_MISS = range(7)
"""What takes time."""
STAGES = 7

_BITS = 5
_EXACT = 2 << _BITS

_Slice = list[dict[int, int]]


def step_of(ns: int) -> int:
    """The step that a time is counted in."""
    shift = ns.bit_length() - _BITS - 1
    return ns if shift <= 0 else (shift << _BITS) + (ns >> shift)


def middle_of(step: int) -> float:
    """The time in the middle of a step, in nanoseconds."""
    if step < _EXACT:
        return step
    shift = (step >> _BITS) - 1
    return ((step - (shift << _BITS)) << shift) + (1 << shift) / 2


class Summaries:
    """Times of the requests to one model version; callers see to it that one thread at a time uses it."""

    __slots__ = ("_end_ns", "_slices")

    def __init__(self) -> None:
        self._slices: deque[_Slice] = deque(maxlen=SLICES)
        self._end_ns = 0  # of the last slice

    def add(self, now_ns: int, first: int, *times_ns: int) -> None:
        """Counts times of stages that follow each other.

        Args:
            now_ns: When they ended, in monotonic nanoseconds.
            first: The stage of the first time.
            times_ns: The times; what is below zero counts as zero.
        """
        counts = self._slice(now_ns)
        for stage, ns in enumerate(times_ns, first):
            step = step_of(ns) if ns > 0 else 0
            counts[stage][step] = counts[stage].get(step, 0) + 1

    def add_all(self, requests: Iterable[InferenceRequest], run: tuple[int, int], *times_ns: int) -> None:
        """Counts requests that were answered together.

        Args:
            requests: The requests.
            run: When they began to run, and when they were answered.
            times_ns: The times of the stages from `COMPUTE_INPUT` on.
        """
        start_ns, end_ns = run
        for request in requests:
            self.add(end_ns, REQUEST, end_ns - request.received_ns, start_ns - request.queued_ns, *times_ns)

    def quantiles(self, now_ns: int, wanted: Sequence[float]) -> list[list[float]]:
        """Quantiles of each stage's times, in nanoseconds; NaN where there have been none of late.

        Args:
            now_ns: The moment, in monotonic nanoseconds.
            wanted: Which, from 0 to 1.
        """
        self._slice(now_ns)
        return [_quantiles([each[stage] for each in self._slices], wanted) for stage in range(STAGES)]

    def _slice(self, now_ns: int) -> _Slice:
        if now_ns >= self._end_ns:
            late = (now_ns - self._end_ns) // SLICE_NS + 1
            self._end_ns = now_ns + SLICE_NS if late > SLICES else self._end_ns + late * SLICE_NS
            self._slices.extend([{} for _ in range(STAGES)] for _ in range(min(late, SLICES)))
        return self._slices[-1]


def _quantiles(slices: Sequence[dict[int, int]], wanted: Sequence[float]) -> list[float]:
    counts: dict[int, int] = {}
    for each in slices:
        for step, count in each.items():
            counts[step] = counts.get(step, 0) + count
    total = sum(counts.values())
    if not total:
        return [math.nan] * len(wanted)
    steps = sorted(counts)
    found: list[float] = []
    for quantile in wanted:
        rank = max(math.ceil(quantile * total), 1)
        below = 0
        for step in steps:
            below += counts[step]
            if below >= rank:
                found.append(middle_of(step))
                break
    return found
