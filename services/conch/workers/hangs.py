"""Notices executions that last longer than their model may take, with one timer for all of an instance's."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from conch.core.clock import Clock
from conch.workers.monitor import Monitor, Timer

_NS_PER_S = 1_000_000_000


class HangDetector:
    """Watches the executions of one instance.

    Args:
        monitor: Has the timer.
        limit_s: How long an execution may last.
        on_hang: Called on the monitor's thread with the number of an execution that has lasted longer, once
            for each; must not block.
    """

    def __init__(self, monitor: Monitor, limit_s: float, on_hang: Callable[[int], None]) -> None:
        self._monitor = monitor
        self._clock: Clock = monitor.clock
        self._limit_ns = round(limit_s * _NS_PER_S)
        self._on_hang = on_hang
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._starts: dict[int, int] = {}  # in the order of the starts, and so of the ends of their time
        self._timer: Timer | None = None

    def begin(self) -> int:
        """An execution begins; returns its number."""
        with self._lock:
            number = next(self._numbers)
            start = self._starts[number] = self._clock()
            if self._timer is None:
                self._arm(start)
        return number

    def end(self, number: int) -> None:
        """An execution has ended."""
        with self._lock:
            self._starts.pop(number, None)

    def close(self) -> None:
        """Forgets all executions."""
        with self._lock:
            self._starts.clear()
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _arm(self, start_ns: int) -> None:
        self._timer = self._monitor.at(start_ns + self._limit_ns, self._look)

    def _look(self) -> None:
        with self._lock:
            self._timer = None
            now = self._clock()
            hanging = [number for number, start in self._starts.items() if start + self._limit_ns <= now]
            for number in hanging:
                del self._starts[number]
            # Most executions end in time, so the timer is not theirs: it looks for the oldest of those left.
            oldest = next(iter(self._starts.values()), None)
            if oldest is not None:
                self._arm(oldest)
        for number in hanging:
            self._on_hang(number)
