"""Fails the expired requests of one runner, on a thread of their own: a responder may take time.

The thread starts with the first request that has a time limit. It sleeps until the earliest time known when
it fell asleep, so that most later requests do not wake it.

Owns: the thread, and expired requests that are not complete. Locks: the runner's, held where the methods say
so.
"""

from __future__ import annotations

import threading

from conch.core.execution.response_tracker import ResponseTracker
from conch.core.execution.runner_base import RunnerBase
from conch.core.request import InferenceRequest
from conch.core.scheduling.queue import NEVER

_LONGEST_WAIT_S = 3600.0  # timeouts of a config may exceed the platform's limit for waits


class ExpiryThread:
    """The expired requests of a runner.

    Attributes:
        wakes_ns: Monotonic time of the thread's next check; earlier limits have to `wake` it.
        incomplete: Number of expired requests that are not complete.
    """

    def __init__(self, name: str, runner: RunnerBase, tracker: ResponseTracker) -> None:
        self._name = name
        self._runner = runner
        self._tracker = tracker
        self._scheduler = runner.scheduler
        self._expiries = runner.scheduler.expiries
        self._woken = threading.Condition(runner.lock)
        self._thread: threading.Thread | None = None
        self._expired: list[InferenceRequest] = []
        self.incomplete = 0
        self.wakes_ns = NEVER

    def take_expired(self, now_ns: int) -> bool:
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
        runner = self._runner
        while expired := self._next():
            for request in expired:
                self._tracker.expire(request, self._scheduler.expiry_text(request))
            runner.settle_limits()
            with runner.lock:
                self.incomplete -= len(expired)
                runner.wake_if_due(runner.clock())  # the others may now form a batch
                runner.check_drained()
            del expired, request  # or they live for as long as the thread sleeps

    def _next(self) -> list[InferenceRequest]:
        """Waits for requests to expire; an empty list once the runner is closed and drained."""
        runner = self._runner
        with runner.lock:
            while True:
                now = runner.clock()
                if self._expiries.next_ns <= now:
                    self._expired += (expired := self._scheduler.expired(now))
                    self.incomplete += len(expired)
                runner.wake_if_due(now)
                over = runner.check_drained()
                if self._expired:
                    taken, self._expired = self._expired, []
                    return taken
                if over:
                    return []
                wakes_ns = self.wakes_ns = self._expiries.next_ns
                if wakes_ns > now:
                    wait_s = min((wakes_ns - now) / 1e9, _LONGEST_WAIT_S)
                    self._woken.wait(None if wakes_ns >= NEVER else wait_s)
