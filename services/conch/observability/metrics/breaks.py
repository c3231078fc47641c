"""Breaks in a long computation, in which other threads get to run."""

from __future__ import annotations

import threading
from collections.abc import Callable

from conch.core.clock import Clock, monotonic_ns

_SLICE_NS = 2_000_000
_BREAK_S = 0.0005


class Breaks:
    """Has the thread that computes step back every 2 ms.

    Python lets a thread that computes run for 5 ms before another one gets its turn, each time that one has
    waited for anything: a request waits for several things. A short wait here, which somebody else's turn
    ends too, costs a scrape a few milliseconds and requests nothing.

    Args:
        clock: Monotonic time in nanoseconds.
        wait: Waits so many seconds; by default for something that never happens.
    """

    def __init__(self, clock: Clock = monotonic_ns, wait: Callable[[float], object] | None = None) -> None:
        self._clock = clock
        self._wait = threading.Event().wait if wait is None else wait
        self._since = clock()

    def begin(self) -> None:
        """Says that the computation begins."""
        self._since = self._clock()

    def step(self) -> None:
        """Steps back if it is time to; to be called between short pieces of work."""
        if self._clock() - self._since >= _SLICE_NS:
            self._wait(_BREAK_S)
            self._since = self._clock()
