"""Quantiles of recent request times, from histograms with fine buckets.

Buckets are a thirty-second of a power of two wide, so a quantile is off by 1.6 % at most. Counts are kept in
time slices, which together cover the last minute, as in Triton.

Threads and locks: callers hold the lock of `ModelStatistics`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from conch.core.request import InferenceRequest

SLICE_NS = 12_000_000_000
SLICES = 5

REQUEST, QUEUE, COMPUTE_INPUT, COMPUTE_INFER, COMPUTE_OUTPUT, CACHE_HIT, CACHE_MISS = range(7)
"""The measured stages."""
STAGES = 7

_BITS = 5
_EXACT = 2 << _BITS

_Slice = list[dict[int, int]]


def bucket_of(ns: int) -> int:
    """The bucket of a time."""
    shift = ns.bit_length() - _BITS - 1
    return ns if shift <= 0 else (shift << _BITS) + (ns >> shift)


def bucket_middle(bucket: int) -> float:
    """The middle of a bucket, in nanoseconds."""
    if bucket < _EXACT:
        return bucket
    shift = (bucket >> _BITS) - 1
    return ((bucket - (shift << _BITS)) << shift) + (1 << shift) / 2


class Summaries:
    """Recent times of the requests of one model version."""

    __slots__ = ("_end_ns", "_slices")

    def __init__(self) -> None:
        self._slices: deque[_Slice] = deque(maxlen=SLICES)
        self._end_ns = 0  # of the last slice

    def add(self, now_ns: int, first: int, *times_ns: int) -> None:
        """Counts times of consecutive stages from `first` on; negative times count as zero."""
        counts = self._slice(now_ns)
        for stage, ns in enumerate(times_ns, first):
            bucket = bucket_of(ns) if ns > 0 else 0
            counts[stage][bucket] = counts[stage].get(bucket, 0) + 1

    def add_all(self, requests: Iterable[InferenceRequest], run: tuple[int, int], *times_ns: int) -> None:
        """Counts requests of a batch run in `run` (start, end); `times_ns` begins with `COMPUTE_INPUT`."""
        start_ns, end_ns = run
        for request in requests:
            self.add(end_ns, REQUEST, end_ns - request.received_ns, start_ns - request.queued_ns, *times_ns)

    def quantiles(self, now_ns: int, wanted: Sequence[float]) -> list[list[float]]:
        """The `wanted` quantiles (0 to 1) of each stage in nanoseconds; NaN without recent times."""
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
        for bucket, count in each.items():
            counts[bucket] = counts.get(bucket, 0) + count
    total = sum(counts.values())
    if not total:
        return [math.nan] * len(wanted)
    buckets = sorted(counts)
    found: list[float] = []
    for quantile in wanted:
        rank = max(math.ceil(quantile * total), 1)
        below = 0
        for bucket in buckets:
            below += counts[bucket]
            if below >= rank:
                found.append(bucket_middle(bucket))
                break
    return found
