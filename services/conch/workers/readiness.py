"""Whether a worker's model calls itself ready."""

from __future__ import annotations

import threading
from collections.abc import Callable

_READY_S = 6.0
"""How long the answer to a question for readiness may take; the worker answers after 5 s in any case."""


class Check:
    """A question for readiness, and its answer."""

    __slots__ = ("_answered", "_ready")

    def __init__(self) -> None:
        self._answered = threading.Event()
        self._ready = False

    @property
    def open(self) -> bool:
        """Whether there is no answer yet."""
        return not self._answered.is_set()

    def answer(self, ready: bool) -> None:
        """Gives the answer."""
        self._ready = ready
        self._answered.set()

    def wait(self) -> bool:
        """The answer; False if it does not come in time."""
        return self._answered.wait(_READY_S) and self._ready


class LinkReadiness:
    """The `is_ready` of a worker's model.

    Args:
        ask: Asks the model.
    """

    def __init__(self, ask: Callable[[], Check]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._check: Check | None = None

    def start(self) -> None:
        """Begins a check, unless one is under way."""
        with self._lock:
            if self._check is None or not self._check.open:
                self._check = self._ask()

    def result(self) -> bool:
        """Waits for the check that was begun; False too if it fails or takes too long."""
        check = self._check
        return check is not None and check.wait()
