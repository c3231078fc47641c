"""Durations on the command line."""

from __future__ import annotations


def seconds_of(text: str) -> int:
    """Whole seconds of ``90``, ``90s`` or ``5m``. Raises ValueError."""
    for unit, length in (("m", 60), ("s", 1)):
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * length
    return int(text)
