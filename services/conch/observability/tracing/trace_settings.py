"""Trace settings of the protocols, as in a Triton started without a trace file.

Rates and counts can be read and changed; a level that would start tracing is refused. Nothing is traced. One
lock guards the settings. Used by: `grpc_front_end`, `operation_handlers`, `server`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence

from conch.core.errors import InvalidArgumentError, UnsupportedError

_DEFAULTS: Mapping[str, tuple[str, ...]] = {
    "trace_mode": ("triton",),
    "trace_file": ("",),
    "trace_level": ("OFF",),
    "trace_rate": ("1000",),
    "trace_count": ("-1",),
    "log_frequency": ("0",),
}
_RANGES: Mapping[str, tuple[int, int]] = {
    "trace_rate": (0, 2**32 - 1),
    "trace_count": (-1, 2**31 - 1),
    "log_frequency": (0, 2**32 - 1),
}
_TRACING = ("TIMESTAMPS", "TENSORS")


class TraceSettings:
    """Global and per-model trace settings; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed: dict[str, dict[str, tuple[str, ...]]] = {}  # by model, "" for the global ones

    @property
    def models(self) -> list[str]:
        """The models with own settings."""
        return [model for model in self._changed if model]

    def settings(self, model: str = "") -> dict[str, tuple[str, ...]]:
        """All settings of a model, or the global ones; a model inherits unset ones."""
        with self._lock:
            return self._settings(model)

    def update(self, changes: Mapping[str, Sequence[str]], model: str = "") -> dict[str, tuple[str, ...]]:
        """Changes settings: all of them, or none if one is wrong.

        Args:
            changes: Values by name; an empty one resets a model's setting to the global one, and a global one
                to its default. Like Triton, ignores unknown names.
            model: The model; empty for the global settings.

        Returns:
            All settings in effect.

        Raises:
            UnsupportedError: A setting can't be changed.
            InvalidArgumentError: A value is invalid.
        """
        if "trace_file" in changes:
            raise UnsupportedError("trace file location can not be updated through network protocol")
        checked = _checked(changes)
        with self._lock:
            own = self._changed.setdefault(model, {}) if checked else {}
            for name, value in checked.items():
                if value is None:
                    own.pop(name, None)
                else:
                    own[name] = value
            return self._settings(model)

    def _settings(self, model: str) -> dict[str, tuple[str, ...]]:
        own = self._changed.get(model, {}) if model else {}
        return {**_DEFAULTS, **self._changed.get("", {}), **own}


def _checked(changes: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...] | None]:
    """New values by name; None for a reset."""
    checked: dict[str, tuple[str, ...] | None] = {}
    tracing = False
    if "trace_level" in changes:
        levels = changes["trace_level"]
        if "OFF" in levels and len(levels) > 1:
            raise InvalidArgumentError("Expect only one trace level 'OFF' is specified")
        tracing = any(level in _TRACING for level in levels)
        checked["trace_level"] = ("OFF",) if levels else None
    for name in _RANGES:
        if name in changes:
            checked[name] = _number(name, changes[name])
    if tracing:
        raise InvalidArgumentError("Attempting to set invalid trace setting :trace file name is not given")
    return checked


def _number(name: str, values: Sequence[str]) -> tuple[str, ...] | None:
    if not values:
        return None
    if len(values) > 1:
        raise InvalidArgumentError(f"expect only 1 value for '{name}'")
    (text,) = values
    if not re.fullmatch("[+-]?[0-9]+", text, re.ASCII):
        raise InvalidArgumentError(f"Unable to parse '{name}', got: {text}")
    least, most = _RANGES[name]
    # Python refuses to parse thousands of digits; no such number is in range.
    value = int(text) if len(text.lstrip("+-0")) <= len(str(most)) else most + 1
    if name == "trace_count" and -(2**31) <= value < least:
        raise InvalidArgumentError(f"Unable to parse '{name}'. Expecting value >= -1, got: {text}")
    if not least <= value <= most:
        raise InvalidArgumentError(
            f"Unable to parse '{name}', value is out of range [ {least}, {most} ], got: {text}"
        )
    return (str(value),)
