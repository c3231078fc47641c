"""Where the times of requests lie: counts by power of two, cheap enough for every request.

A time of n nanoseconds counts in place ``n.bit_length()`` of a list: one method call and one addition, with
no search for the bucket that it belongs to. Sums and totals are those that the statistics keep anyway.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conch.core.request import InferenceRequest

PLACES = 65
"""Lengths that a time can have: no monotonic clock goes beyond 64 bits."""


class Latencies:
    """How many requests took how long; callers see to it that one thread at a time uses it.

    Attributes:
        request: From receipt to response, of those that succeeded.
        queue: Waiting.
        compute_input: Preparing inputs.
        compute_infer: In the model.
        compute_output: On outputs.
    """

    __slots__ = ("compute_infer", "compute_input", "compute_output", "queue", "request")

    def __init__(self) -> None:
        self.request = [0] * PLACES
        self.queue = [0] * PLACES
        self.compute_input = [0] * PLACES
        self.compute_infer = [0] * PLACES
        self.compute_output = [0] * PLACES

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
    """How long requests waited for their first response, in whole milliseconds, as Triton observes it.

    Callers hold a lock, as for `Latencies`.

    Args:
        bounds_ms: Upper bounds of the buckets but the last, ascending, in milliseconds.
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
        """Counts requests that are answered now."""
        for request in requests:
            self.add(now_ns - request.received_ns)

    def snapshot(self) -> FirstResponseCounts:
        """A copy."""
        return FirstResponseCounts(self.bounds_ms, tuple(accumulate(self._counts)), self._ms)


@dataclass(frozen=True, slots=True)
class FirstResponseCounts:
    """What `FirstResponses` held at one moment.

    Attributes:
        bounds_ms: Upper bounds of the buckets but the last, in milliseconds.
        counts: Requests up to each bound, and all.
        ms: All times together, each in whole milliseconds.
    """

    bounds_ms: Sequence[float]
    counts: Sequence[int]
    ms: int


@dataclass(frozen=True, slots=True)
class LatencyCounts:
    """What `Latencies` held at one moment.

    Place n counts times below 2**n nanoseconds and not below half that.

    Attributes:
        request: From receipt to response, of those that succeeded.
        queue: Waiting.
        compute_input: Preparing inputs.
        compute_infer: In the model.
        compute_output: On outputs.
    """

    request: Sequence[int]
    queue: Sequence[int]
    compute_input: Sequence[int]
    compute_infer: Sequence[int]
    compute_output: Sequence[int]
