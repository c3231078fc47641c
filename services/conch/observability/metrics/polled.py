"""What is read at most so often, however often somebody scrapes."""

from __future__ import annotations

from collections.abc import Callable

from conch.core.clock import Clock, monotonic_ns
from conch.observability.metrics.text import Family

Source = Callable[[], list[tuple[Family, list[str]]]]
"""Gives families with their samples."""


class Polled:
    """A source that is asked when somebody scrapes and its answer is older than the interval.

    Nothing is read for nobody, and rates are those between two scrapes where those are further apart.

    Args:
        source: The source.
        interval_ns: The interval.
        clock: Monotonic time in nanoseconds.
    """

    def __init__(self, source: Source, interval_ns: int, clock: Clock = monotonic_ns) -> None:
        self._source = source
        self._interval_ns = interval_ns
        self._clock = clock
        self._found: list[tuple[Family, list[str]]] | None = None
        self._read_ns = 0

    def __call__(self) -> list[tuple[Family, list[str]]]:
        """The families with their samples."""
        now = self._clock()
        if self._found is None or now - self._read_ns >= self._interval_ns:
            self._found = self._source()
            self._read_ns = now
        return self._found
