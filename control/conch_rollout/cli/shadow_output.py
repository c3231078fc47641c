"""The report of a shadow for people; see `Shadow.as_json` for its fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conch.process.banner import table
from conch_rollout.cli.rollout_output import Rows

_FIGURES = ("within", "max_abs", "cosine", "top")


def shadow_text(report: Mapping[str, Any]) -> str:
    """Counters of a shadow, and its worst pairs."""
    names, rows = worst_pairs(report)
    return "\n".join([*shadow_lines(report), *([table(names, rows).rstrip()] if rows else ())])


def shadow_lines(report: Mapping[str, Any]) -> list[str]:
    """Counters of a shadow, and of its pairs."""
    dropped = sum(report["dropped"].values())
    return [
        f"shadow of version {report['version']}: {report['requests']:,} copies, {report['failures']:,} of "
        f"them failed; {dropped:,} dropped{_by(report['dropped'])}",
        f"pairs: {report['compared']:,} compared, {report['mismatches']:,} differ{_by(report['kinds'])}",
    ]


def worst_pairs(report: Mapping[str, Any]) -> Rows:
    """The worst pairs of a shadow, a row for each output."""
    rows = [
        [
            pair["request_id"],
            each["output"],
            each.get("difference", ""),
            *(_number(each, name) for name in _FIGURES),
            each.get("note", ""),
        ]
        for pair in report["worst"]
        for each in pair["outputs"]
    ]
    return ["Request", "Output", "Differs by", "Within", "Max abs", "Cosine", "Top", ""], rows


def _by(counts: Mapping[str, int]) -> str:
    shown = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))
    return f" ({shown})" if shown else ""


def _number(figures: Mapping[str, Any], name: str) -> str:
    if name not in figures:
        return ""
    value = figures[name]
    return "infinite" if value is None else f"{value:.6g}"
