"""Latency histograms with power-of-two buckets, cheap enough for every request.

A time of n nanoseconds counts in bucket ``n.bit_length()``: one method call and one addition, no search.
The statistics keep sums and totals anyway.

Threads and locks: callers hold the lock of `ModelStatistics`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from conch.core.request import InferenceRequest

PLACES = 65
"""Number of buckets: monotonic clocks have at most 64 bits."""


class Latencies:
    """Histograms of the stages of successful requests; `request` is from receipt to response."""

    __slots__ = ("compute_infer", "compute_input", "compute_output", "queue", "request")

    def __init__(self) -> None:
        self.request = [0] * PLACES
        self.queue = [0] * PLACES
        self.compute_input = [0] * PLACES
        self.compute_infer = [0] * PLACES
        self.compute_output = [0] * PLACES

    def add(self, total_ns: int, queue_ns: int) -> None:
        """Counts one request, but for its times in the model."""
        self.request[total_ns.bit_length()] += 1
        self.queue[queue_ns.bit_length()] += 1

    def add_compute(self, count: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """Counts times in the model of as many requests."""
        self.compute_input[input_ns.bit_length()] += count
        self.compute_infer[infer_ns.bit_length()] += count
        self.compute_output[output_ns.bit_length()] += count

    def add_all(self, requests: Sequence[InferenceRequest], run: tuple[int, int], *times_ns: int) -> None:
        """Counts requests of a batch run in `run` (start, end); `times_ns` are those of `add_compute`."""
        start_ns, end_ns = run
        self.add_compute(len(requests), *times_ns)
        places, queue_places = self.request, self.queue
        for request in requests:  # as `add`, without a call for each
            places[(end_ns - request.received_ns).bit_length()] += 1
            queue_places[(start_ns - request.queued_ns).bit_length()] += 1

    def snapshot(self) -> LatencyCounts:
        """A copy."""
        return LatencyCounts(
            tuple(self.request),
            tuple(self.queue),
            tuple(self.compute_input),
            tuple(self.compute_infer),
            tuple(self.compute_output),
        )


class FirstResponses:
    """Histogram of the time to the first response, in whole milliseconds as in Triton.

    Args:
        bounds_ms: Upper bounds of all buckets but the last, ascending, in milliseconds.
    """

    __slots__ = ("_counts", "_ms", "bounds_ms", "total")

    def __init__(self, bounds_ms: Sequence[float]) -> None:
        self.bounds_ms = tuple(bounds_ms)
        self._counts = [0] * (len(self.bounds_ms) + 1)
        self._ms = 0
        self.total = 0

    def add(self, ns: int) -> None:
        """Counts one request."""
        ms = ns // 1_000_000
        self._counts[bisect_left(self.bounds_ms, ms)] += 1
        self._ms += ms
        self.total += 1

    def add_all(self, requests: Iterable[InferenceRequest], now_ns: int) -> None:
        """Counts requests that are answered at `now_ns`."""
        for request in requests:
            self.add(now_ns - request.received_ns)

    def snapshot(self) -> FirstResponseCounts:
        """A copy."""
        return FirstResponseCounts(self.bounds_ms, tuple(accumulate(self._counts)), self._ms)


@dataclass(frozen=True, slots=True)
class FirstResponseCounts:
    """A snapshot of `FirstResponses`.

    Attributes:
        counts: Requests up to each bound, and all.
        ms: Sum of all times in whole milliseconds.
    """

    bounds_ms: Sequence[float]
    counts: Sequence[int]
    ms: int


@dataclass(frozen=True, slots=True)
class LatencyCounts:
    """A snapshot of `Latencies`; bucket n counts times from 2**(n-1) to below 2**n nanoseconds."""

    request: Sequence[int]
    queue: Sequence[int]
    compute_input: Sequence[int]
    compute_infer: Sequence[int]
    compute_output: Sequence[int]
