"""Trace settings: the global one and those of models, as Triton's trace setting RPC reads and changes them.

A model's setting stores only the fields that were set; the others follow the global one. A change replaces
the `TraceSetting` of everything that it concerns, whose sampling begins anew.

Threads and locks: any thread; one lock guards changes, one in each setting what is left of its count.
Requests read without them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from conch.core.errors import InvalidArgumentError, UnsupportedError

TRITON, OPENTELEMETRY = "triton", "opentelemetry"
UNLIMITED = -1

_RANDOM = 2**56
"""Values of the bits of a trace id that are random, by W3C Trace Context: its last 7 bytes."""

_LEVELS = ("TIMESTAMPS", "TENSORS")
_RANGES: Mapping[str, tuple[int, int]] = {
    "trace_rate": (0, 2**32 - 1),
    "trace_count": (-1, 2**31 - 1),
    "log_frequency": (0, 2**32 - 1),
}
_FIELDS = {
    "trace_level": ("timestamps", "tensors"),
    "trace_rate": ("rate",),
    "trace_count": ("count",),
    "log_frequency": ("log_frequency",),
}

Fields = dict[str, bool | int]
"""Fields of `TraceValues` that are set."""


@dataclass(frozen=True, slots=True)
class TraceValues:
    """Values of a setting.

    Attributes:
        timestamps: True if times are traced.
        tensors: True if tensors are traced.
        rate: One request in `rate` is traced; 0 to trace only those that their caller or trace id samples.
        count: Traces that may still be sampled; -1 for any number.
        log_frequency: Traces in one indexed file; 0 for one file.
        file: Path of the trace file, or empty.
    """

    timestamps: bool = False
    tensors: bool = False
    rate: int = 1000
    count: int = UNLIMITED
    log_frequency: int = 0
    file: str = ""

    @property
    def on(self) -> bool:
        """True if times or tensors are traced."""
        return self.timestamps or self.tensors


class TraceSetting:
    """Values with their sampling; replaced as a whole when one changes, which begins the counting anew."""

    __slots__ = ("_lock", "_next", "_rate", "_remaining", "on", "values")

    def __init__(self, values: TraceValues) -> None:
        self.values = values
        self.on = values.on  # each request looks at it
        self._rate = values.rate
        self._remaining = values.count
        self._lock = threading.Lock()
        self._next = count(1).__next__

    @property
    def remaining(self) -> int:
        """Traces that may still be sampled; -1 for any number."""
        return self._remaining

    def sample(self) -> bool:
        """Counts a request; returns whether it is traced, and takes it off the count."""
        rate = self._rate
        if not rate or self._next() % rate:
            return False
        return True if self._remaining < 0 else self._take()

    def sample_id(self, trace_id: int, threshold: int) -> bool:
        """As `sample`, by a trace id, if there is no rate; see `ratio_threshold`."""
        if self._rate or trace_id % _RANDOM < threshold:
            return False
        return True if self._remaining < 0 else self._take()

    def _take(self) -> bool:
        with self._lock:
            if not self._remaining:
                return False
            self._remaining -= 1
            return True


def ratio_threshold(ratio: float) -> int:
    """The least randomness of the trace ids that a share of all traces has.

    As in OpenTelemetry's consistent probability sampling:
    https://opentelemetry.io/docs/specs/otel/trace/tracestate-probability-sampling/.
    """
    return _RANDOM - round(ratio * _RANDOM)


class SettingListener:
    """Hears of changes, on the thread that makes them, under the lock of the settings."""

    def setting_replaced(self, setting: TraceSetting) -> None:
        """Takes a setting that another one replaces."""

    def tracing_switched(self, on: bool) -> None:
        """Takes whether anything is traced, after each change."""


class TraceSettings:
    """Global and per-model trace settings.

    Args:
        values: The global values of the command line, to which cleared ones return.
        mode: ``triton`` or ``opentelemetry``.
        shown: Further settings of the mode as the RPC shows them, which can't be changed.
        without_file: True if mode ``triton`` may trace times without a file, as they are kept in memory too.

    Attributes:
        on: True if any model is traced.
    """

    def __init__(
        self,
        values: TraceValues | None = None,
        mode: str = TRITON,
        shown: Mapping[str, tuple[str, ...]] | None = None,
        without_file: bool = False,
    ) -> None:
        self._first = values or TraceValues()
        self.mode = mode
        self._shown = dict(shown or {})
        self._without_file = without_file
        self._lock = threading.Lock()
        self._global_fields: Fields = {}
        self._global = TraceSetting(self._first)
        self._fields: dict[str, Fields] = {}
        self._models: dict[str, TraceSetting] = {}
        self._listeners: list[SettingListener] = []
        self.on = self._first.on

    def add_listener(self, listener: SettingListener) -> None:
        """Has an object hear of changes from now on."""
        self._listeners.append(listener)

    @property
    def models(self) -> list[str]:
        """The models with own settings."""
        return list(self._models)

    def of(self, model: str) -> TraceSetting:
        """The setting that samples a model's requests."""
        return self._models.get(model, self._global)

    def settings(self, model: str = "") -> dict[str, tuple[str, ...]]:
        """All settings of a model, or the global ones, as the RPC shows them."""
        setting = self.of(model) if model else self._global
        values = setting.values
        levels = [name for name, on in zip(_LEVELS, (values.timestamps, values.tensors), strict=True) if on]
        shown: dict[str, tuple[str, ...]] = {
            "trace_level": tuple(levels) or ("OFF",),
            "trace_rate": (str(values.rate),),
            "trace_count": (str(setting.remaining),),
        }
        if self.mode == TRITON:
            shown["log_frequency"] = (str(values.log_frequency),)
            shown["trace_file"] = (values.file,)
        return {**shown, "trace_mode": (self.mode,), **self._shown}

    def update(self, changes: Mapping[str, Sequence[str]], model: str = "") -> dict[str, tuple[str, ...]]:
        """Changes settings: all of them, or none if one is wrong.

        Args:
            changes: Values by name; an empty one resets a model's setting to the global one, and a global one
                to the command line's. Like Triton, ignores unknown names.
            model: The model; empty for the global settings.

        Returns:
            All settings in effect.

        Raises:
            UnsupportedError: A setting can't be changed.
            InvalidArgumentError: A value is invalid.
        """
        if "trace_file" in changes:
            raise UnsupportedError("trace file location can not be updated through network protocol")
        set_, cleared = _checked(changes)
        if set_ or cleared:
            with self._lock:
                self._change(set_, cleared, model)
        return self.settings(model)

    def own(self, model: str = "") -> Fields:
        """The fields that were set, of a model or of the global setting; see `restore`."""
        with self._lock:
            return dict(self._fields.get(model, {}) if model else self._global_fields)

    def restore(self, fields: Fields, model: str = "") -> None:
        """Sets the fields that `own` gave, and clears all others.

        Raises:
            InvalidArgumentError: They would trace nothing.
        """
        cleared = {name for names in _FIELDS.values() for name in names} - fields.keys()
        with self._lock:
            self._change(fields, cleared, model)

    def _change(self, set_: Fields, cleared: set[str], model: str) -> None:
        before = self._fields.get(model, {}) if model else self._global_fields
        fields = {name: value for name, value in {**before, **set_}.items() if name not in cleared}
        if model:
            values = _merged(self._global.values, fields)
            # What is left of the count is the model's own unless it is set anew.
            self._check(values)
            self._replace_model(model, fields, values)
        else:
            values = _merged(self._first, fields)
            self._check(values)
            self._global_fields = fields
            replaced, self._global = self._global, TraceSetting(values)
            self._replaced(replaced)
            for name, own in list(self._fields.items()):
                self._replace_model(name, own, _merged(values, own))
        self.on = self._global.values.on or any(each.values.on for each in self._models.values())
        for listener in self._listeners:
            listener.tracing_switched(self.on)

    def _replace_model(self, model: str, fields: Fields, values: TraceValues) -> None:
        replaced = self._models.get(model)
        if fields:
            self._fields[model] = fields
            if replaced is not None and replaced.values == values:
                return
            self._models[model] = TraceSetting(values)
        else:
            self._fields.pop(model, None)
            self._models.pop(model, None)
        if replaced is not None:
            self._replaced(replaced)

    def _replaced(self, setting: TraceSetting) -> None:
        for listener in self._listeners:
            listener.setting_replaced(setting)

    def _check(self, values: TraceValues) -> None:
        """Refuses values that would trace nothing."""
        if not values.on:
            return
        reason = ""
        if self.mode == TRITON and not values.file and (values.tensors or not self._without_file):
            reason = "trace file name is not given"
        elif self.mode == TRITON and not values.rate:
            reason = "sample rate must be non-zero"
        elif not values.count:
            reason = "no traces are left of trace_count; set it, too"
        elif values.tensors and self.mode == OPENTELEMETRY:
            reason = "Tensor level tracing is not supported by the mode: opentelemetry"
        if reason:
            raise InvalidArgumentError(f"Attempting to set invalid trace setting :{reason}")


def _merged(values: TraceValues, fields: Fields) -> TraceValues:
    return replace(values, **fields)  # type: ignore[arg-type]


def _checked(changes: Mapping[str, Sequence[str]]) -> tuple[Fields, set[str]]:
    """Fields with their new values, and fields that are cleared."""
    set_: Fields = {}
    cleared: set[str] = set()
    if "trace_level" in changes:
        levels = changes["trace_level"]
        if "OFF" in levels and len(levels) > 1:
            raise InvalidArgumentError("Expect only one trace level 'OFF' is specified")
        if not levels:
            cleared.update(_FIELDS["trace_level"])
        elif "OFF" in levels or any(level in _LEVELS for level in levels):
            set_["timestamps"], set_["tensors"] = (name in levels for name in _LEVELS)
    for name in _RANGES:
        if name in changes:
            values = changes[name]
            if values:
                set_[_FIELDS[name][0]] = _number(name, values)
            else:
                cleared.update(_FIELDS[name])
    return set_, cleared


def _number(name: str, values: Sequence[str]) -> int:
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
    return value
