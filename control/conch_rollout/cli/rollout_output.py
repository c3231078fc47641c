"""Output of `conch rollout` for people."""

from __future__ import annotations

from collections.abc import Sequence

from conch.cli.models_output import moment
from conch.core.rollouts import RolloutReport, RolloutSide, RolloutTransition
from conch.process.banner import table

Rows = tuple[list[str], list[list[str]]]
"""Header and rows of a table."""


def rollout_line(report: RolloutReport) -> str:
    """A rollout on one line."""
    reason = f": {' '.join(report.reason.split())}" if report.reason else ""
    return f"{report.model}: {_state(report)}{_versions(report)}{reason}"


def report_text(report: RolloutReport) -> str:
    """A rollout with its versions, counters and verdict."""
    lines = [rollout_line(report)]
    if report.step_seconds:
        lines.append(f"since {_seconds(report.seconds)} of {_seconds(report.step_seconds)}")
    if report.sides:
        lines.append(table(*sides(report)).rstrip())
    return "\n".join([*lines, *findings(report)])


def sides(report: RolloutReport) -> Rows:
    """Versions with their counters."""
    return ["Version", "Role", "Traffic", "Requests", "Failures", "p99"], list(map(_side, report.sides))


def findings(report: RolloutReport) -> list[str]:
    """Verdict, note, versions that are held out and labels, a line each."""
    lines = []
    if report.compared:
        lines.append(f"shadow: {report.mismatched:,} of {report.compared:,} pairs differ")
    for name, text in (("verdict", report.verdict), ("note", report.note)):
        if text:
            lines.append(f"{name}: {text}")
    if report.refused:
        lines.append(f"held out: {', '.join(map(str, report.refused))}")
    if report.labels:
        labels = ", ".join(f"{label} = {version}" for label, version in sorted(report.labels.items()))
        lines.append(f"labels: {labels}")
    return lines


def rollouts_table(reports: Sequence[RolloutReport]) -> str:
    """All rollouts."""
    rows = [
        [
            each.model,
            _state(each),
            _number(each.stable),
            _number(each.candidate),
            _shares(each) if "split" in each.declaration else f"{each.weight:g} %",
            ", ".join(f"{label} = {version}" for label, version in sorted(each.labels.items())),
        ]
        for each in reports
    ]
    return table(["Model", "State", "Stable", "Candidate", "Weight", "Labels"], rows)


def history_rows(history: Sequence[RolloutTransition]) -> Rows:
    """Changes of a model's rollouts."""
    rows = [
        [
            moment(each.seconds),
            str(each.id),
            f"{each.state} {each.step + 1}" if each.state == "STEP" else each.state,
            _number(each.stable),
            _number(each.candidate),
            f"{each.weight:g} %",
            " ".join(each.reason.split()),
        ]
        for each in history
    ]
    return ["Time", "Rollout", "State", "Stable", "Candidate", "Weight", "Reason"], rows


def _state(report: RolloutReport) -> str:
    if report.state in ("STEP", "PAUSED") and report.step < len(report.steps):
        return f"{report.state} {report.step + 1} of {len(report.steps)} ({report.steps[report.step]})"
    return report.state if report.declaration else "labels"


def _versions(report: RolloutReport) -> str:
    if report.stable is None:
        return ""
    if "split" in report.declaration:
        return f", {_shares(report)}"
    if report.candidate is None:
        return f", version {report.stable}"
    return f", version {report.candidate} beside {report.stable}, {report.weight:g} %"


def _shares(report: RolloutReport) -> str:
    """The declared shares of a split."""
    return ", ".join(
        f"version {version} {share:g} %" for version, share in report.declaration["split"].items()
    )


def _side(side: RolloutSide) -> list[str]:
    p99 = "" if side.p99_ms is None else f"{side.p99_ms:.3g} ms"
    traffic = f"{side.traffic:g} %"
    return [str(side.version), side.role, traffic, f"{side.requests:,}", f"{side.failures:,}", p99]


def _number(version: int | None) -> str:
    return "-" if version is None else str(version)


def _seconds(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
