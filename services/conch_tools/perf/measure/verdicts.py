"""Verdicts on the numbers of a point, with their reasons."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from conch_tools.perf.measure.intervals import (
    Interval,
    quantile_interval,
    rate_interval,
    trend,
    whole_seconds,
)
from conch_tools.perf.measure.results import Point

_FAILING_SHARE = 0.01
_LATE_SHARE = 0.01
_SATURATED_SHARE = 0.95
_LEAST_DRIFT = 0.05
_LEAST_GROWTH = 0.5
_NOISY_RATE = 0.05
_NOISY_P99 = 0.25
_FEWEST_SECONDS = 3


class Verdict(StrEnum):
    """Quality of a point's numbers; the first that applies."""

    FAILING = "failing"
    INCOMPLETE = "incomplete"
    GENERATOR_TOO_SLOW = "generator too slow"
    SATURATED = "saturated"
    DRIFTING = "drifting"
    NOISY = "noisy"
    STABLE = "stable"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, one sentence of reason, and the intervals behind it."""

    verdict: Verdict
    reason: str
    rate: Interval | None
    p99: Interval | None


def judge(point: Point) -> Judgement:
    """The verdict on a point; there is always one."""
    rate, p99 = rate_interval(point), quantile_interval(point, 0.99)
    verdict, reason = (
        _failing(point)
        or _incomplete(point)
        or _too_slow(point)
        or _saturated(point)
        or _drifting(point)
        or _noisy(point, rate, p99)
        or (Verdict.STABLE, _stable_reason(rate, p99))
    )
    return Judgement(verdict, reason, rate, p99)


_Found = tuple[Verdict, str] | None


def _failing(point: Point) -> _Found:
    if not point.answered:
        what = ", ".join(f"{count} {name}" for name, count in point.errors.most_common(3)) or "no errors"
        return Verdict.FAILING, (
            f"No request was answered in {point.length_s:.1f} s: "
            f"{point.sent} sent, {point.shed} shed, {what}."
        )
    if point.error_share > _FAILING_SHARE:
        name, count = point.errors.most_common(1)[0]
        return Verdict.FAILING, (
            f"{point.error_share:.1%} of the requests failed; "
            f"the most common error is {name} ({count} times)."
        )
    return None


def _incomplete(point: Point) -> _Found:
    lost, processes = point.generator.lost, point.generator.processes
    if not lost:
        return None
    return Verdict.INCOMPLETE, f"{lost} of {processes} load processes were lost; the figures are the others'."


def _too_slow(point: Point) -> _Found:
    late = point.late / point.sent if point.sent else 0.0
    if late <= _LATE_SHARE:
        return None
    return Verdict.GENERATOR_TOO_SLOW, (
        f"{late:.1%} of the requests were sent over 1 ms late; the generator used "
        f"{point.generator.cpu_share:.0%} of a core in each of {point.generator.processes} processes."
    )


def _saturated(point: Point) -> _Found:
    if point.load.mode != "rate":
        return None
    if point.shed:
        return Verdict.SATURATED, (
            f"{point.shed} requests were shed because too many were outstanding; "
            f"{point.achieved_rate:.1f} of {point.offered_rate:.1f} requests/s were answered."
        )
    share = (point.answered + point.failed) / point.sent if point.sent else 1.0
    if share < _SATURATED_SHARE:
        return Verdict.SATURATED, (
            f"{point.achieved_rate:.1f} of {point.offered_rate:.1f} requests/s were answered, "
            f"below {_SATURATED_SHARE:.0%}."
        )
    growth = trend(_medians(point))
    if growth.beyond and growth.change > _LEAST_GROWTH:
        return Verdict.SATURATED, (
            f"The latency grows: the median of a second rose by {growth.change:.0%} of its mean over the run."
        )
    return None


def _drifting(point: Point) -> _Found:
    for name, values in (("rate", _rates(point)), ("median latency", _medians(point))):
        found = trend(values)
        if found.beyond and abs(found.change) > _LEAST_DRIFT:
            way = "rises" if found.change > 0 else "falls"
            return Verdict.DRIFTING, (
                f"The {name} {way} by {abs(found.change):.0%} over the run, beyond its 99 % interval."
            )
    return None


def _noisy(point: Point, rate: Interval | None, p99: Interval | None) -> _Found:
    seconds = len(whole_seconds(point))
    if rate is None or p99 is None or seconds < _FEWEST_SECONDS:
        return Verdict.NOISY, (
            f"There are {seconds} whole seconds; an interval needs at least {_FEWEST_SECONDS}."
        )
    # The gaps of a Poisson load are noise of the load; its rate says nothing about the server's.
    if point.load.mode == "concurrency" and rate.relative > _NOISY_RATE:
        return Verdict.NOISY, (
            f"The rate is known to ±{rate.relative:.0%} only; a longer run narrows the interval."
        )
    if p99.relative > _NOISY_P99:
        return Verdict.NOISY, (
            f"p99 is known to ±{p99.relative:.0%} only, from {point.answered} requests; "
            "a longer run narrows the interval."
        )
    return None


def _stable_reason(rate: Interval | None, p99: Interval | None) -> str:
    # _noisy has refused a point without intervals.
    assert rate is not None and p99 is not None
    return f"No trend over the run; the rate is known to ±{rate.relative:.1%} and p99 to ±{p99.relative:.1%}."


def _rates(point: Point) -> list[float]:
    # The rate of an open loop is the load's own.
    return [one.answered for one in whole_seconds(point)] if point.load.mode == "concurrency" else []


def _medians(point: Point) -> list[float]:
    return [one.latency.quantile_ns(0.5) for one in whole_seconds(point) if one.latency.count]
