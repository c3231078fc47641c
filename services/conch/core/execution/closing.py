"""The close of a runner: new requests are refused, the accepted ones finish, then the threads end.

A runner is drained when no request is queued, runs or is open, no sequence is live, and all expired requests
are complete. Whatever changes one of these calls `check`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conch.core.execution.runner import Runner


class Closing:
    """Whether a runner closes, and who waits for it.

    Attributes:
        begun: Whether new requests are refused.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._drained = threading.Condition(runner.lock)
        self.begun = False

    def close(self, timeout_s: float | None = None) -> bool:
        """Refuses new requests, finishes the accepted ones, and ends the threads.

        Returns whether everything finished in time; if not, the threads end with their batches.
        """
        runner = self._runner
        with runner.lock:
            self.begun = True
            runner.scheduler.begin_closing(runner.clock())
            runner.threads.wake_all()
            runner.expiry.notify_over()
            done = self._drained.wait_for(self._is_drained, timeout_s)
        if done:
            runner.threads.join()
            runner.expiry.join()
        return done

    def check(self) -> bool:
        """Lets `close` and the threads end if the runner closes and is drained; called with the lock held."""
        if not self.begun or not self._is_drained():
            return False
        self._drained.notify_all()
        self._runner.threads.wake_all()
        self._runner.expiry.notify_over()
        return True

    def check_open(self) -> None:
        """As `check`, when the last open request is complete; called without the lock."""
        # A close that begins now reads the number of open requests itself.
        if self.begun:
            with self._runner.lock:
                self.check()

    def _is_drained(self) -> bool:
        runner = self._runner
        scheduler = runner.scheduler
        unfinished = scheduler.pending or scheduler.held or runner.expiry.incomplete or runner.tracker.count
        return runner.instances.all_rest and not unfinished
