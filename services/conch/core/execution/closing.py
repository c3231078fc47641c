"""The close of a runner: it refuses new requests, the accepted ones finish, then its threads end."""

from __future__ import annotations

import threading

from conch.core.execution.expiry_thread import ExpiryThread
from conch.core.execution.instance_set import InstanceSet
from conch.core.execution.model_threads import ModelThreads
from conch.core.execution.response_tracker import ResponseTracker
from conch.core.execution.runner_base import RunnerBase


class Closing:
    """The close of one runner.

    A runner is drained when no request is queued, runs or is open, no sequence is live, and all expired
    requests are complete. Whatever changes one of these calls `check`.

    Attributes:
        begun: True if new requests are refused.
    """

    def __init__(
        self,
        runner: RunnerBase,
        instances: InstanceSet,
        tracker: ResponseTracker,
        threads: ModelThreads,
        expiry: ExpiryThread,
    ) -> None:
        self._runner = runner
        self._instances = instances
        self._tracker = tracker
        self._threads = threads
        self._expiry = expiry
        self._drained = threading.Condition(runner.lock)
        self.begun = False

    def close(self, timeout_s: float | None = None) -> bool:
        """Refuses new requests, finishes the accepted ones, and ends the threads.

        Returns True if everything finished in time; if not, the threads end with their batches.
        """
        runner = self._runner
        self._tracker.await_none(self._check_open)  # before the number is read
        with runner.lock:
            self.begun = True
            runner.scheduler.begin_closing(runner.clock())
            self._wake_threads()
            done = self._drained.wait_for(self._is_drained, timeout_s)
        if done:
            self._threads.join()
            self._expiry.join()
        return done

    def check(self) -> bool:
        """Lets `close` and the threads end if the runner closes and is drained; called with the lock held."""
        if not self.begun or not self._is_drained():
            return False
        self._drained.notify_all()
        self._wake_threads()
        return True

    def _check_open(self) -> None:
        """As `check`, when the last open request is complete; without the lock."""
        with self._runner.lock:
            self.check()

    def _wake_threads(self) -> None:
        """Has the threads see that the runner closes, or is drained."""
        self._threads.wake_all()
        self._expiry.notify_over()

    def _is_drained(self) -> bool:
        scheduler = self._runner.scheduler
        active = (
            scheduler.pending or scheduler.live_sequences or self._expiry.incomplete or self._tracker.count
        )
        return self._instances.all_rest and not active
