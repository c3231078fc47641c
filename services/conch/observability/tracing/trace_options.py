"""Options of tracing, out of ``--trace-config`` and Triton's older flags."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import ClassVar

from conch.core.errors import InvalidArgumentError
from conch.observability.tracing.trace_settings import OPENTELEMETRY, TRITON, TraceValues
from conch.settings.option import SECRET_OPTION, option
from conch.settings.value_types import TEXT

_MODES = (TRITON, OPENTELEMETRY)
_GLOBAL = ("mode", "level", "rate", "count", "slow", "failed", "limit")
_FILE = ("file", "log-frequency")
_FORMAT = "--trace-config option format is '<trace mode>,<setting>=<value>'. Got "
_NO_MODE = (
    "No trace mode specified. --trace-config option format is <trace mode>,<setting>=<value> or "
    "<setting>=<value>. Got "
)
_ON = frozenset({"true", "on", "min", "max", "timestamps"})
_OFF = frozenset({"false", "off"})
_UNITS_NS = {"us": 10**3, "ms": 10**6, "s": 10**9}
_MOST = {"rate": 2**32 - 1, "count": 2**31 - 1, "log-frequency": 2**32 - 1, "limit": 10**6}

OLD_FLAGS: Mapping[str, str] = {
    "trace-file": "file",
    "trace-level": "level",
    "trace-rate": "rate",
    "trace-count": "count",
    "trace-log-frequency": "log-frequency",
}
"""Triton's older flags, and the settings of ``--trace-config`` that replace them."""

_NEWER = {
    "file": "triton,file=<filepath>",
    "level": "level=<OFF|TIMESTAMPS|TENSORS>",
    "rate": "rate=<rate value>",
    "count": "count=<count value>",
    "log-frequency": "triton,log-frequency=<log frequency value>",
}


@dataclass(frozen=True, slots=True)
class TailRules:
    """Rules that keep traces of requests that were not sampled (tail sampling).

    Attributes:
        slow_ns: Keeps requests that take longer; 0 for none.
        failed: True to keep requests that end with an error, refused ones included.
        limit: Maximum traces kept by these rules in a second.
    """

    slow_ns: int = 0
    failed: bool = False
    limit: int = 100

    def __bool__(self) -> bool:
        return self.failed or self.slow_ns > 0


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Trace settings at the start, and where traces go.

    Attributes:
        mode: ``triton`` or ``opentelemetry``.
        values: The global setting.
        exporter: Settings of the mode ``opentelemetry``, in order.
        tail: Requests that are kept after the fact.
        warnings: Warnings about the flags.
    """

    mode: str = TRITON
    values: TraceValues = field(default_factory=TraceValues)
    exporter: tuple[tuple[str, str], ...] = ()
    tail: TailRules = field(default_factory=TailRules)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TraceFlags:
    """Tracing, as the flags give it."""

    GROUP: ClassVar = "traces"

    config: tuple[str, ...] = option(
        "--trace-config",
        TEXT,
        help="<setting>=<value> or <mode>,<setting>=<value>, such as level=TIMESTAMPS, rate=100, "
        "triton,file=trace.json, mode=opentelemetry; see docs/tracing.md",
        repeatable=True,
        secret=SECRET_OPTION,
    )
    file: tuple[str, ...] = option(
        "--trace-file", TEXT, repeatable=True, replaced_by="trace-config=triton,file=PATH"
    )
    level: tuple[str, ...] = option(
        "--trace-level", TEXT, repeatable=True, replaced_by="trace-config=level=LEVEL"
    )
    rate: tuple[str, ...] = option("--trace-rate", TEXT, repeatable=True, replaced_by="trace-config=rate=N")
    count: tuple[str, ...] = option(
        "--trace-count", TEXT, repeatable=True, replaced_by="trace-config=count=N"
    )
    log_frequency: tuple[str, ...] = option(
        "--trace-log-frequency", TEXT, repeatable=True, replaced_by="trace-config=triton,log-frequency=N"
    )

    def options(self, without_file: bool) -> TraceOptions:
        """The options. Raises InvalidArgumentError: a flag is wrong."""
        old = {flag: getattr(self, key.replace("-", "_")) for flag, key in OLD_FLAGS.items()}
        return trace_options(self.config, {flag: given for flag, given in old.items() if given}, without_file)


def trace_options(
    configs: Iterable[str], old: Mapping[str, Sequence[str]], without_file: bool = False
) -> TraceOptions:
    """The options of flags.

    Args:
        configs: Values of ``--trace-config``.
        old: Values of `OLD_FLAGS` that were given, by flag.
        without_file: True if mode ``triton`` may trace times without a file, as the console keeps them.

    Raises:
        InvalidArgumentError: One of them is wrong; the text is Triton's where it has one.
    """
    given: dict[str, list[str]] = {}
    exporter: list[tuple[str, str]] = []
    for text in configs:
        mode, key, value = _split(text)
        if mode == OPENTELEMETRY:
            exporter.append((key, value))
        else:
            known = _FILE if mode == TRITON else _GLOBAL
            if key not in known:
                raise InvalidArgumentError(_unknown(text, key, known))
            given.setdefault(key, []).append(value)
    mode = _mode(given)
    warnings = _add_old(given, old, mode)
    if mode == TRITON and exporter:
        warnings.append("settings of the trace mode 'opentelemetry' have no effect with mode=triton")
    by_ratio = mode == OPENTELEMETRY and any(key == "ratio" for key, _ in exporter)
    if by_ratio and "rate" in given:
        raise InvalidArgumentError(
            'Bad option: "--trace-config opentelemetry,ratio".\nit takes the place of rate: leave one out'
        )
    levels = [_level(level) for level in given.get("level", ())]
    timestamps = any("timestamps" in level for level in levels)
    tensors = any("tensors" in level for level in levels)
    if (timestamps or tensors) and any(not level for level in levels):
        warnings.append("--trace-config level=OFF has no effect beside other levels")
    values = TraceValues(
        timestamps,
        tensors,
        _number(given, "rate", 0, 0 if by_ratio else 1000),
        _number(given, "count", -1, -1),
        _number(given, "log-frequency", 0, 0) if mode == TRITON else 0,
        given.get("file", [""])[-1] if mode == TRITON else "",
    )
    tail = TailRules(
        _duration_ns(given, "slow"), _flag(given, "failed"), _number(given, "limit", 1, TailRules().limit)
    )
    if mode == TRITON and not values.file and (tensors or (timestamps and not without_file)):
        # Triton serves then, and traces nothing.
        warnings.append("nothing is traced: trace file name is not given: --trace-config triton,file=PATH")
        values = replace(values, timestamps=False, tensors=False)
    _check(mode, values, tail, warnings)
    return TraceOptions(mode, values, tuple(exporter), tail, tuple(warnings))


def _split(text: str) -> tuple[str, str, str]:
    """Mode (empty for a global setting), key and value."""
    mode, comma, rest = text.partition(",")
    if not comma or ("=" in mode and "=" not in rest):
        mode, rest = "", text
    elif not mode:
        raise InvalidArgumentError(_NO_MODE + text)
    key, equals, value = rest.partition("=")
    if not (equals and key and value):
        raise InvalidArgumentError(_FORMAT + text)
    if mode:
        mode = _known_mode(mode)
    return mode, key, value


def _known_mode(text: str) -> str:
    mode = text.lower()
    if mode not in _MODES:
        raise InvalidArgumentError(
            f'invalid value for trace mode option: {text}. Available options are "triton" and "opentelemetry"'
        )
    return mode


def _mode(given: Mapping[str, list[str]]) -> str:
    return _known_mode(given["mode"][-1]) if "mode" in given else TRITON


def _unknown(text: str, key: str, known: Sequence[str]) -> str:
    nearest = get_close_matches(key, known, 1)
    hint = f"; did you mean '{nearest[0]}'?" if nearest else ""
    return f"--trace-config {text}: unknown setting '{key}', known are {', '.join(known)}{hint}"


def _add_old(given: dict[str, list[str]], old: Mapping[str, Sequence[str]], mode: str) -> list[str]:
    """Adds values of older flags where no newer one has them; returns warnings."""
    warnings = []
    for flag, values in old.items():
        key = OLD_FLAGS[flag]
        if mode == OPENTELEMETRY and key in _FILE:
            warnings.append(f"'--{flag}' is deprecated and will be ignored with opentelemetry tracing mode.")
            continue
        warnings.append(
            f"'--{flag}' has been deprecated and will be removed in future releases. Please use "
            f"'--trace-config {_NEWER[key]}' instead."
        )
        if key in given:
            what = f"{key} value in" if key == "rate" else f"{key} in"
            warnings.append(f"Overriding deprecated '--{flag}' in favor of provided {what} --trace-config!")
        elif key == "level" and any(not _level(value) for value in values):
            given[key] = ["OFF"]  # one OFF wins, unlike with the newer flag
        else:
            given[key] = list(values)
    return warnings


def _level(text: str) -> tuple[str, ...]:
    lower = text.lower()
    if lower in _ON:
        return ("timestamps",)
    if lower == "tensors":
        return ("tensors",)
    if lower not in _OFF:
        raise InvalidArgumentError(f"invalid value for trace level option: {text}")
    return ()


def _number(given: Mapping[str, list[str]], key: str, least: int, default: int) -> int:
    if key not in given:
        return default
    text = given[key][-1]
    if not re.fullmatch("[+-]?[0-9]{1,12}", text, re.ASCII) or not least <= int(text) <= _MOST[key]:
        prefix = "triton," if key in _FILE else ""
        raise InvalidArgumentError(
            f'Bad option: "--trace-config {prefix}{key}".\n'
            f"it must be a whole number from {least} to {_MOST[key]}, got: {text}"
        )
    return int(text)


def _duration_ns(given: Mapping[str, list[str]], key: str) -> int:
    if key not in given:
        return 0
    text = given[key][-1]
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(us|ms|s)", text, re.ASCII)
    if found is None or not float(found[1]):
        raise InvalidArgumentError(
            f'Bad option: "--trace-config {key}".\nit must be a time as 250ms or 1.5s, got: {text}'
        )
    return round(float(found[1]) * _UNITS_NS[found[2]])


def _flag(given: Mapping[str, list[str]], key: str) -> bool:
    text = given.get(key, ["false"])[-1].lower()
    if text not in ("true", "false"):
        raise InvalidArgumentError(
            f'Bad option: "--trace-config {key}".\nit must be true or false, got: {text}'
        )
    return text == "true"


def _check(mode: str, values: TraceValues, tail: TailRules, warnings: list[str]) -> None:
    """Refuses what can't be traced, and warns of what would trace nothing."""
    if values.tensors and mode == OPENTELEMETRY:
        raise InvalidArgumentError(
            "Tensor level tracing is not supported by the mode: opentelemetry; use level=TIMESTAMPS"
        )
    if values.on and mode == TRITON and not values.rate:
        raise InvalidArgumentError("sample rate must be non-zero: --trace-config rate=1")
    if not values.on and (mode == OPENTELEMETRY or tail):
        warnings.append("nothing is traced until a level is set: --trace-config level=TIMESTAMPS")
