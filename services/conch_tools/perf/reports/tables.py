"""Tables of a run: its points, its facts and its comparison with another; Markdown, CSV and terminal."""

from __future__ import annotations

import csv
import io

from conch_tools.perf.measure.comparison import Comparison
from conch_tools.perf.measure.histogram import Histogram
from conch_tools.perf.measure.intervals import Interval
from conch_tools.perf.measure.results import QUANTILES, PerfResult, Point
from conch_tools.perf.measure.slo_search import Limit, missed
from conch_tools.perf.measure.verdicts import judge
from conch_tools.reports.html_page import Table, cell_text

MS = 1e6
"""Nanoseconds in a millisecond."""

_SEQUENCES_AT = 4  # column of the points' table
_GROUPS = (
    ("latency", "latency"),
    ("service", "service time"),
    ("first", "time to first response"),
    ("next_one", "time to second response"),
    ("between", "inter-response latency"),
    ("token", "inter-token latency"),
)


def summary_table(result: PerfResult) -> Table:
    """A line for each point, with its verdict."""
    columns = [
        "load",
        "offered/s",
        "achieved/s",
        "±",
        "p50 ms",
        "p90 ms",
        "p99 ms",
        "max ms",
        "errors",
        "verdict",
    ]
    sequences = any(point.sequences for point in result.points)
    if sequences:
        columns.insert(_SEQUENCES_AT, "sequences/s")
    rows = []
    for point in result.points:
        judgement = judge(point)
        times = [point.latency.quantile_ns(share) / MS for share in (0.5, 0.9, 0.99, 1)]
        spread = half_width(judgement.rate)
        rates = (point.offered_rate, point.achieved_rate, spread)
        row: list[object] = [str(point.load), *rates, *times, point.failed, str(judgement.verdict)]
        if sequences:
            row.insert(_SEQUENCES_AT, point.sequences / point.length_s if point.length_s else 0.0)
        rows.append(tuple(row))
    return Table("Points", tuple(columns), tuple(rows))


def verdict_table(result: PerfResult) -> Table:
    """Verdict of each point, its reason, and the intervals."""
    rows = []
    for point in result.points:
        found = judge(point)
        rate, p99 = found.rate, found.p99
        rows.append(
            (
                str(point.load),
                str(found.verdict),
                " ".join((found.reason, *point.notes)),
                None if rate is None else f"{rate.low:.1f} to {rate.high:.1f}",
                None if p99 is None else f"{p99.low / MS:.3f} to {p99.high / MS:.3f}",
            )
        )
    return Table("Verdicts", ("load", "verdict", "reason", "rate 95 %", "p99 ms 95 %"), tuple(rows))


def limits_table(result: PerfResult) -> Table:
    """Outcome of the limits; without rows if there were none."""
    found = result.limits
    columns = ("limits", "met", "highest rate/s", "reason")
    if found is None:
        return Table("Limits", columns, ())
    met = "yes" if found.met else "no"
    return Table("Limits", columns, ((", ".join(found.limits), met, found.rate, found.reason),))


def token_table(result: PerfResult) -> Table:
    """Latencies of tokens, one in each response; without rows if no request has several responses."""
    rows = []
    for point in result.points:
        if point.token.count:
            first, next_one, token = (
                [times.quantile_ns(share) / MS for share in (0.5, 0.99)]
                for times in (point.first, point.next_one, point.token)
            )
            lengths = point.responses / point.answered
            each = (*first, *next_one, *token, 1e3 / token[0] if token[0] else None)
            rows.append((str(point.load), point.token_rate, lengths, *each))
    times = [f"{name} {share} ms" for name in ("TTFT", "TTST", "ITL") for share in ("p50", "p99")]
    columns = ("load", "output tokens/s", "tokens/request", *times, "tokens/s of a user")
    return Table("Tokens", columns, tuple(rows))


def facts_table(result: PerfResult) -> Table:
    """Facts of the run: model, endpoint, command line and machine."""
    facts = {
        "model": f"{result.model} version {result.version or 'latest'}",
        "started": result.started,
        "endpoint": result.endpoint,
        "protocol": result.protocol,
        "batch size": result.batch,
        "request size": f"{result.request_bytes} bytes",
        "command line": " ".join(result.argv),
        **result.machine,
    }
    return Table("Run", ("fact", "value"), tuple(facts.items()))


def error_table(result: PerfResult) -> Table:
    """Errors by status; without rows if there were none."""
    rows = [
        (str(point.load), name, count)
        for point in result.points
        for name, count in point.errors.most_common()
    ]
    return Table("Errors", ("load", "status", "requests"), tuple(rows))


def percentile_table(point: Point) -> Table:
    """Percentiles of all times of a point, in ms."""
    groups: list[tuple[str, Histogram]] = [(text, getattr(point, name)) for name, text in _GROUPS]
    rows = [
        (
            text,
            times.count,
            times.mean_ns / MS,
            *(times.quantile_ns(share) / MS for share in QUANTILES.values()),
        )
        for text, times in groups
        if times.count
    ]
    columns = ("ms", "count", "mean", *QUANTILES)
    return Table(f"Times at {point.load}", columns, tuple(rows))


def comparison_tables(comparison: Comparison) -> tuple[Table, ...]:
    """Changes of each point, and what differed between the runs."""
    rows: list[tuple[object, ...]] = []
    for load, changes in comparison.points:
        for change in changes:
            unit = 1.0 if change.name == "rate" else MS
            noise = {None: "no interval", True: "beyond noise", False: "within noise"}[change.beyond_noise]
            rows.append((str(load), change.name, change.old / unit, change.new / unit, change.ratio, noise))
    rows += [(str(load), "in one run only", None, None, None, None) for load in comparison.only_one]
    differences = tuple((one.name, one.old, one.new) for one in comparison.differences)
    return (
        Table("Changes", ("load", "rate/s or ms", "old", "new", "new/old", "change"), tuple(rows)),
        Table("Differences between the runs", ("what", "old", "new"), differences),
    )


def as_terminal(result: PerfResult) -> str:
    """The final tables of the terminal, and the reasons of the verdicts."""
    lines = _aligned(summary_table(result))
    tokens = token_table(result)
    if tokens.rows:
        lines += ["", *_aligned(tokens)]
    reasons = [
        f"{point.load}: {text}" for point in result.points for text in (judge(point).reason, *point.notes)
    ]
    if result.limits is not None:
        reasons.append(result.limits.reason)
    return "\n".join([*lines, "", *reasons]) + "\n"


def _aligned(table: Table) -> list[str]:
    rows = [list(table.columns), *([cell_text(cell) for cell in row] for row in table.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.columns))]
    last = len(widths) - 1
    lines = []
    for row in rows:
        cells = [
            text.ljust(widths[column]) if column in {0, last} else text.rjust(widths[column])
            for column, text in enumerate(row)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def as_markdown(result: PerfResult, comparison: Comparison | None = None) -> str:
    """The report in Markdown."""
    tables = [summary_table(result), verdict_table(result), limits_table(result), token_table(result)]
    tables += [*map(percentile_table, result.points), error_table(result)]
    tables = [table for table in tables if table.rows]
    if comparison is not None:
        tables += comparison_tables(comparison)
    tables.append(facts_table(result))
    parts = [f"## {table.caption}\n\n{table.markdown()}\n" for table in tables]
    return "# Load test\n\n" + "\n".join(parts)


def as_csv(result: PerfResult) -> str:
    """A line for each point; times in µs."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    times = [f"{text} {name} us" for _, text in _GROUPS for name in QUANTILES]
    head = ("mode", "value", "offered/s", "achieved/s", "rate low", "rate high", "p99 low us", "p99 high us")
    counts = (
        "sent",
        "answered",
        "responses",
        "failed",
        "late",
        "shed",
        "sequences",
        "length s",
        "verdict",
        "reason",
        "within limits",
    )
    limits = [] if result.limits is None else [Limit.parse(text) for text in result.limits.limits]
    writer.writerow([*head, *counts, *times])
    for point in result.points:
        found = judge(point)
        rate = ("", "") if found.rate is None else (f"{found.rate.low:.3f}", f"{found.rate.high:.3f}")
        p99 = ("", "") if found.p99 is None else (f"{found.p99.low / 1e3:.1f}", f"{found.p99.high / 1e3:.1f}")
        rates = (f"{point.offered_rate:.3f}", f"{point.achieved_rate:.3f}")
        numbers = (
            *(point.sent, point.answered, point.responses, point.failed, point.late, point.shed),
            point.sequences,
        )
        groups: list[Histogram] = [getattr(point, name) for name, _ in _GROUPS]
        quantiles = [
            f"{group.quantile_ns(share) / 1e3:.1f}" if group.count else ""
            for group in groups
            for share in QUANTILES.values()
        ]
        within = ("no" if missed(limits, point) else "yes") if limits else ""
        reason = " ".join((found.reason, *point.notes))
        verdict = (f"{point.length_s:.3f}", str(found.verdict), reason, within)
        load = (point.load.mode, f"{point.load.value:g}")
        writer.writerow([*load, *rates, *rate, *p99, *numbers, *verdict, *quantiles])
    return out.getvalue()


def half_width(interval: Interval | None) -> float | None:
    """Half the width of an interval."""
    return None if interval is None else (interval.high - interval.low) / 2
