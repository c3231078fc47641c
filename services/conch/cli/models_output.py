"""Output of `conch models`: tables for people, and JSON in a stable shape for machines."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from conch.process.banner import table
from conch_control.agent_api import Index, ModelDescription, ModelStatus, VersionStatus
from conch_control.events import Event
from conch_control.version_phase import Phase

_REASON_WIDTH = 60
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024


def size(count: int) -> str:
    """A number of bytes for people, such as ``3.0 MiB``."""
    value, unit = float(count), 0
    while abs(value) >= _STEP and unit < len(_UNITS) - 1:
        value, unit = value / _STEP, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def moment(seconds: float) -> str:
    """A time for people, in UTC; empty for none."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}Z" if seconds else ""
    except (OverflowError, ValueError, OSError):
        return ""


def staged(version: VersionStatus) -> str:
    """Progress of staging, such as ``40 % of 2.0 GiB``; empty if unknown."""
    if version.phase is not Phase.STAGING or version.total_bytes <= 0:
        return ""
    return f"{100 * version.done_bytes // version.total_bytes} % of {size(version.total_bytes)}"


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.fill(line, _REASON_WIDTH) for line in text.splitlines())


def models_table(models: tuple[ModelStatus, ...]) -> str:
    """All versions of all models."""
    rows = []
    for model in models:
        if not model.versions:
            rows.append([model.name, "-", "not loaded", "", "", _wrapped(model.reason)])
        for version in model.versions:
            memory = "" if version.host_bytes is None else size(version.host_bytes)
            reason = version.reason or model.reason
            stale = "(newer load failed)" if reason and version.phase is Phase.READY else ""
            state = " ".join(filter(None, (version.phase.value, staged(version), stale)))
            reason = _wrapped(reason)
            labels = [label for label, number in sorted(model.labels.items()) if number == version.version]
            number = f"{version.version} ({', '.join(labels)})" if labels else str(version.version)
            rows.append([model.name, number, state, moment(version.seconds), memory, reason])
    return table(["Model", "Version", "State", "Since", "Memory", "Reason"], rows)


def description_text(description: ModelDescription) -> str:
    """A model with its instances and its config."""
    status = description.status
    parts = [f"{status.name} from {status.location or 'nowhere now'}", models_table((status,))]
    if description.instances:
        rows = [
            [each.group, each.kind, "-" if each.device < 0 else str(each.device), str(each.count)]
            for each in description.instances
        ]
        parts.append(table(["Instance group", "Kind", "Device", "Count"], rows))
    if description.config_json:
        rows = [
            [path, json.dumps(value, ensure_ascii=False), _origin(description.origins, path)]
            for path, value in _leaves(_config(description))
        ]
        parts.append(table(["Config field", "Value", "Origin"], rows))
    return "\n".join(parts)


def event_line(event: Event) -> str:
    """An event on one line."""
    if event.rollout is not None:
        what = event.rollout
        step = f" {what.step + 1}" if what.state == "STEP" else ""
        reason = f": {' '.join(what.reason.split())}" if what.reason else ""
        found = f"rollout {what.id} {what.state}{step}, {what.weight:g} %{reason}"
        return f"{moment(event.seconds)} {event.revision:>6} {event.model} {found}"
    version = f" {event.version}" if event.version else ""
    reason = f": {' '.join(event.reason.split())}" if event.reason else ""
    return f"{moment(event.seconds)} {event.revision:>6} {event.model}{version} {event.phase.value}{reason}"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a config with their field paths; empty containers count as values."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{number}]")
    else:
        yield path, value


def _origin(origins: Mapping[str, str], path: str) -> str:
    """The origin of a field, or of the nearest enclosing field with one."""
    while path:
        if path in origins:
            return origins[path]
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return ""


def _config(description: ModelDescription) -> Any:
    try:
        return json.loads(description.config_json)
    except ValueError:
        return description.config_json


def version_json(version: VersionStatus) -> dict[str, Any]:
    """A version for machines."""
    return {
        "version": version.version,
        "phase": version.phase.value,
        "reason": version.reason,
        "seconds": version.seconds,
        "host_bytes": version.host_bytes,
        "staged_bytes": version.done_bytes,
        "staging_bytes": version.total_bytes,
    }


def model_json(model: ModelStatus) -> dict[str, Any]:
    """A model for machines."""
    return {
        "name": model.name,
        "location": model.location,
        "reason": model.reason,
        "versions": [version_json(version) for version in model.versions],
        "labels": dict(model.labels),
    }


def index_json(index: Index) -> dict[str, Any]:
    """All models for machines."""
    return {
        "epoch": index.epoch,
        "revision": index.revision,
        "models": [model_json(model) for model in index.models],
        "draining": index.draining,
    }


def description_json(description: ModelDescription) -> dict[str, Any]:
    """A description for machines."""
    return {
        "model": model_json(description.status),
        "config": _config(description) if description.config_json else None,
        "origins": dict(description.origins),
        "instances": [
            {"group": each.group, "kind": each.kind, "device": each.device, "count": each.count}
            for each in description.instances
        ],
    }


def event_json(event: Event, epoch: str) -> dict[str, Any]:
    """An event for machines."""
    return {
        "type": "event",
        "epoch": epoch,
        "revision": event.revision,
        "model": event.model,
        "version": event.version,
        "phase": event.phase.value,
        "reason": event.reason,
        "seconds": event.seconds,
        **({} if event.rollout is None else {"rollout": asdict(event.rollout)}),
    }
