"""Running the steps of an ensemble one after the other on the thread that leads the first of them.

What a model's responses set going is otherwise left to other threads. While a thread leads the first step of
an ensemble for a limited time, the steps that follow promise themselves to the same thread: it runs them when
the first model is done or out of time, which for short steps is sooner than another thread wakes.
"""

from __future__ import annotations

import threading
from collections import deque

from conch.core.clock import Clock
from conch.core.servable import Leadable


class _Here(threading.local):
    """What the calling thread leads for an ensemble."""

    lead: Lead | None = None


_here = _Here()


class Lead:
    """A promise to lead the first step of an ensemble, and what follows from it on the same thread.

    Args:
        first: The model of the first step.
        clock: Monotonic time in nanoseconds.
    """

    def __init__(self, first: Leadable, clock: Clock) -> None:
        self._first = first
        self._clock = clock
        self._promised = deque([first])
        self._led: Leadable | None = None
        self._handed_over = False

    @property
    def fast(self) -> bool:
        """Whether a batch of the first model is short enough to be run while nobody polls."""
        return self._first.fast

    @staticmethod
    def current() -> Lead | None:
        """What the calling thread leads now, if models may be added to it."""
        lead = _here.lead
        return None if lead is None or lead._handed_over else lead

    def add(self, model: Leadable) -> None:
        """Has the calling thread, which leads this, lead another model soon."""
        self._promised.append(model)
        if self._handed_over:
            self._hand_over_promised()

    def lead(self, budget_ns: int | None = None) -> bool:
        """Runs what has been promised until nothing is left, or the budget is used up: then True.

        Of the steps that follow, only those with short batches run here. Without a budget none do: the
        first model may be led for as long as it has requests, and they are not to wait for that. Nor are
        other models promised before, with a budget: they are handed over.
        """
        if budget_ns is None:
            try:
                model = self._promised.popleft()
            except IndexError:
                return False
            self._hand_over_promised()
            return model.lead(None)
        end = self._clock() + budget_ns
        outer, _here.lead = _here.lead, self
        try:
            while self._promised:
                left = end - self._clock()
                if left <= 0:
                    return True
                self._lead_next(left)
        finally:
            _here.lead = outer
            self._led = None
        return False

    def lead_one(self) -> bool:
        """Leaves everything to the models' own threads: the steps that follow would be promised to nobody."""
        self.hand_over()
        return False

    def hand_over(self) -> None:
        """Leaves everything to the models' own threads, also while another thread leads."""
        self._handed_over = True
        led = self._led
        if led is not None:
            led.hand_over()
        self._hand_over_promised()

    def _lead_next(self, budget_ns: int) -> None:
        try:
            model = self._promised.popleft()
        except IndexError:
            return  # handed over in this moment
        if model is not self._first and not model.fast:
            model.hand_over()
            return
        self._led = model
        if model.lead(budget_ns):
            self.add(model)

    def _hand_over_promised(self) -> None:
        while True:
            try:
                model = self._promised.popleft()
            except IndexError:
                return
            model.hand_over()
