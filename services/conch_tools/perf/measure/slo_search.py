"""Limits of points, and the search for the highest rate that meets them: doubles, then bisects; no clock."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from conch_tools.perf.measure.histogram import Histogram
from conch_tools.perf.measure.results import QUANTILES, LimitsOutcome, Point
from conch_tools.perf.measure.verdicts import Verdict, judge

_UNITS_NS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_LIMIT = re.compile(r"(?P<name>[a-z0-9_.]+)=(?P<most>\d+(\.\d+)?)(?P<unit>ns|us|ms|s|%)")
_LOWEST_RATE = 0.1
_TIMES = {"": "latency", "ttft_": "first", "itl_": "token"}
# The server did not take the load, or did not get it as asked for.
_UNMET = (Verdict.FAILING, Verdict.INCOMPLETE, Verdict.GENERATOR_TOO_SLOW, Verdict.SATURATED)


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit, such as ``p99=20ms``, ``ttft_p95=200ms``, ``itl_p95=50ms`` or ``errors=0.1%``.

    Attributes:
        most: In ns for a time; a share for ``errors``.
    """

    text: str
    name: str
    most: float

    @classmethod
    def parse(cls, text: str) -> Limit:
        """Reads a limit.

        Raises:
            ValueError: It isn't one; the text names what is allowed.
        """
        match = _LIMIT.fullmatch(text)
        if match is None:
            raise ValueError(f"'{text}' is no limit; write NAME=VALUE, such as p99=20ms or errors=0.1%")
        name, unit, most = match["name"], match["unit"], float(match["most"])
        if name == "errors":
            if unit != "%":
                raise ValueError(f"'{text}': errors take a share in %, such as errors=0.1%")
            return cls(text, name, most / 100)
        which, quantile = _times_and_quantile(name)
        if not which or quantile not in QUANTILES:
            names = ", ".join(QUANTILES)
            raise ValueError(
                f"'{text}': '{name}' is none of {names}, these with ttft_ or itl_ before, and errors"
            )
        if unit == "%":
            raise ValueError(f"'{text}': a percentile takes a time in ns, us, ms or s")
        return cls(text, name, most * _UNITS_NS[unit])

    def found(self, point: Point) -> float:
        """Value of the point; infinite without a request."""
        if self.name == "errors":
            return point.error_share if point.answered or point.failed else math.inf
        which, quantile = _times_and_quantile(self.name)
        times: Histogram = getattr(point, which)
        return times.quantile_ns(QUANTILES[quantile]) if times.count else math.inf

    def excess(self, point: Point) -> float:
        """Value of the point divided by the limit; over 1 is over the limit."""
        found = self.found(point)
        if self.most:
            return found / self.most
        return math.inf if found else 0.0


def _times_and_quantile(name: str) -> tuple[str, str]:
    """The point's times that a limit is for, empty for none, and the name of its quantile."""
    prefix, underscore, quantile = name.rpartition("_")
    return _TIMES.get(prefix + underscore, ""), quantile


def missed(limits: Sequence[Limit], point: Point) -> str:
    """Reason for which a point does not meet limits; empty if it does."""
    worst = max(limits, key=lambda limit: limit.excess(point))
    judgement = judge(point)
    if worst.excess(point) <= 1 and judgement.verdict not in _UNMET:
        return ""
    return _why(worst, point, judgement.reason)


def judge_points(limits: Sequence[Limit], points: Sequence[Point]) -> LimitsOutcome:
    """The outcome for given loads."""
    reasons = [f"{point.load}: {why}" for point in points if (why := missed(limits, point))]
    reason = "; ".join(reasons) if reasons else "All loads meet the limits"
    return LimitsOutcome(tuple(limit.text for limit in limits), not reasons, None, f"{reason}.")


class RateSearch:
    """Ask for a rate, measure a point, tell it; until `ask` returns None."""

    def __init__(
        self,
        limits: Sequence[Limit],
        *,
        first: float = 100.0,
        most: float = 1_000_000.0,
        precision: float = 0.05,
    ) -> None:
        if not limits:
            raise ValueError("--rate auto needs at least one --slo, such as --slo p99=20ms")
        if not 0 < first <= most or not 0 < precision < 1:
            raise ValueError("the first rate must be above 0 and at most the highest; the precision a share")
        self._limits = tuple(limits)
        self._next: float | None = first
        self._most = most
        self._precision = precision
        self._met: float | None = None
        self._unmet: float | None = None
        self._why_unmet = ""
        self._nearest: tuple[float, float, str] = (math.inf, first, "no request was answered")

    def ask(self) -> float | None:
        """The rate to measure next; None at the end."""
        return self._next

    def tell(self, point: Point) -> None:
        """Takes the point that was measured at the rate asked for."""
        rate = self._next
        if rate is None:
            raise ValueError("the search has ended")
        why = missed(self._limits, point)
        if not why:
            self._met = rate
        else:
            self._unmet = rate
            self._why_unmet = why
            excess = max(limit.excess(point) for limit in self._limits)
            if excess < self._nearest[0]:
                self._nearest = (excess, rate, why)
        self._next = self._choose()

    def outcome(self) -> LimitsOutcome:
        """The result so far; final once `ask` returns None."""
        if self._met is None:
            _, nearest, why = self._nearest
            reason = f"No rate meets the limits; the nearest was {nearest:g}/s: {why}."
        elif self._unmet is None:
            reason = f"{self._met:g}/s meets the limits; no higher rate was tried."
        else:
            reason = f"{self._met:g}/s meets the limits; {self._unmet:g}/s doesn't: {self._why_unmet}."
        limits = tuple(limit.text for limit in self._limits)
        return LimitsOutcome(limits, self._met is not None, self._met, reason)

    def _choose(self) -> float | None:
        if self._unmet is None:
            assert self._met is not None
            return min(self._met * 2, self._most) if self._met < self._most else None
        if self._met is None:
            lower = self._unmet / 2
            return lower if lower >= _LOWEST_RATE else None
        if self._unmet / self._met <= 1 + self._precision:
            return None
        return (self._met + self._unmet) / 2


def _why(limit: Limit, point: Point, reason: str) -> str:
    excess, found = limit.excess(point), limit.found(point)
    if excess <= 1 or not point.answered:
        return reason.removesuffix(".")
    if math.isinf(found):
        return f"{limit.name} was not measured: only streams have it"
    over = f"over {limit.text}" if math.isinf(excess) else f"{excess:.2f} times {limit.text}"
    if limit.name == "errors":
        return f"the share of errors is {found:.2%}, {over}"
    return f"{limit.name} is {found / 1e6:.2f} ms, {over}"
