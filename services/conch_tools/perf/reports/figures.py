"""The charts of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from conch_tools.perf.measure.histogram import Histogram
from conch_tools.perf.measure.results import PerfResult, Point, ServerStatistics
from conch_tools.perf.reports.tables import MS
from conch_tools.reports.html_page import Figure, Table
from conch_tools.reports.svg_chart import Axis, Chart

_CURVE = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9999, 0.99999)
_FIVE = (0.05, 0.25, 0.5, 0.75, 0.95)
_HEAT_ROWS = 24
STAGES = (
    "client and network",
    "queue",
    "compute input",
    "compute infer",
    "compute output",
    "other",
)
"""The stages of a request, in order."""


def figures(result: PerfResult) -> Iterator[Figure]:
    """All charts for which the run has data."""
    points = [point for point in result.points if point.answered]
    if len(points) > 1:
        yield curve(points)
    if points:
        yield distribution(points)
        chosen = {id(point): point for point in (knee(points), points[-1])}
        yield from (over_time(point) for point in chosen.values())
    if any(point.server is not None and point.server.requests for point in points):
        yield stages(points)
    yield from (errors(point) for point in result.points if point.failed or point.shed)
    if any(point.first.count for point in points):
        yield boxes(points, "first", "Time to first response")
    if any(point.between.count for point in points):
        yield boxes(points, "between", "Inter-response latency")
    if any(point.token.count for point in points):
        yield boxes(points, "token", "Inter-token latency")


def knee(points: Sequence[Point]) -> Point:
    """The point with the most rate for its latency: the highest achieved rate by p99."""
    return max(points, key=lambda point: point.achieved_rate / max(point.latency.quantile_ns(0.99), 1.0))


def curve(points: Sequence[Point]) -> Figure:
    """Latency over achieved rate, with the knee."""
    found = sorted(points, key=lambda point: point.load.value)
    rates = [point.achieved_rate for point in found]
    columns = [[point.latency.quantile_ns(share) / MS for point in found] for _, share in _CURVE]
    title = "Throughput and latency"
    chart = Chart(
        title,
        Axis.over("requests/s", rates),
        Axis.over("latency, ms", [value for column in columns for value in column], "log"),
    )
    for series, ((name, _), column) in enumerate(zip(_CURVE, columns, strict=True)):
        chart.line(list(zip(rates, column, strict=True)), series, name)
        chart.points(list(zip(rates, column, strict=True)), series, [str(point.load) for point in found])
    best = knee(found)
    chart.mark(best.achieved_rate, best.latency.quantile_ns(0.99) / MS, f"knee: {best.load}")
    rows = zip((str(point.load) for point in found), rates, *columns, strict=True)
    table = Table(title, ("load", "requests/s", *(f"{name} ms" for name, _ in _CURVE)), tuple(rows))
    note = (
        "The knee is the load with the highest rate divided by p99; above it latency grows faster than rate."
    )
    return Figure(title, note, chart.svg(), table)


def distribution(points: Sequence[Point]) -> Figure:
    """Latency by percentile."""
    shares = [share for share in _SHARES if any(_resolved(point, share) for point in points)]
    lines = [
        [(share, point.latency.quantile_ns(share) / MS) for share in shares if _resolved(point, share)]
        for point in points
    ]
    title = "Latency by percentile"
    values = [value for line in lines for _, value in line]
    chart = Chart(
        title, Axis.over("percentile", shares, "percentile"), Axis.over("latency, ms", values, "log")
    )
    for series, (point, line) in enumerate(zip(points, lines, strict=True)):
        chart.line(line, series, str(point.load))
    rows = tuple((f"p{share * 100:g}", *(dict(line).get(share) for line in lines)) for share in shares)
    table = Table(f"{title}, ms", ("percentile", *(str(point.load) for point in points)), rows)
    note = (
        "Corrected latency, from the time when a request was to be sent. "
        "A percentile is shown where at least one request is slower."
    )
    return Figure(title, note, chart.svg(), table)


def over_time(point: Point) -> Figure:
    """Heat map of latencies, by second."""
    title = f"Latency over time at {point.load}"
    seconds = [one for one in point.slices if one.latency.count]
    low = max(min(one.latency.quantile_ns(0) for one in seconds), 1.0)
    high = max(*(one.latency.largest_ns for one in seconds), low * 1.5)
    edges = [low * 0.99 * (high * 1.01 / (low * 0.99)) ** (row / _HEAT_ROWS) for row in range(_HEAT_ROWS + 1)]
    x = Axis("seconds", seconds[0].second, seconds[-1].second + 1)
    chart = Chart(title, x, Axis("latency, ms", edges[0] / MS, edges[-1] / MS, "log"))
    counts = [_counts(one.latency, edges) for one in seconds]
    most = max(max(row) for row in counts)
    for one, row in zip(seconds, counts, strict=True):
        for index, count in enumerate(row):
            if count:
                ends = (edges[index] / MS, edges[index + 1] / MS)
                # The root keeps single slow requests visible.
                chart.cell((one.second, one.second + 1), ends, math.sqrt(count / most))
    rows = tuple(
        (one.second, one.answered, *(one.latency.quantile_ns(share) / MS for share in (0.5, 0.99, 1)))
        for one in seconds
    )
    table = Table(title, ("second", "answered", "p50 ms", "p99 ms", "max ms"), rows)
    note = f"A darker cell has more requests; the darkest has {most}. Shades follow the square root."
    return Figure(title, note, chart.svg(), table)


def stages(points: Sequence[Point]) -> Figure:
    """Mean time of a request by stage."""
    title = "Where the time goes"
    found = [(point, stage_times_ms(point, point.server)) for point in points if point.server]
    totals = [sum(times) for _, times in found]
    names = [str(point.load) for point, _ in found]
    chart = Chart(title, Axis.of_names("load", names), Axis.over("mean, ms", totals))
    for index, (_, times) in enumerate(found):
        low = 0.0
        for series, (name, value) in enumerate(zip(STAGES, times, strict=True)):
            chart.bar(index, low, low + value, series, name)
            low += value
    rows = tuple((name, *times) for name, (_, times) in zip(names, found, strict=True))
    table = Table(f"{title}, mean ms", ("load", *STAGES), rows)
    note = (
        "Stages in the server are from the model's statistics; other is what its "
        "request time has beyond its stages; client and network is the rest of the mean service time."
    )
    return Figure(title, note, chart.svg(), table)


def stage_times_ms(point: Point, server: ServerStatistics) -> tuple[float, ...]:
    """Mean times of `STAGES`."""
    parts = [server.queue_ns, server.input_ns, server.infer_ns, server.output_ns]
    inside = [server.each_ns(part) for part in parts]
    whole = server.each_ns(server.request_ns)
    client = max(point.service.mean_ns - whole, 0.0)
    return tuple(part / MS for part in (client, *inside, max(whole - sum(inside), 0.0)))


def errors(point: Point) -> Figure:
    """Failed and shed requests by second."""
    title = f"Errors over time at {point.load}"
    names = [*point.errors, *(["shed"] if point.shed else [])]
    rows = [
        (one.second, [{**one.errors, "shed": one.shed}.get(name, 0) for name in names])
        for one in point.slices
    ]
    seconds = Axis("seconds", point.slices[0].second - 0.5, point.slices[-1].second + 0.5)
    chart = Chart(title, seconds, Axis.over("requests/s", [sum(counts) for _, counts in rows]))
    for second, counts in rows:
        low = 0
        for series, (name, count) in enumerate(zip(names, counts, strict=True)):
            chart.bar(second, low, low + count, series, name)
            low += count
    table = Table(title, ("second", *names), tuple((second, *counts) for second, counts in rows))
    note = "Requests that failed, by status, and requests that were never sent (shed)."
    return Figure(title, note, chart.svg(), table)


def boxes(points: Sequence[Point], name: str, title: str) -> Figure:
    """The middle half of times as a box."""
    found: list[tuple[str, Histogram]] = [(str(point.load), getattr(point, name)) for point in points]
    found = [(load, times) for load, times in found if times.count]
    rows = []
    for load, times in found:
        p5, p25, p50, p75, p95 = (times.quantile_ns(share) / MS for share in _FIVE)
        rows.append((load, (p5, p25, p50, p75, p95)))
    values = [value for _, five in rows for value in five]
    chart = Chart(title, Axis.of_names("load", [load for load, _ in rows]), Axis.over("ms", values))
    for index, (_, five) in enumerate(rows):
        chart.box(index, five)
    table = Table(f"{title}, ms", ("load", "p5", "p25", "p50", "p75", "p95"), tuple((a, *b) for a, b in rows))
    return Figure(title, "Boxes from p25 to p75 with p50; lines from p5 to p95.", chart.svg(), table)


def _resolved(point: Point, share: float) -> bool:
    return point.latency.count * (1 - share) >= 1


def _counts(times: Histogram, edges: Sequence[float]) -> list[int]:
    below = [times.up_to(edge) for edge in edges[1:-1]]
    return [high - low for low, high in zip([0, *below], [*below, times.count], strict=True)]
