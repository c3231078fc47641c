"""The page of a run of `conch optimize`: tables and charts of its report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conch_tools.machine import overflows_16_bits
from conch_tools.reports.html_page import Figure, Lines, Table, page
from conch_tools.reports.svg_chart import Axis, Chart
from conch_tools.reports.svg_tree import Node, tree_svg

_MIB = 1 << 20
_DIFFERENCES = (
    "abs",
    "p999",
    "rel",
    "cosine_min",
    "cosine_mean",
    "snr_db",
    "top1",
    "top5",
    "equal",
    "worst_sample",
)
_COLOURS = {"passed": 2, "failed": 5, "error": 5, "refused": 4}
_Candidates = Sequence[Mapping[str, Any]]


def as_html(report: Mapping[str, Any], conclusion: str) -> str:
    """The whole page."""
    candidates: _Candidates = report["candidates"]
    parts: list[Figure | Table | Lines] = [_candidates_table(report), _chains(report)]
    passed = [each for each in candidates if each["status"] == "passed"]
    if passed:
        parts += [_trade_offs(report, passed), _by_batch(passed)]
    parts.extend(_accuracy(candidates))
    if len(passed) < len(candidates):
        reasons = tuple(
            (_name(each), each["status"], each["reason"]) for each in candidates if each["reason"]
        )
        parts.append(Table("Candidates that have not passed", ("candidate", "status", "reason"), reasons))
    parts.extend(
        Lines(f"Last lines of the log of {each['id']}", each["tail"])
        for each in candidates
        if each.get("tail")
    )
    if report["tune"] and report["tune"]["diff"]:
        parts.append(Lines("What tuning has changed in config.pbtxt", report["tune"]["diff"]))
    parts.append(_facts(report))
    name = Path(report["source"]["path"]).name
    return page(f"Conversions of {name}", conclusion, parts)


def throughput(candidate: Mapping[str, Any]) -> float:
    """Samples per second at the best batch size; 0 for one that was not measured."""
    return max((row["throughput"] for row in candidate["profile"]), default=0.0)


def _name(candidate: Mapping[str, Any]) -> str:
    return str(candidate["id"] or candidate["chain"][-1])


def _candidates_table(report: Mapping[str, Any]) -> Table:
    rows = []
    for each in report["candidates"]:
        passed = each["status"] == "passed"
        mark = " (recommended)" if each["id"] and each["id"] == report["recommended"] else ""
        mark = mark or (" (on the front)" if each["id"] in report["front"] else "")
        rows.append(
            (
                _name(each),
                each["class"],
                each["status"] + mark,
                round(each["profile"][0]["p50_us"], 1) if passed else "",
                round(throughput(each)) if passed else "",
                round(each["bytes"] / _MIB, 2) if each["bytes"] else "",
                round(each["host_bytes"] / _MIB, 1) if passed else "",
                each["seconds"] or "",
            )
        )
    columns = ("candidate", "class", "status", "p50 µs, one sample", "samples/s", "files, MiB", "memory, MiB")
    return Table("Candidates", (*columns, "converted in s"), tuple(rows))


def _chains(report: Mapping[str, Any]) -> Figure:
    """Tree of the conversions: each candidate hangs on its source."""
    nodes, rows = [Node(f"the original, {report['source']['kind']}", None)], []
    made: dict[tuple[str, ...], int] = {(): 0}
    for each in report["candidates"]:
        chain = tuple(each["chain"])
        made.setdefault(chain, len(nodes))
        nodes.append(Node(f"{_name(each)}: {each['status']}", made[chain[:-1]], _COLOURS[each["status"]]))
        rows.append((_name(each), " > ".join(chain[:-1]) or "the original", each["status"]))
    title = "Chains of conversions"
    table = Table(title, ("candidate", "made of", "status"), tuple(rows))
    note = "Each candidate is made of what it hangs on. Only what has passed is converted further."
    return Figure(title, note, tree_svg(title, nodes), table)


def _trade_offs(report: Mapping[str, Any], passed: _Candidates) -> Figure:
    def place(candidate: Mapping[str, Any]) -> tuple[float, float]:
        return (throughput(candidate), candidate["profile"][0]["p50_us"])

    title = "Latency and throughput"
    chart = Chart(
        title,
        Axis.over("samples/s at the best batch size", [place(each)[0] for each in passed]),
        Axis.over("p50 of one sample, µs", [place(each)[1] for each in passed]),
    )
    best = sorted((each for each in passed if each["id"] in report["front"]), key=place)
    chart.line([place(each) for each in best], 1, "front")
    chart.points([place(each) for each in passed], 0, [_name(each) for each in passed])
    for each in passed:
        if each["id"] == report["recommended"]:
            chart.mark(*place(each), f"recommended: {_name(each)}")
    rows = tuple((_name(each), *place(each), "yes" if each in best else "no") for each in passed)
    table = Table(title, ("candidate", "samples/s", "p50 µs", "on the front"), rows)
    note = "Each point is a candidate that has passed. The line joins those that no other one beats in both."
    return Figure(title, note, chart.svg(), table)


def _by_batch(passed: _Candidates) -> Figure:
    title = "Throughput by batch size"
    measured = [(each, row) for each in passed for row in each["profile"]]
    sizes = sorted({row["batch"] for _, row in measured})
    chart = Chart(
        title,
        Axis("samples in a batch", sizes[0], max(sizes[-1], 2), "log", tuple((n, str(n)) for n in sizes)),
        Axis.over("samples/s", [row["throughput"] for _, row in measured]),
    )
    for series, each in enumerate(passed):
        line = [(row["batch"], row["throughput"]) for row in each["profile"]]
        chart.line(line, series, _name(each).partition("-")[0])
        chart.points(line, series, [_name(each)] * len(line))
    rows = tuple(
        (_name(each), row["batch"], row["p50_us"], row["p99_us"], row["throughput"]) for each, row in measured
    )
    table = Table(title, ("candidate", "batch", "p50 µs", "p99 µs", "samples/s"), rows)
    note = (
        "In conch without a socket, one request at a time. The numbers are those of the candidates' names. "
        "Larger batches are left out where two gain less than 5 % each."
    )
    return Figure(title, note, chart.svg(), table)


def _accuracy(candidates: _Candidates) -> Iterator[Figure | Table]:
    rows = [
        (_name(each), output, *(found.get(name, "") for name in _DIFFERENCES))
        for each in candidates
        for output, found in each["accuracy"].items()
    ]
    if not rows:
        return
    columns = ("candidate", "output", *(name.replace("_", " ") for name in _DIFFERENCES))
    table = Table("Differences from the original", columns, tuple(map(_shortened, rows)))
    largest = {
        _name(each): max((found.get("abs", 0.0) for found in each["accuracy"].values()), default=0.0)
        for each in candidates
    }
    bars = {name: value for name, value in largest.items() if value > 0}
    if not bars:
        yield table
        return
    title = "Largest difference from the original"
    low, high = min(bars.values()) / 3, max(bars.values()) * 1.5
    chart = Chart(
        title,
        Axis.of_names("candidate", [name.partition("-")[0] for name in bars]),
        Axis("absolute difference", low, high, "log"),
    )
    statuses = {_name(each): each["status"] for each in candidates}
    for index, (name, value) in enumerate(bars.items()):
        status = statuses[name]
        chart.bar(index, low, value, _COLOURS[status], "passed" if status == "passed" else "not passed")
    note = "Of the outputs together; candidates without a difference are left out. Limits differ by class."
    yield Figure(title, note, chart.svg(), table)


def _facts(report: Mapping[str, Any]) -> Table:
    source, samples, machine = report["source"], report["samples"], report["environment"]
    noise = ", ".join(f"{name} {value:.2g}" for name, value in report["noise"].items())
    processor = f"{machine['cpu']}, {machine['cores']} cores"
    if overflows_16_bits(machine["flags"]):
        processor += ", without VNNI: int8 weights of ONNX have 7 bits"
    rows = (
        ("source", f"{source['path']} ({source['kind']}, {source['digest']})"),
        *((f"input {each['name']}", f"{each['datatype']} {each['dims']}") for each in source["inputs"]),
        *((f"output {each['name']}", f"{each['datatype']} {each['dims']}") for each in source["outputs"]),
        ("samples", f"{samples['rows']}, {samples['origin']}"),
        ("noise of the original", noise),
        ("processor", processor),
    )
    return Table("Facts", ("", ""), rows)


def _shortened(cells: Sequence[object]) -> tuple[object, ...]:
    """Floats as texts of six digits, as tables have three decimals and differences are small."""
    return tuple(f"{cell:.6g}" if isinstance(cell, float) else cell for cell in cells)
