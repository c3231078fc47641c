"""Limits repeated messages per second and place in the code.

A state machine without I/O. A window of one second begins with a place's first message:

    messages 1 to `most`            LOGGED
    the first one beyond            COUNTED_FIRST, kept for the summary
    further ones                    COUNTED
    end of a window with counts     `due` returns one `Repeats`

Locks: one, reentrant.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")

WINDOW_NS = 1_000_000_000
"""Length of a window."""

_MOST_PLACES = 1000
"""Number of places from which ended windows are discarded."""


class Fate(Enum):
    """The outcome for a message."""

    LOGGED = "logged"
    COUNTED_FIRST = "the first of its window that is only counted"
    COUNTED = "counted"


@dataclass(slots=True)
class _Window(Generic[T]):
    end_ns: int
    logged: int
    counted: int
    first: T | None


@dataclass(frozen=True, slots=True)
class Repeats(Generic[T]):
    """The suppressed messages of a window: the first one and their number."""

    first: T
    count: int


class RepeatLimit(Generic[T]):
    """Passes `most` messages per place and second, all if 0; from any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.RLock()  # reentrant: finalizers log too
        self._windows: dict[Hashable, _Window[T]] = {}
        self._ended: list[Repeats[T]] = []
        self._counting: dict[Hashable, _Window[T]] = {}  # windows with suppressed messages

    def __len__(self) -> int:
        return len(self._windows)

    def admit(self, place: Hashable, message: Callable[[], T], now_ns: int) -> Fate:
        """Decides on a message; calls `message` for the object to keep if it is COUNTED_FIRST."""
        if not self._most:
            return Fate.LOGGED
        with self._lock:
            window = self._windows.get(place)
            if window is None or now_ns >= window.end_ns:
                self._end(place)
                self._forget(now_ns)
                self._windows[place] = _Window(now_ns + WINDOW_NS, 1, 0, None)
                return Fate.LOGGED
            if window.logged < self._most:
                window.logged += 1
                return Fate.LOGGED
            window.counted += 1
            if window.counted > 1:
                return Fate.COUNTED
            window.first = message()
            self._counting[place] = window
            return Fate.COUNTED_FIRST

    def next_ns(self) -> int | None:
        """Time of the next summary; None if none is pending."""
        with self._lock:
            if self._ended:
                return 0
            return min((window.end_ns for window in self._counting.values()), default=None)

    def due(self, now_ns: int | None) -> list[Repeats[T]]:
        """Removes and returns the summaries of ended windows; of all windows if `now_ns` is None."""
        with self._lock:
            for place, window in list(self._counting.items()):
                if now_ns is None or now_ns >= window.end_ns:
                    self._end(place)
            ended, self._ended = self._ended, []
            return ended

    def _end(self, place: Hashable) -> None:
        window = self._counting.pop(place, None)
        if window is not None and window.first is not None:
            self._ended.append(Repeats(window.first, window.counted))
            del self._windows[place]

    def _forget(self, now_ns: int) -> None:
        if len(self._windows) >= _MOST_PLACES:
            self._windows = {
                place: window
                for place, window in self._windows.items()
                if now_ns < window.end_ns or place in self._counting
            }
