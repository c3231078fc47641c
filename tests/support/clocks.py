"""Clocks that tests set, or let run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from conch.core.clock import monotonic_ns


class Clock:
    """A clock that stands still unless it is moved.

    Attributes:
        now: Time that it shows.
    """

    def __init__(self, now: int = 0) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now


class PausedClock:
    """Monotonic time that stands still unless it is let run; usable from any thread.

    What a test does while it stands still takes no time, however busy the machine is.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stood_at = monotonic_ns()
        self._running_since: int | None = None

    def __call__(self) -> int:
        with self._lock:
            return self._now()

    def _now(self) -> int:
        ran = 0 if self._running_since is None else monotonic_ns() - self._running_since
        return self._stood_at + ran

    def advance(self, ns: int) -> None:
        """Moves it."""
        with self._lock:
            self._stood_at += ns

    @contextmanager
    def running(self) -> Iterator[None]:
        """Lets it run for one block."""
        with self._lock:
            self._running_since = monotonic_ns()
        try:
            yield
        finally:
            with self._lock:
                self._stood_at, self._running_since = self._now(), None
