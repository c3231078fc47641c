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


def whole_number(text: str) -> int:
    """A whole number. Raises argparse.ArgumentTypeError: it is none."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None


def integer(least: int, most: int | None = None, name: str = "integer") -> ValueType[int]:
    """A whole number within limits."""

    def parse(text: str) -> int:
        value = whole_number(text)
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


TEXT = ValueType("text", str)
BOOL = ValueType("bool", parse_bool, "bool | str")
FILE = ValueType("file", Path, "Path | str")
DIRECTORY = ValueType("directory", Path, "Path | str")
NATURAL = integer(0)
POSITIVE = integer(1)
ANY_PORT = ValueType("port", whole_number, "int | str")
"""A port whose range is checked only if its protocol is on."""
PORT = integer(0, MOST_PORT, "port")
DURATION = ValueType("number", _duration, "float | str")
INTERVAL = ValueType("number", _interval, "float | str")
