"""End of a measurement, by perf_analyzer's rule; pure.

A measurement is a row of windows. It is stable once the throughputs of the last three, and their latencies,
differ by no more than the stability percentage; those three count. After so many windows it ends anyway.
Windows are made of whole seconds, the unit in which the load is counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from conch_tools.perf.measure.histogram import merged
from conch_tools.perf.measure.results import Point
from conch_tools.perf.measure.slices import Slice

JUDGED = 3
"""Windows that are compared, and count."""

_LONGER_THAN_ASKED = 1.2
_NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class Windows:
    """The rule.

    Attributes:
        interval_ms: Length of a window in milliseconds; perf_analyzer's are 1.2 times as long.
        requests: If not 0, a window lasts until so many requests have ended instead.
        spread: Most difference, by the smallest of the three.
        most: Windows of a measurement.
        percentile: The latency that is compared; None for the mean.
        threshold_ms: Latency that ends a walk through loads; 0 for none.
    """

    interval_ms: int = 5000
    requests: int = 0
    spread: float = 0.1
    most: int = 10
    percentile: int | None = None
    threshold_ms: float = 0.0

    @property
    def seconds(self) -> int:
        """Length of a window in time."""
        return math.ceil(self.interval_ms * _LONGER_THAN_ASKED / 1000)

    def enough(self, slices: Sequence[Slice]) -> bool:
        """True if the measurement is over: it is stable, or has its last window."""
        return len(self._split(slices)) >= self.most or self.stable(slices)

    def counted(self, slices: Sequence[Slice]) -> tuple[Slice, ...]:
        """The slices of the last windows, or all without a whole window."""
        windows = self._split(slices)
        return tuple(one for window in windows[-JUDGED:] for one in window) if windows else tuple(slices)

    def boundaries(self, slices: Sequence[Slice]) -> list[int]:
        """The seconds at which the windows of what counts begin, and the one at which the last ends."""
        ends = [window[-1].second + 1 for window in self._split(slices)] or [slices[-1].second + 1]
        return [slices[0].second, *ends]

    def stable(self, slices: Sequence[Slice]) -> bool:
        """True if throughputs and latencies of the last windows differ by no more than the spread."""
        last = self._split(slices)[-JUDGED:]
        rates = [sum(one.answered for one in window) / len(window) for window in last]
        return len(last) == JUDGED and all(rates) and self._near(rates) and self._near(self._latencies(last))

    def ends_walk(self, point: Point) -> bool:
        """True if the latency is over the threshold."""
        return bool(self.threshold_ms) and self._latencies([point.slices])[0] > self.threshold_ms * _NS_PER_MS

    def _latencies(self, windows: Sequence[Sequence[Slice]]) -> list[float]:
        times = [merged(one.service for one in window) for window in windows]
        if self.percentile is None:
            return [each.mean_ns for each in times]
        return [each.quantile_ns(self.percentile / 100) for each in times]

    def _near(self, values: Sequence[float]) -> bool:
        return max(values) <= min(values) * (1 + self.spread)

    def _split(self, slices: Sequence[Slice]) -> list[list[Slice]]:
        full = self._full_by_count if self.requests else self._full_by_time
        windows: list[list[Slice]] = []
        window: list[Slice] = []
        for one in slices:
            window.append(one)
            if full(window):
                windows.append(window)
                window = []
        return windows

    def _full_by_time(self, window: Sequence[Slice]) -> bool:
        return len(window) >= self.seconds

    def _full_by_count(self, window: Sequence[Slice]) -> bool:
        return sum(one.answered + sum(one.errors.values()) for one in window) >= self.requests
