"""Checks of sampling parameters; errors name the field."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

from conch.core.errors import InvalidArgumentError

_MOST = sys.float_info.max


class Range(NamedTuple):
    """Least and most value of a number."""

    least: float
    most: float
    above: bool = False  # whether the least itself is refused


def number(name: str, value: Any, limits: Range) -> float:
    """A finite number. Raises InvalidArgumentError: it is none, or out of its range."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST
    if fits and limits.least <= value <= limits.most and not (limits.above and value == limits.least):
        return float(value)
    least = f"above {limits.least}" if limits.above else f"at least {limits.least}"
    most = "" if limits.most == math.inf else f" and at most {limits.most}"
    raise InvalidArgumentError(f"{name}: must be a number of {least}{most}, not {value!r}")


def whole(name: str, value: Any, least: int) -> int:
    """A whole number. Raises InvalidArgumentError: it is none, or too small."""
    if type(value) is int and value >= least:
        return value
    raise InvalidArgumentError(f"{name}: must be an integer of at least {least}, not {value!r}")


def switch(name: str, value: Any, default: bool) -> bool:
    """True or false; the default for None. Raises InvalidArgumentError: it is neither."""
    if value is None:
        return default
    if isinstance(value, bool):
        return value
    raise InvalidArgumentError(f"{name}: must be true or false, not {value!r}")
