"""Writes the report of `conch optimize` and the status of a run, and says the result in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from conch_tools.machine import machine_facts
from conch_tools.optimize.candidate_choice import Measured, Objective
from conch_tools.optimize.optimize_page import as_html, throughput
from conch_tools.optimize.original import Original
from conch_tools.whole_files import write_whole

FORMAT = 1
_MIB = 1 << 20


def make_report(
    original: Original,
    objective: Objective,
    results: Sequence[Mapping[str, Any]],
    best: Measured | None,
    front: Sequence[Measured],
    packages: Mapping[str, str],
) -> dict[str, Any]:
    """The content of ``report.json``."""
    source, signature = original.source, original.signature
    return {
        "format": FORMAT,
        "source": {
            "path": str(source.path),
            "kind": source.kind.name,
            "digest": source.digest,
            "inputs": [_public(asdict(each)) for each in signature.inputs],
            "outputs": [_public(asdict(each)) for each in signature.outputs],
        },
        "environment": {**machine_facts(), "packages": dict(sorted(packages.items()))},
        "samples": {"origin": original.origin, "rows": original.rows},
        "noise": original.noise,
        "objective": objective,
        "candidates": [
            {key: value for key, value in each.items() if key != "parameters"} for each in results
        ],
        "recommended": best.id if best else None,
        "front": [each.id for each in front],
        "tune": None,
    }


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Writes ``report.json`` and ``report.html``."""
    write_whole(folder / "report.json", json.dumps(report, indent=1) + "\n")
    write_whole(folder / "report.html", as_html(report, conclusion(report)))


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
    if original is not None and original is not best:
        faster = throughput(best) / throughput(original)
        quicker = original["profile"][0]["p50_us"] / best["profile"][0]["p50_us"]
        text += f": {quicker:.2f} times as quick as the original, with {faster:.2f} times its throughput"
    return f"{text}. Tuning: {report['tune']['sentence']}" if report["tune"] else f"{text}."


def as_text(report: Mapping[str, Any]) -> str:
    """The candidates as a table for a terminal, and the result."""
    head = ("candidate", "status", "p50 µs", "samples/s", "MiB", "largest difference")
    rows = [head, *(_cells(each) for each in report["candidates"])]
    widths = [max(len(row[at]) for row in rows) for at in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*(line.rstrip() for line in lines), "", conclusion(report)])


def _public(tensor: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tensor.items() if value != ""}


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
