"""95 % confidence intervals of a point's rate and percentiles.

The rate: a t-interval over the rates of its seconds. Seconds that follow each other are correlated; the
interval counts as many independent ones as the autocorrelation at lag 1 leaves: n (1 - r) / (1 + r).

A percentile: an interval by order statistics. Slow requests come in bursts; the interval is widened by how
much more the share of slow requests varies between seconds than a binomial share would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from conch_tools.perf.measure.results import Point
from conch_tools.perf.measure.slices import Slice

_CONFIDENCE = 0.95
# Above this correlation so few independent seconds are left that the formula means nothing.
_MOST_CORRELATED = 0.95
# Fewer seconds say nothing about how shares vary between them.
_FEWEST_SECONDS = 5


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def relative(self) -> float:
        """Half the width by the value; infinite for a value of 0."""
        return (self.high - self.low) / 2 / self.value if self.value else math.inf

    def overlaps(self, other: Interval) -> bool:
        """True if both have a value in common."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True, slots=True)
class Trend:
    """A line through the values of windows.

    Attributes:
        change: Change from the first window to the last, by the mean.
        beyond: True if the change is beyond its own 99 % interval.
    """

    change: float
    beyond: bool


def whole_seconds(point: Point) -> tuple[Slice, ...]:
    """A slice for each whole second, empty ones too; a last part of a second is left out."""
    if not point.slices:
        return ()
    start = point.slices[0].second
    found = {one.second: one for one in point.slices}
    count = max(int(point.length_s + 0.01), 0)
    return tuple(found.get(second, Slice(second)) for second in range(start, start + count))


def rate_interval(point: Point) -> Interval | None:
    """The interval of the achieved rate; None with fewer than 2 whole seconds."""
    return mean_interval([one.answered for one in whole_seconds(point)], point.achieved_rate)


def mean_interval(values: Sequence[float], value: float | None = None) -> Interval | None:
    """A t-interval of the mean of values that follow each other in time; around ``value`` if given."""
    series = np.asarray(values, np.float64)
    if series.size < 2:
        return None
    mean = float(series.mean()) if value is None else value
    independent = _independent(series - series.mean())
    half = t_quantile(0.5 + _CONFIDENCE / 2, independent - 1) * float(series.std(ddof=1))
    half /= math.sqrt(independent)
    return Interval(mean, max(mean - half, 0.0), mean + half)


def quantile_interval(point: Point, share: float) -> Interval | None:
    """The interval of a percentile of the corrected latency in ns; None without a request."""
    latency = point.latency
    count = latency.count
    if not count:
        return None
    value = latency.quantile_ns(share)
    error = math.sqrt(share * (1 - share) / count) * math.sqrt(_burstiness(point, value))
    half = NormalDist().inv_cdf(0.5 + _CONFIDENCE / 2) * error + 1 / count
    low = latency.quantile_ns(max(share - half, 0.0))
    return Interval(value, low, latency.quantile_ns(min(share + half, 1.0)))


def trend(values: Sequence[float]) -> Trend:
    """The line through values of windows of the same length; without a change for fewer than 5."""
    series = np.asarray(values, np.float64)
    mean = float(series.mean()) if series.size else 0.0
    if series.size < _FEWEST_SECONDS or not mean:
        return Trend(0.0, beyond=False)
    times = np.arange(series.size) - (series.size - 1) / 2
    spread = float((times**2).sum())
    slope = float((times * series).sum()) / spread
    rest = series - mean - slope * times
    independent = _independent(rest)
    error = math.sqrt(float((rest**2).sum()) / (series.size - 2) / spread * series.size / independent)
    limit = t_quantile(0.995, independent - 2) * error
    return Trend(slope * (series.size - 1) / mean, beyond=abs(slope) > limit)


def t_quantile(share: float, freedom: float) -> float:
    """Student's t quantile: exact to 2 degrees of freedom, from there by Cornish and Fisher's series."""
    if freedom < 2:
        return math.tan(math.pi * (share - 0.5))
    if freedom < 3:
        return (2 * share - 1) * math.sqrt(2 / (4 * share * (1 - share)))
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return float(z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms)))


def _independent(deviations: NDArray[np.float64]) -> float:
    # Positive correlation only: a negative one, which a closed loop makes, would narrow the interval.
    count = deviations.size
    square = float((deviations**2).sum())
    if not square:
        return float(count)
    found = float((deviations[1:] * deviations[:-1]).sum()) / square
    # The estimate of few values is too low by about (1 + 3 r) / n (Kendall).
    corrected = found + (1 + 3 * found) / count
    # As low as a correlation may be found by chance it counts as none.
    if corrected < 1 / math.sqrt(count):
        return float(count)
    correlation = min(corrected, _MOST_CORRELATED)
    return max(count * (1 - correlation) / (1 + correlation), 2.0)


def _burstiness(point: Point, value_ns: float) -> float:
    seconds = [one for one in whole_seconds(point) if one.latency.count]
    if len(seconds) < _FEWEST_SECONDS:
        return 1.0
    counts = np.array([one.latency.count for one in seconds], np.float64)
    slow = counts - np.array([one.latency.up_to(value_ns) for one in seconds], np.float64)
    share = float(slow.sum() / counts.sum())
    expected = float((counts * share * (1 - share)).sum())
    if not expected:
        return 1.0
    found = float(((slow - counts * share) ** 2).sum()) * len(seconds) / (len(seconds) - 1)
    return max(found / expected, 1.0)
