"""Compares two runs, point by point."""

from __future__ import annotations

from dataclasses import dataclass

from conch_tools.perf.measure.intervals import Interval, quantile_interval, rate_interval
from conch_tools.perf.measure.results import QUANTILES, Load, PerfResult, Point


@dataclass(frozen=True, slots=True)
class Change:
    """One number of two points.

    Attributes:
        name: ``rate`` in requests/s, or a percentile in ns.
        ratio: New by old; None if the old one is 0.
        beyond_noise: True if the 95 % intervals are apart; None where one has no interval.
    """

    name: str
    old: float
    new: float
    ratio: float | None
    beyond_noise: bool | None


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting or fact that differs; None where a run has none of this name."""

    name: str
    old: str | None
    new: str | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Changes between two runs.

    Attributes:
        points: Changes under each load that both runs have.
        only_one: Loads that only one run has.
    """

    points: tuple[tuple[Load, tuple[Change, ...]], ...]
    only_one: tuple[Load, ...]
    differences: tuple[Difference, ...]


def compare(old: PerfResult, new: PerfResult) -> Comparison:
    """Compares the points of equal loads, and the runs' settings and machines."""
    before = {point.load: point for point in old.points}
    after = {point.load: point for point in new.points}
    both = [load for load in after if load in before]
    return Comparison(
        tuple((load, _changes(before[load], after[load])) for load in both),
        tuple(load for load in (*before, *after) if (load in before) != (load in after)),
        tuple(_differences(old, new)),
    )


def _changes(old: Point, new: Point) -> tuple[Change, ...]:
    rate = _change("rate", old.achieved_rate, new.achieved_rate, rate_interval(old), rate_interval(new))
    return (rate, *(_quantile_change(name, share, old, new) for name, share in QUANTILES.items()))


def _quantile_change(name: str, share: float, old: Point, new: Point) -> Change:
    before, after = old.latency.quantile_ns(share), new.latency.quantile_ns(share)
    # The maximum has no interval: a longer run has a larger one.
    if share == 1:
        return _change(name, before, after, None, None)
    return _change(name, before, after, quantile_interval(old, share), quantile_interval(new, share))


def _change(name: str, old: float, new: float, before: Interval | None, after: Interval | None) -> Change:
    beyond = None if before is None or after is None else not before.overlaps(after)
    return Change(name, old, new, new / old if old else None, beyond)


def _differences(old: PerfResult, new: PerfResult) -> list[Difference]:
    before, after = _facts(old), _facts(new)
    names = dict.fromkeys((*before, *after))
    return [
        Difference(name, before.get(name), after.get(name))
        for name in names
        if before.get(name) != after.get(name)
    ]


def _facts(result: PerfResult) -> dict[str, str]:
    own = {
        name: str(getattr(result, name))
        for name in ("model", "version", "endpoint", "protocol", "batch", "request_bytes")
    }
    machine = {f"machine: {name}": value for name, value in result.machine.items()}
    return {**own, "command line": " ".join(result.argv), **machine}
