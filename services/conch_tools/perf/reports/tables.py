"""The table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from conch_tools.perf.measure.results import Point
from conch_tools.perf.measure.verdicts import Judgement, judge

_HEADS = ("load", "requests/s", "p50", "p90", "p99", "p99.9", "max", "errors", "verdict")


def load_text(point: Point) -> str:
    """A load in words."""
    value = f"{point.load.value:g}"
    if point.load.mode == "concurrency":
        return f"{value} in flight"
    return f"{value}/s {point.load.distribution}"


def microseconds(ns: float) -> str:
    """A time, with the unit that suits it."""
    us = ns / 1e3
    if us < 1000:
        return f"{us:.0f} µs"
    return f"{us / 1e3:.2f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"


def row(point: Point, judgement: Judgement) -> tuple[str, ...]:
    """The figures of a point."""
    times = [microseconds(point.latency.quantile_ns(share)) for share in (0.5, 0.9, 0.99, 0.999)]
    interval = judgement.rate
    rate = f"{point.achieved_rate:,.0f}"
    if interval is not None:
        rate += f" [{interval.low:,.0f}-{interval.high:,.0f}]"
    return (
        load_text(point),
        rate,
        *times,
        microseconds(point.latency.largest_ns),
        str(point.failed) if point.failed else "-",
        judgement.verdict,
    )


def text_table(points: Sequence[Point]) -> str:
    """A table for the terminal, with a sentence for each verdict that is not stable."""
    verdicts = [judge(point) for point in points]
    rows = [_HEADS, *(row(point, verdict) for point, verdict in zip(points, verdicts, strict=True))]
    widths = [max(len(each[column]) for each in rows) for column in range(len(_HEADS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(each, widths, strict=True)).rstrip()
        for each in rows
    ]
    for point, verdict in zip(points, verdicts, strict=True):
        lines.append(f"{load_text(point)}: {verdict.verdict}. {verdict.reason}")
    return "\n".join(lines)
