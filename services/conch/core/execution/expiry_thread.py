"""Completes the expired requests of one runner, on a thread of their own: a responder may take time.

The thread starts with the first request that has a time limit. It sleeps until the earliest time known when
it fell asleep, so that most later requests do not wake it.

Owns: the thread, and expired requests that are not complete. Locks: the runner's, held where the methods say
so. Used by: `Runner`.
"""

from __future__ import annotations

import threading
from typing import Protocol

from conch.core.clock import Clock
from conch.core.request import InferenceRequest
from conch.core.scheduling.queue import NEVER
from conch.core.scheduling.scheduler import Scheduler

_LONGEST_WAIT_S = 3600.0  # timeouts of a config may exceed the platform's limit for waits


class ExpiringQueue(Protocol):
    """The runner, as far as its expiry thread uses it."""

    def expire(self, request: InferenceRequest) -> None:
        """Completes an expired request; without the lock."""

    def after_removal(self) -> None:
        """Called without the lock when requests have left the queue without running."""

    def check(self, now_ns: int) -> bool:
        """Called with the lock when the queue has changed; True once the runner is closed and drained."""


class ExpiryThread:
    """See the module.

    Args:
        name: Name of the model.
        queue: The runner.
        scheduler: Has the requests.
        lock: The runner's lock.
        clock: Monotonic time in nanoseconds.

    Attributes:
        wakes_ns: When the thread looks next; earlier limits have to `wake` it.
        incomplete: Number of expired requests that are not complete.
    """

    def __init__(
        self, name: str, queue: ExpiringQueue, scheduler: Scheduler, lock: threading.Lock, clock: Clock
    ) -> None:
        self._name = name
        self._queue = queue
        self._scheduler = scheduler
        self._expiries = scheduler.expiries
        self._lock = lock
        self._clock = clock
        self._woken = threading.Condition(lock)
        self._thread: threading.Thread | None = None
        self._expired: list[InferenceRequest] = []
        self.incomplete = 0
        self.wakes_ns = NEVER

    def look(self, now_ns: int) -> bool:
        """Takes expired requests out of the queue, under the lock; whether there were any."""
        expired = self._scheduler.expired(now_ns)
        if not expired:
            return False
        self._expired += expired
        self.incomplete += len(expired)
        self.wake()
        return True

    def wake(self) -> None:
        """Wakes the thread, under the lock."""
        self.wakes_ns = self._expiries.next_ns  # until it runs, only still earlier times need to wake it
        if self._thread is None:
            name = f"conch-{self._name}-timeouts"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        else:
            self._woken.notify()

    def notify_over(self) -> None:
        """Lets the thread end once the runner is drained; under the lock."""
        self._woken.notify()

    def join(self) -> None:
        """Waits for the thread, without the lock."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while expired := self._next():
            for request in expired:
                self._queue.expire(request)
            self._queue.after_removal()
            with self._lock:
                self.incomplete -= len(expired)
                self._queue.check(self._clock())
            del expired, request  # or they live for as long as the thread sleeps

    def _next(self) -> list[InferenceRequest]:
        """Waits for requests to expire; an empty list once the runner is closed and drained."""
        with self._lock:
            while True:
                now = self._clock()
                if self._expiries.next_ns <= now:
                    self._expired += (expired := self._scheduler.expired(now))
                    self.incomplete += len(expired)
                over = self._queue.check(now)
                if self._expired:
                    taken, self._expired = self._expired, []
                    return taken
                if over:
                    return []
                wakes_ns = self.wakes_ns = self._expiries.next_ns
                if wakes_ns > now:
                    wait_s = min((wakes_ns - now) / 1e9, _LONGEST_WAIT_S)
                    self._woken.wait(None if wakes_ns >= NEVER else wait_s)
