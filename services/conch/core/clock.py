"""Time as the core sees it: monotonic nanoseconds from an injected source."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], int]
"""Returns monotonic time in nanoseconds; tests pass a function over a counter."""

monotonic_ns: Clock = time.monotonic_ns
"""The clock of a running server."""


def wall_seconds() -> float:
    """Seconds since 1970: for people to read, never to measure with."""
    return time.time_ns() / 1e9
