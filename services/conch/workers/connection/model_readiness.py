"""Whether a worker's model calls itself ready."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping

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


class Checks:
    """The questions for readiness to one worker that have no answer yet.

    Args:
        send: Sends the question of a number.
    """

    def __init__(self, send: Callable[[int], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._open: dict[int, Check] = {}
        self._closed = False

    def ask(self) -> Check:
        """Asks the model whether it is ready; it is not when the worker has been lost."""
        check = Check()
        with self._lock:
            closed = self._closed
            if not closed:
                number = next(self._numbers)
                self._open[number] = check
        if closed:
            check.answer(False)
        else:
            self._send(number)
        return check

    def completed(self, number: int, fields: Mapping[str, object]) -> None:
        """Takes the answer to the question of a number."""
        with self._lock:
            check = self._open.pop(number, None)
        if check is not None:
            check.answer(fields.get("ready") is True)

    def close(self) -> list[Check]:
        """Has nothing be asked any more; returns what the caller has to answer."""
        with self._lock:
            self._closed = True
            checks = list(self._open.values())
            self._open.clear()
        return checks


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
