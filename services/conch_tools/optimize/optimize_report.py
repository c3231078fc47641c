"""Writes the report of `conch optimize`, which needs no network, and the status of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from conch_tools.whole_files import write_whole

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
caption { text-align: left; font-weight: 600; padding: 0.3rem 0; }
th, td { padding: 0.25rem 0.7rem; border-bottom: 1px solid #8885; text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
td:first-child { white-space: nowrap; }
tr.best { font-weight: 600; }
pre { overflow-x: auto; background: #8882; padding: 0.6rem; }
"""
_MIB = 1 << 20


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Writes ``report.json`` and ``report.html``."""
    write_whole(folder / "report.json", json.dumps(report, indent=1) + "\n")
    write_whole(folder / "report.html", as_html(report))


def write_status(
    folder: Path,
    candidates: Sequence[Mapping[str, Any]],
    recommended: str | None = None,
    done: bool = False,
) -> None:
    """Writes ``status.json``, which shows how far a run is."""
    shown = ("id", "chain", "status", "reason")
    status = {
        "format": 1,
        "state": "done" if done else "running",
        "candidates": [{key: each[key] for key in shown} for each in candidates],
        "recommended": recommended,
    }
    write_whole(folder / "status.json", json.dumps(status, indent=1) + "\n")


def conclusion(report: Mapping[str, Any]) -> str:
    """The result in one sentence."""
    candidates: Sequence[Mapping[str, Any]] = report["candidates"]
    passed = {each["id"]: each for each in candidates if each["status"] == "passed"}
    refused = sum(each["status"] == "refused" for each in candidates)
    counts = f"{len(passed)} of {len(candidates) - refused} conversions have passed"
    counts += f", {refused} are not possible here" if refused else ""
    if report["recommended"] is None:
        return f"{counts}; there is nothing to serve."
    best = passed[report["recommended"]]
    text = (
        f"{counts}. Recommended: {best['id']} ({' > '.join(best['chain'])}), "
        f"{best['profile'][0]['p50_us']:,.0f} µs for one sample, {throughput(best):,.0f} samples/s"
    )
    original = next((each for each in passed.values() if _keeps(each, report)), None)
    if original is None or original is best:
        return f"{text}."
    faster = throughput(best) / throughput(original)
    quicker = original["profile"][0]["p50_us"] / best["profile"][0]["p50_us"]
    return f"{text}: {quicker:.2f} times as quick as the original, with {faster:.2f} times its throughput."


def throughput(candidate: Mapping[str, Any]) -> float:
    """Samples per second at the best batch size; 0 for one that was not measured."""
    return max((row["throughput"] for row in candidate["profile"]), default=0.0)


def as_text(report: Mapping[str, Any]) -> str:
    """The candidates as a table for a terminal, and the result."""
    head = ("candidate", "status", "p50 µs", "samples/s", "MiB", "largest difference")
    rows = [head, *(_cells(each) for each in report["candidates"])]
    widths = [max(len(row[at]) for row in rows) for at in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*(line.rstrip() for line in lines), "", conclusion(report)])


def as_html(report: Mapping[str, Any]) -> str:
    """The whole page."""
    source = report["source"]
    parts = [
        f"<h1>{escape(Path(source['path']).name)}</h1>",
        f"<p>{escape(conclusion(report))}</p>",
        _candidates(report),
        _accuracy(report["candidates"]),
        _profiles(report["candidates"]),
        _failures(report["candidates"]),
        _facts(report),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>conch optimize: {escape(Path(source['path']).name)}</title><style>{_STYLE}</style>"
        "</head><body>"
        f"{''.join(parts)}</body></html>\n"
    )


def _keeps(candidate: Mapping[str, Any], report: Mapping[str, Any]) -> bool:
    return len(candidate["chain"]) == 1 and candidate["chain"][0] == report["source"]["kind"]


def _cells(candidate: Mapping[str, Any]) -> tuple[str, ...]:
    name = candidate["id"] or candidate["chain"][-1]
    if candidate["status"] != "passed":
        return name, candidate["status"], "", "", "", candidate["reason"]
    differences = [each["abs"] for each in candidate["accuracy"].values() if "abs" in each]
    return (
        name,
        "passed",
        f"{candidate['profile'][0]['p50_us']:.0f}",
        f"{throughput(candidate):.0f}",
        f"{candidate['bytes'] / _MIB:.2f}",
        f"{max(differences, default=0.0):.2g}",
    )


def _candidates(report: Mapping[str, Any]) -> str:
    rows = []
    for each in report["candidates"]:
        passed = each["status"] == "passed"
        mark = "recommended" if each["id"] and each["id"] == report["recommended"] else ""
        mark = mark or ("on the front" if each["id"] in report["front"] else "")
        cells = [
            (each["id"] or each["chain"][-1], False),
            (" > ".join(each["chain"]), False),
            (each["class"], False),
            (each["status"] + (f" ({mark})" if mark else ""), False),
            (f"{each['profile'][0]['p50_us']:,.0f}" if passed else "", True),
            (f"{throughput(each):,.0f}" if passed else "", True),
            (f"{each['bytes'] / _MIB:,.2f}" if each["bytes"] else "", True),
            (f"{each['host_bytes'] / _MIB:,.0f}" if passed else "", True),
            (f"{each['seconds']:,.1f}" if each["seconds"] else "", True),
            (each["reason"], False),
        ]
        rows.append((cells, mark == "recommended"))
    head = (
        ("candidate", False),
        ("steps", False),
        ("class", False),
        ("status", False),
        ("p50 µs, one sample", True),
        ("samples/s", True),
        ("files, MiB", True),
        ("memory, MiB", True),
        ("converted in s", True),
        ("reason", False),
    )
    return _table("Candidates", head, rows)


def _accuracy(candidates: Sequence[Mapping[str, Any]]) -> str:
    names = (
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
    rows = []
    for each in candidates:
        for output, found in each["accuracy"].items():
            numbers = [(f"{found[name]:.6g}" if name in found else "", True) for name in names]
            rows.append(([(each["id"], False), (output, False), *numbers], False))
    head = (("candidate", False), ("output", False), *((name.replace("_", " "), True) for name in names))
    return _table("Differences from the original", head, rows) if rows else ""


def _profiles(candidates: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for each in candidates:
        for row in each["profile"]:
            numbers = (row["batch"], row["p50_us"], row["p99_us"], row["throughput"])
            rows.append(([(each["id"], False), *((f"{number:,.0f}", True) for number in numbers)], False))
    head = (("candidate", False), ("batch", True), ("p50 µs", True), ("p99 µs", True), ("samples/s", True))
    return _table("Speed, one request at a time", head, rows) if rows else ""


def _failures(candidates: Sequence[Mapping[str, Any]]) -> str:
    parts = [
        f"<h3>{escape(each['id'])}</h3><pre>{escape(each['tail'])}</pre>"
        for each in candidates
        if each.get("tail")
    ]
    return f"<h2>Last lines of logs</h2>{''.join(parts)}" if parts else ""


def _facts(report: Mapping[str, Any]) -> str:
    source, samples, machine = report["source"], report["samples"], report["environment"]
    noise = ", ".join(f"{name} {value:.2g}" for name, value in report["noise"].items())
    rows = [
        ("source", f"{source['path']} ({source['kind']}, {source['digest']})"),
        *((f"input {each['name']}", f"{each['datatype']} {each['dims']}") for each in source["inputs"]),
        *((f"output {each['name']}", f"{each['datatype']} {each['dims']}") for each in source["outputs"]),
        ("samples", f"{samples['rows']}, {samples['origin']}"),
        ("noise of the original", noise),
        ("processor", f"{machine['cpu']}, {machine['cores']} cores"),
    ]
    cells = [([(name, False), (value, False)], False) for name, value in rows]
    return _table("Facts", (("", False), ("", False)), cells)


def _table(
    caption: str,
    head: Sequence[tuple[str, bool]],
    rows: Sequence[tuple[Sequence[tuple[str, bool]], bool]],
) -> str:
    """A table; each cell says whether it is a number, each row whether it stands out."""
    titles = "".join(_cell("th", *each) for each in head)
    body = "".join(
        f"<tr{' class=best' if best else ''}>{''.join(_cell('td', *each) for each in cells)}</tr>"
        for cells, best in rows
    )
    title = f"<caption>{escape(caption)}</caption>"
    return f"<table>{title}<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def _cell(tag: str, text: str, number: bool) -> str:
    return f"<{tag}{' class=n' if number else ''}>{escape(text)}</{tag}>"
