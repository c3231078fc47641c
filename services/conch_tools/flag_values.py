"""Values of flags that several commands take."""

from __future__ import annotations

import json
from typing import Any


class FlagsError(Exception):
    """Flags that are wrong, or do not go together."""


def seconds_of(text: str) -> int:
    """Whole seconds of ``90``, ``90s`` or ``5m``. Raises ValueError."""
    for unit, length in (("m", 60), ("s", 1)):
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * length
    return int(text)


def shape_of(text: str) -> tuple[str, tuple[int, ...]]:
    """Name and dims of ``INPUT:DIM,DIM``. Raises FlagsError."""
    name, colon, dims = text.rpartition(":")
    try:
        if not colon or not name:
            raise ValueError
        found = tuple(int(dim) for dim in dims.split(",")) if dims else ()
        if any(dim < 0 for dim in found):
            raise ValueError
    except ValueError:
        raise FlagsError(f"--shape takes INPUT:DIM,DIM, such as IN:3,224, not '{text}'") from None
    return name, found


def parameter_of(text: str) -> tuple[str, Any]:
    """Name and value of ``NAME=VALUE``; what is no JSON is a text. Raises FlagsError."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise FlagsError(f"--parameter takes NAME=VALUE, not '{text}'")
    try:
        found = json.loads(value)
    except ValueError:
        found = value
    return name, found if isinstance(found, (bool, int, float, str)) else value
