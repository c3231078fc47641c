"""Reports of a search: the page, the table as CSV, and the texts of the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from conch_tools.perf.measure.histogram import Histogram
from conch_tools.reports.html_page import Figure, Lines, Table, page
from conch_tools.reports.svg_chart import Axis, Chart
from conch_tools.tune.goals import excess, score
from conch_tools.tune.measurement import Measurement
from conch_tools.tune.tune_file import TuneFile

_TOP = 10
_STAGES = ("client and network", "queue", "compute")
_SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
_COLUMNS = ("p99 (ms)", "p50 (ms)", "rows/s", "memory (MB)", "meets the limits", "windows")


def write_reports(file: TuneFile, folder: Path) -> None:
    """Writes ``tune.html``, ``tune.csv`` and, with a winner, ``config.pbtxt.diff``."""
    (folder / "tune.html").write_text(as_html(file))
    (folder / "tune.csv").write_text(as_csv(file))
    diff = folder / "config.pbtxt.diff"
    diff.unlink(missing_ok=True)
    if file.result.get("diff"):
        diff.write_text(file.result["diff"])


def as_text(file: TuneFile) -> str:
    """The best variants, the sentence of the result, and the diff."""
    lines = [top_table(file).markdown(), "", file.result.get("sentence") or "The search has not ended yet."]
    if file.result.get("diff"):
        lines += ["", file.result["diff"].rstrip("\n")]
    return "\n".join(lines) + "\n"


def measurement_text(one: Measurement) -> str:
    """A measurement in a line."""
    found = one.failed or f"{one.throughput:,.0f}/s, p99 {one.latency_us['p99'] / 1e3:.2f} ms"
    return f"{one.purpose} {one.window_s} s: {_short(one.variant)}: {found}"


def as_csv(file: TuneFile) -> str:
    """A row for each variant at full length, with Model Analyzer's columns and the fields of the search."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    fields = list(file.identity["space"])
    load = file.identity["load"]
    mode = "request_rate" if load["mode"] == "rate" else "concurrency"
    head = ("model_name", "batch_size", mode, "model_config_path")
    numbers = ("satisfies_constraints", "perf_throughput", "perf_latency_p99", "cpu_used_ram")
    gpu_numbers = ("gpu_used_memory", "gpu_utilization")
    rows.writerow((*head, *fields, *numbers, *gpu_numbers))
    for number, one in enumerate(_variants(file)):
        name = file.identity["model"]["name"]
        path = f"{name}_config_{'default' if one.variant == file.identity['today'] else number}"
        met = excess(one, file.limits) <= 1
        p99, memory = one.latency_us["p99"] / 1e3, one.host_bytes / 1e6
        gpu = [one.gpu.get(name) for name in ("memory_bytes", "utilization")]
        gpu_memory = "" if gpu[0] is None else round(gpu[0] / 1e6, 1)
        values = (met, round(one.throughput, 3), round(p99, 3), round(memory, 1), gpu_memory, gpu[1])
        rows.writerow((name, load["batch"], load["value"], path, *one.variant.values(), *values))
    return text.getvalue()


def as_html(file: TuneFile) -> str:
    """The page."""
    parts: list[Figure | Table | Lines] = [top_table(file)]
    variants = _variants(file)
    if variants:
        parts.append(_trade_offs(file, variants))
        compared = _compared(file)
        parts += [_percentiles(compared), _breakdown(compared)]
        parts.extend(_effects(file, name) for name in file.identity["space"])
    if file.result.get("diff"):
        parts.append(Lines("The change of config.pbtxt", file.result["diff"]))
    failed = {str(one.variant): one for one in file.measurements if one.failed}
    if failed:
        rows = tuple((_short(one.variant), one.failed) for one in failed.values())
        parts.append(Table("Variants that could not be measured", ("variant", "why"), rows))
    sentence = file.result.get("sentence") or "The search has not ended yet."
    count = len({str(one.variant) for one in file.measurements})
    lead = f"{sentence} {len(file.measurements)} measurements of {count} variants; " + (
        f"stopped by: {file.stopped_by}." if file.stopped_by else "it goes on."
    )
    return page(f"Tuning of {file.identity['model']['name']}", lead, parts)


def top_table(file: TuneFile) -> Table:
    """Today's configuration, then the best variants."""
    objectives, limits, today = file.objectives, file.limits, file.identity["today"]
    ranked = sorted(_variants(file), key=lambda one: -score(one, objectives, limits))
    first = [one for one in ranked if one.variant == today]
    best = [one for one in ranked if one.variant != today][:_TOP]
    rows = []
    for one in (*first, *best):
        name = "today's" if one.variant == today else _short(one.variant)
        met = "yes" if excess(one, limits) <= 1 else "no"
        times = (one.latency_us["p99"] / 1e3, one.latency_us["p50"] / 1e3)
        windows = sum(each.variant == one.variant and each.window == 1 for each in file.measurements)
        rows.append((name, *times, one.throughput, one.host_bytes / 1e6, met, windows))
    return Table(f"Best by {objectives}, by medians of full windows", ("variant", *_COLUMNS), tuple(rows))


def front(variants: Sequence[Measurement]) -> list[Measurement]:
    """Measurements that no other one beats in both throughput and p99, by throughput."""
    found: list[Measurement] = []
    for one in sorted(variants, key=lambda each: (-each.throughput, each.latency_us["p99"])):
        if not found or one.latency_us["p99"] < found[-1].latency_us["p99"]:
            found.append(one)
    return found[::-1]


def _trade_offs(file: TuneFile, variants: Sequence[Measurement]) -> Figure:
    def place(one: Measurement) -> tuple[float, float]:
        return (one.throughput, one.latency_us["p99"] / 1e3)

    today = [one for one in variants if one.variant == file.identity["today"]]
    best = front(variants)
    chart = Chart(
        "Throughput and p99",
        Axis.over("rows/s", [one.throughput for one in variants]),
        Axis.over("p99 (ms)", [one.latency_us["p99"] / 1e3 for one in variants]),
    )
    chart.line([place(one) for one in best], 1, "front")
    chart.points([place(one) for one in variants], 0, [_short(one.variant) for one in variants])
    for one in today:
        chart.mark(*place(one), "today's")
    rows = tuple((_short(one.variant), *place(one), "yes" if one in best else "no") for one in variants)
    table = Table("All variants", ("variant", "rows/s", "p99 (ms)", "on the front"), rows)
    note = "Each point is a variant. The line joins those that no other one beats in both."
    return Figure("Trade-offs", note, chart.svg(), table)


def _compared(file: TuneFile) -> dict[str, Measurement]:
    """Today's configuration, and the best other variant."""
    objectives, limits, today = file.objectives, file.limits, file.identity["today"]
    ranked = sorted(_variants(file), key=lambda one: -score(one, objectives, limits))
    first = next((one for one in ranked if one.variant == today), None)
    best = next((one for one in ranked if one.variant != today), None)
    found = {} if first is None else {"today's": first}
    return found if best is None else {**found, _short(best.variant): best}


def _percentiles(compared: dict[str, Measurement]) -> Figure:
    times = {name: Histogram.from_json(one.histogram) for name, one in compared.items()}
    lines = {
        name: [(share, each.quantile_ns(share) / 1e6) for share in _SHARES] for name, each in times.items()
    }
    title = "Latency by percentile"
    values = [value for line in lines.values() for _, value in line]
    chart = Chart(title, Axis.over("percentile", _SHARES, "percentile"), Axis.over("ms", values, "log"))
    for series, (name, line) in enumerate(lines.items()):
        chart.line(line, series, name)
    rows = tuple((f"p{share * 100:g}", *(dict(line)[share] for line in lines.values())) for share in _SHARES)
    table = Table(f"{title}, ms", ("percentile", *lines), rows)
    return Figure(title, "Today's configuration and the best other variant.", chart.svg(), table)


def _breakdown(compared: dict[str, Measurement]) -> Figure:
    rows = []
    for name, one in compared.items():
        queue, compute = (one.server.get(part, 0.0) / 1e3 for part in ("queue_us", "compute_us"))
        whole = Histogram.from_json(one.histogram).mean_ns / 1e6
        rows.append((name, max(whole - queue - compute, 0.0), queue, compute))
    title = "Where the time goes"
    totals = [sum(times) for _, *times in rows]
    chart = Chart(title, Axis.of_names("variant", list(compared)), Axis.over("mean, ms", totals))
    for index, (_, *times) in enumerate(rows):
        low = 0.0
        for series, (stage, value) in enumerate(zip(_STAGES, times, strict=True)):
            chart.bar(index, low, low + value, series, stage)
            low += value
    table = Table(f"{title}, mean ms", ("variant", *_STAGES), tuple(rows))
    note = "Queue and compute are from the model's statistics; the rest of the mean latency is outside them."
    return Figure(title, note, chart.svg(), table)


def _effects(file: TuneFile, name: str) -> Figure:
    objectives = file.objectives
    found = []
    for value in file.identity["space"][name]:
        values = [
            objectives.value(one)
            for one in file.measurements
            if one.purpose == "search" and not one.failed and one.variant[name] == value
        ]
        if values:
            found.append((value, median(values), len(values)))
    unit = "rows/s" if str(objectives) == "throughput" else f"objective: {objectives}"
    chart = Chart(
        f"Effect of {name}",
        Axis.of_names(name, [str(value) for value, _, _ in found]),
        Axis.over(unit, [middle for _, middle, _ in found]),
    )
    for index, (_, middle, _) in enumerate(found):
        chart.bar(index, 0, middle)
    table = Table(f"Medians by {name}", (name, unit, "windows"), tuple(found))
    return Figure(
        f"Effect of {name}", "Medians over all windows with the value; higher is better.", chart.svg(), table
    )


def _variants(file: TuneFile) -> list[Measurement]:
    """One measurement for each variant with full windows: that of the median throughput."""
    found: dict[str, list[Measurement]] = {}
    for one in file.measurements:
        if one.window == 1 and not one.failed:
            found.setdefault(str(one.variant), []).append(one)
    return [sorted(each, key=lambda one: one.throughput)[len(each) // 2] for each in found.values()]


def _short(variant: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in variant.items())
