"""Places of an ensemble's steps: `max_inflight_requests` bounds the responses in flight of all its requests.

Threads and locks: any thread; one lock guards all. A waiter is called without it, by one thread at a time, so
that requests that pass places to each other do not grow the stack.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from typing import Protocol

log = logging.getLogger(__name__)


class Waiter(Protocol):
    """A request whose response waits for a place."""

    def open_next(self, step: int) -> None:
        """Takes the place that the step's next response has got."""


class Places:
    """Places for responses of decoupled steps.

    Args:
        limit: Places of each step; 0 for any number.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._taken: defaultdict[int, int] = defaultdict(int)
        self._waiting: defaultdict[int, deque[Waiter]] = defaultdict(deque)
        self._passed_on: deque[tuple[Waiter, int]] = deque()
        self._waking = False

    def take(self, step: int, waiter: Waiter) -> bool:
        """Takes a place; with none free, the waiter is in line for one."""
        if not self._limit:
            return True
        with self._lock:
            if self._taken[step] < self._limit:
                self._taken[step] += 1
                return True
            self._waiting[step].append(waiter)
            return False

    def free(self, step: int, waiter: Waiter) -> bool:
        """Frees a place for the next in line; True if that is the same waiter, which has it at once."""
        if not self._limit:
            return False
        with self._lock:
            if not self._waiting[step]:
                self._taken[step] -= 1
                return False
            following = self._waiting[step].popleft()
            if following is waiter:
                return True
            self._passed_on.append((following, step))
            return False

    def leave(self, waiter: Waiter) -> None:
        """Removes a waiter from all lines."""
        if not self._limit:
            return
        with self._lock:
            for step, line in self._waiting.items():
                self._waiting[step] = deque(each for each in line if each is not waiter)

    def wake(self) -> None:
        """Calls the waiters that have got places."""
        if not self._limit:
            return
        with self._lock:
            if self._waking or not self._passed_on:
                return
            self._waking = True
        while True:
            with self._lock:
                if not self._passed_on:
                    self._waking = False
                    return
                waiter, step = self._passed_on.popleft()
            try:
                waiter.open_next(step)
            except Exception:  # boundary: the request; others go on
                log.exception("a response of an ensemble's step could not be passed on")
