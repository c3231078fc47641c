"""Inline execution of consecutive ensemble steps on one thread.

Without it, a step that follows from a response runs on a thread of its model, and waking that thread takes
longer than a short step. While a thread runs the first step of an ensemble with a budget, the steps that
follow are claimed for the same thread. It runs them once the first model is done or out of time.

Threads and locks: the running claim is thread-local; `release` may come from any thread, so claims are taken
from a deque, whose `popleft` gives each one to a single thread.
"""

from __future__ import annotations

import threading
from collections import deque

from conch.core.clock import Clock
from conch.core.servable import InlineClaim


class _Current(threading.local):
    claim: EnsembleClaim | None = None


_current = _Current()


class EnsembleClaim:
    """The inline claim on the first step of an ensemble and on the steps that follow from it.

    Args:
        first: The claim on the model of the first step.
        clock: Monotonic time in nanoseconds.
    """

    def __init__(self, first: InlineClaim, clock: Clock) -> None:
        self._first = first
        self._clock = clock
        self._claims = deque([first])
        self._running: InlineClaim | None = None
        self._released = False

    @property
    def fast(self) -> bool:
        """True if the first model's batches are short enough to run while no thread polls."""
        return self._first.fast

    @staticmethod
    def current() -> EnsembleClaim | None:
        """The claim that the calling thread runs now; None if it takes no further models."""
        claim = _current.claim
        return None if claim is None or claim._released else claim

    def add(self, model: InlineClaim) -> None:
        """Adds a model that the calling thread, which runs this claim, is to run soon."""
        self._claims.append(model)
        if self._released:
            self._release_all()

    def run_inline(self, budget_ns: int | None = None) -> bool:
        """Runs what is claimed until nothing is left, or the budget is used up: then True.

        With a budget, only following steps with short batches run here; others are released. Without one,
        the first model may run for as long as it has requests, so all other claims are released first.
        """
        if budget_ns is None:
            try:
                model = self._claims.popleft()
            except IndexError:
                return False
            self._release_all()
            return model.run_inline(None)
        end = self._clock() + budget_ns
        outer, _current.claim = _current.claim, self
        try:
            while self._claims:
                left = end - self._clock()
                if left <= 0:
                    return True
                self._run_next(left)
        finally:
            _current.claim = outer
            self._running = None
        return False

    def run_batch_inline(self) -> bool:
        """Releases the claim: after one batch, no thread would run the steps that follow."""
        self.release()
        return False

    def release(self) -> None:
        """Leaves everything to the models' own threads, also while another thread runs the claim."""
        self._released = True
        running = self._running
        if running is not None:
            running.release()
        self._release_all()

    def _run_next(self, budget_ns: int) -> None:
        try:
            model = self._claims.popleft()
        except IndexError:
            return  # released since
        if model is not self._first and not model.fast:
            model.release()
            return
        self._running = model
        if model.run_inline(budget_ns):
            self.add(model)

    def _release_all(self) -> None:
        while True:
            try:
                model = self._claims.popleft()
            except IndexError:
                return
            model.release()
