"""Types of settings: their names in the help, and their parsers with Triton's error texts."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


class NoEffectError(argparse.ArgumentTypeError):
    """A value that Triton takes has no effect here; `reason` says why."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


_LONGEST_S = 1e9
MOST_PORT = 65535


@dataclass(frozen=True, slots=True)
class ValueType(Generic[T]):
    """The type of one value; `parse` raises `argparse.ArgumentTypeError`.

    `python` is the annotation of the keyword, which accepts texts too.
    """

    name: str
    parse: Callable[[str], T]
    python: str = "str"


def parse_bool(text: str) -> bool:
    """A boolean as Triton writes it. Raises argparse.ArgumentTypeError: it is none."""
    value = text.strip().lower()
    if value in ("true", "on", "1"):
        return True
    if value in ("false", "off", "0"):
        return False
    raise argparse.ArgumentTypeError(f"invalid value for bool option: {text}")


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None


def integer(least: int, most: int | None = None, name: str = "integer") -> ValueType[int]:
    """A whole number within limits."""

    def parse(text: str) -> int:
        value = _integer(text)
        if value < least or (most is not None and value > most):
            limits = f"at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"must be {limits}, got {value}")
        return value

    return ValueType(name, parse, "int | str")


def _duration(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds") from None
    if not 0 <= value <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"must be from 0 to {_LONGEST_S:.0f} seconds, got {text}")
    return value


def _interval(text: str) -> float:
    value = _duration(text)
    if not value:
        raise argparse.ArgumentTypeError(f"must be more than 0 seconds, got {text}")
    return value


def _capability(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a compute capability, such as 6.0")
    return value


def _repository(text: str) -> str | Path:
    return text if "://" in text else Path(text)  # a Path merges the two slashes


def _config_name(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("Error: empty argument for --model-config-name")
    return text


def _input_size(text: str) -> int:
    value = _integer(text)
    if value <= 0:
        raise argparse.ArgumentTypeError("Error: --http-max-input-size must be greater than 0.")
    return value


def _http_threads(text: str) -> int:
    value = _integer(text)
    if value not in (1, 8):
        reason = "one thread serves all connections"
        raise NoEffectError(reason, f"{reason}, so {value} has no effect; leave it out")
    return value


@dataclass(frozen=True, slots=True)
class PortRange:
    """The ports from one to another."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    def __contains__(self, port: int) -> bool:
        return self.first <= port <= self.last


def _port_range(text: str) -> PortRange:
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) <= MOST_PORT):
        raise argparse.ArgumentTypeError(
            f"must be of the form <first>-<last>, from 1 to {MOST_PORT}, got {text}"
        )
    return PortRange(int(first), int(last))


def _route(text: str) -> str:
    if not text.startswith("/") or "?" in text or not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError(f"must be a path that begins with /, got '{text}'")
    return text


def _pool(text: str) -> str:
    device, _, size = text.rpartition(":")
    for part in (device or "0", size):
        NATURAL.parse(part)
    return text


TEXT = ValueType("text", str)
BOOL = ValueType("bool", parse_bool, "bool | str")
FILE = ValueType("file", Path, "Path | str")
DIRECTORY = ValueType("directory", Path, "Path | str")
REPOSITORY = ValueType("location", _repository, "Path | str")
NATURAL = integer(0)
POSITIVE = integer(1)
ANY_PORT = ValueType("port", _integer, "int | str")
"""A port whose range is checked only if its protocol is on."""
PORT = integer(0, MOST_PORT, "port")
PORT_RANGE = ValueType("range", _port_range, "str")
ROUTE = ValueType("path", _route)
DURATION = ValueType("number", _duration, "float | str")
INTERVAL = ValueType("number", _interval, "float | str")
CAPABILITY = ValueType("number", _capability, "float | str")
CONFIG_NAME = ValueType("text", _config_name)
INPUT_SIZE = ValueType("integer", _input_size, "int | str")
HTTP_THREADS = ValueType("integer", _http_threads, "int | str")
POOL = ValueType("size", _pool)
"""Bytes, or ``<GPU>:<bytes>``."""
