"""Formats a report as text or JSON, and effective configs with the source of each value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from google.protobuf import text_encoding
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from conch_check.findings import Finding, ModelReport, Report
from conch_control.config.json_format import to_json
from conch_control.config.parse import CONFIG_FILE
from conch_control.config.problems import entry_path
from conch_control.config.schema import is_map, part_of_entry

_WIDEST = 60

_Line = tuple[str, str | None]
"""Text, and the path of its value, if any."""


def show_config(
    config: Message, origins: Mapping[str, str], place: Callable[[str], tuple[int, int]] | None = None
) -> str:
    """A config in the text format, with the source of each value as a comment."""
    lines = config_lines(config, origins, place)
    width = min(max((len(text) for text, origin in lines if origin is not None), default=0), _WIDEST)
    return "\n".join(f"{text:<{width}}  # {origin}" if origin else text for text, origin in lines)


def config_lines(
    config: Message, origins: Mapping[str, str], place: Callable[[str], tuple[int, int]] | None = None
) -> list[tuple[str, str | None]]:
    """The lines of a config in the text format, each with the source of its value; None without a value."""
    shown: list[tuple[str, str | None]] = []
    for text, path in _fields(config, "", ""):
        origin = None if path is None else origins.get(path, "")
        if path is not None and origin == CONFIG_FILE and place is not None:
            line, column = place(path)
            origin = f"{origin}:{line}:{column}"
        shown.append((text, origin))
    return shown


def _fields(config: Message, path: str, indent: str) -> Iterator[_Line]:
    fields = sorted((field for field, _ in config.ListFields()), key=lambda field: field.index)
    for field in fields:
        value = getattr(config, field.name)
        place = f"{path}.{field.name}" if path else field.name
        if is_map(field):
            for key in sorted(value):
                yield from _entry(field, key, value[key], entry_path(place, key), indent)
        elif field.message_type is None:
            yield f"{indent}{field.name}: {_values(field, value)}", place
        elif field.is_repeated:
            for number, element in enumerate(value):
                yield from _message(field.name, element, f"{place}[{number}]", indent)
        else:
            yield from _message(field.name, value, place, indent)


def _message(name: str, message: Message, path: str, indent: str) -> Iterator[_Line]:
    inside = list(_fields(message, path, f"{indent}  "))
    if not inside:
        yield f"{indent}{name} {{}}", path
        return
    yield f"{indent}{name} {{", None
    yield from inside
    yield f"{indent}}}", None


def _entry(field: FieldDescriptor, key: Any, value: Any, path: str, indent: str) -> Iterator[_Line]:
    inner = f"{indent}  "
    yield f"{indent}{field.name} {{", None
    yield f"{inner}key: {_scalar(part_of_entry(field, 'key'), key)}", None
    part = part_of_entry(field, "value")
    if part.message_type is None:
        yield f"{inner}value: {_scalar(part, value)}", path
    else:
        yield from _message("value", value, path, inner)
    yield f"{indent}}}", None


def _values(field: FieldDescriptor, value: Any) -> str:
    if not field.is_repeated:
        return _scalar(field, value)
    return f"[{', '.join(_scalar(field, element) for element in value)}]"


def _scalar(field: FieldDescriptor, value: Any) -> str:
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return str(value) if known is None else known.name
    if isinstance(value, str):
        text: Any = value  # the type stubs allow only bytes
        return f'"{text_encoding.CEscape(text, as_utf8=True)}"'
    if isinstance(value, bytes):
        return f'"{text_encoding.CEscape(value, as_utf8=False)}"'
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


FORMAT = 1
"""Version of the JSON form; incremented only by incompatible changes."""


def is_clean(report: Report, strict: bool) -> bool:
    """True if a report has no errors, nor, if strict, warnings."""
    return not (report.unreadable or report.count("error") or (strict and report.count("warning")))


def as_text(report: Report, show: bool = False) -> str:
    """A report as text."""
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
    """A report as JSON, with the effective configs if `show`; see docs/check.md."""
    return {
        "format": FORMAT,
        "clean": is_clean(report, strict),
        "errors": report.count("error"),
        "warnings": report.count("warning"),
        "repositories": list(report.repositories),
        "unreadable": dict(report.unreadable),
        "models": [_model_json(model, show) for model in report.models],
    }


def _model_json(model: ModelReport, show: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": model.name,
        "location": model.location,
        "versions": list(model.versions),
        "errors": model.count("error"),
        "warnings": model.count("warning"),
        "findings": [finding_object(finding) for finding in model.findings],
    }
    if show:
        found["config"] = None if model.config is None else to_json(model.config)
        found["origins"] = dict(model.origins)
    return found


def finding_object(finding: Finding) -> dict[str, Any]:
    """A finding as JSON; see docs/check.md."""
    return {
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


def _summary(model: ModelReport) -> str:
    versions = ", ".join(map(str, model.versions))
    counts = _counts(model)
    if counts:
        return f"{model.name}: {counts}"
    return f"{model.name}: ok, version{'s' if len(model.versions) > 1 else ''} {versions}"


def _counts(counted: ModelReport | Report) -> str:
    errors, warnings = counted.count("error"), counted.count("warning")
    counts = [_counted(errors, "error")] if errors else []
    counts += [_counted(warnings, "warning")] if warnings else []
    return ", ".join(counts)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
