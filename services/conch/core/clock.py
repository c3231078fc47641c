"""Clocks: monotonic nanoseconds from an injectable source, and wall-clock time."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], int]
"""Returns monotonic nanoseconds; tests inject a counter."""

monotonic_ns: Clock = time.monotonic_ns
"""The clock of a running server."""


def wall_seconds() -> float:
    """Seconds since 1970, for display only."""
    return time.time_ns() / 1e9
