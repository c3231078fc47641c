"""A report, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conch_control.check.findings import Checkup, Finding, Report
from conch_control.check.show import show_config
from conch_control.config.jsonform import to_json

FORMAT = 1
"""Version of the JSON form; it grows only if a member is taken away or changes its meaning."""


def is_clean(report: Report, strict: bool) -> bool:
    """Whether a report has no errors, nor, if strict, warnings."""
    return not (report.unreadable or report.count("error") or (strict and report.count("warning")))


def as_text(report: Report, show: bool = False) -> str:
    """A report as people read it.

    Args:
        report: The report.
        show: Whether to print the effective configs.
    """
    lines: list[str] = []
    for location, reason in report.unreadable.items():
        lines.append(f"{location}: error: the repository can't be read: {reason}")
    for model in report.models:
        for finding in model.findings:
            lines += _finding_lines(finding)
        lines.append(_summary(model))
        if show and model.config is not None:
            lines += ["", show_config(model.config, model.origins, model.place), ""]
    models = _counted(len(report.models), "model")
    lines.append(f"{models} checked: {_counts(report) or 'no problems'}")
    return "\n".join(lines)


def as_json(report: Report, strict: bool, show: bool = False) -> dict[str, Any]:
    """A report as programs read it; see docs/check.md.

    Args:
        report: The report.
        strict: Whether warnings count as errors.
        show: Whether to include the effective configs.
    """
    return {
        "format": FORMAT,
        "clean": is_clean(report, strict),
        "errors": report.count("error"),
        "warnings": report.count("warning"),
        "repositories": list(report.repositories),
        "unreadable": dict(report.unreadable),
        "models": [_model_json(model, show) for model in report.models],
    }


def _model_json(model: Checkup, show: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": model.name,
        "location": model.location,
        "versions": list(model.versions),
        "errors": model.count("error"),
        "warnings": model.count("warning"),
        "findings": [
            {
                "severity": finding.severity,
                "file": finding.file,
                "line": finding.line,
                "column": finding.column,
                "path": finding.path,
                "message": finding.message,
                "expected": finding.expected,
                "found": finding.found,
                "nearest": finding.nearest,
            }
            for finding in model.findings
        ],
    }
    if show:
        found["config"] = None if model.config is None else to_json(model.config)
        found["origins"] = dict(model.origins)
    return found


def _finding_lines(finding: Finding) -> Iterator[str]:
    place = f"{finding.file}:{finding.line}:{finding.column}" if finding.line else finding.file
    path = f"{finding.path}: " if finding.path else ""
    yield f"{place}: {finding.severity}: {path}{finding.message}"
    details = []
    if finding.expected:
        details.append(f"expected {finding.expected}")
    if finding.found:
        details.append(f"found {finding.found}")
    if finding.nearest:
        details.append(f"did you mean '{finding.nearest}'?")
    if details:
        yield f"    {'; '.join(details)}"


def _summary(model: Checkup) -> str:
    versions = ", ".join(map(str, model.versions))
    counts = _counts(model)
    if counts:
        return f"{model.name}: {counts}"
    return f"{model.name}: ok, version{'s' if len(model.versions) > 1 else ''} {versions}"


def _counts(counted: Checkup | Report) -> str:
    errors, warnings = counted.count("error"), counted.count("warning")
    counts = [_counted(errors, "error")] if errors else []
    counts += [_counted(warnings, "warning")] if warnings else []
    return ", ".join(counts)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
