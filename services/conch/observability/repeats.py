"""Which messages are logged and which only counted, where a place in the code has much of the same to say.

A pure state machine: told what comes when, it says what becomes of it. Windows of a second begin with a
place's first message; what goes beyond the limit is counted, and told in one line when the second is over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")

WINDOW_NS = 1_000_000_000
"""How long messages of one place are counted together."""

_MOST_PLACES = 1000
"""With more, those whose window is over are forgotten."""


class Fate(Enum):
    """What becomes of a message."""

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
    """How many messages of a window were only counted, and the first of them."""

    first: T
    count: int


class RepeatLimit(Generic[T]):
    """Lets so many messages of a place through in a second; from any thread.

    Args:
        most: How many; 0 for all.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.RLock()  # again by the thread that is in it: finalizers log too
        self._windows: dict[Hashable, _Window[T]] = {}
        self._over: list[Repeats[T]] = []
        self._counting: dict[Hashable, _Window[T]] = {}  # those with something to tell

    def admit(self, place: Hashable, message: Callable[[], T], now_ns: int) -> Fate:
        """Says what becomes of a message.

        Args:
            place: What all messages of a kind have in common.
            message: Gives the message to keep, if it is the first of its window that is only counted.
            now_ns: When it came.
        """
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
        """When there is something to tell; None for never as things stand."""
        with self._lock:
            if self._over:
                return 0
            return min((window.end_ns for window in self._counting.values()), default=None)

    def due(self, now_ns: int | None) -> list[Repeats[T]]:
        """Takes out what is to be told of windows that are over; of all windows at None."""
        with self._lock:
            for place, window in list(self._counting.items()):
                if now_ns is None or now_ns >= window.end_ns:
                    self._end(place)
            over, self._over = self._over, []
            return over

    def _end(self, place: Hashable) -> None:
        window = self._counting.pop(place, None)
        if window is not None and window.first is not None:
            self._over.append(Repeats(window.first, window.counted))
            del self._windows[place]

    def _forget(self, now_ns: int) -> None:
        if len(self._windows) >= _MOST_PLACES:
            self._windows = {
                place: window
                for place, window in self._windows.items()
                if now_ns < window.end_ns or place in self._counting
            }
