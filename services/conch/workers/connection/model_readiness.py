"""Asks a worker's model for its `is_ready`.

Owns: open checks by number. Threads: any thread asks, the I/O loop completes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping

_READY_S = 6.0
"""Timeout of a check; the worker replies within 5 s in any case."""


class ReadinessCheck:
    """A pending readiness check."""

    __slots__ = ("_ready", "_replied")

    def __init__(self) -> None:
        self._replied = threading.Event()
        self._ready = False

    @property
    def open(self) -> bool:
        """True until the reply has arrived."""
        return not self._replied.is_set()

    def complete(self, ready: bool) -> None:
        """Completes the check."""
        self._ready = ready
        self._replied.set()

    def wait(self) -> bool:
        """Waits for the reply; False on a timeout."""
        return self._replied.wait(_READY_S) and self._ready


class ReadinessChecks:
    """Open readiness checks of one worker."""

    def __init__(self, send: Callable[[int], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._open: dict[int, ReadinessCheck] = {}
        self._closed = False

    def ask(self) -> ReadinessCheck:
        """Sends a check; one to a lost worker completes at once, as not ready."""
        check = ReadinessCheck()
        with self._lock:
            closed = self._closed
            if not closed:
                number = next(self._numbers)
                self._open[number] = check
        if closed:
            check.complete(False)
        else:
            self._send(number)
        return check

    def completed(self, number: int, fields: Mapping[str, object]) -> None:
        """Handles a reply."""
        with self._lock:
            check = self._open.pop(number, None)
        if check is not None:
            check.complete(fields.get("ready") is True)

    def close(self) -> list[ReadinessCheck]:
        """Refuses further checks; returns the open ones, which the caller completes."""
        with self._lock:
            self._closed = True
            checks = list(self._open.values())
            self._open.clear()
        return checks


class WorkerReadiness:
    """A worker's model as a `Readiness`; at most one check is open at a time."""

    def __init__(self, ask: Callable[[], ReadinessCheck]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._check: ReadinessCheck | None = None

    def start(self) -> None:
        """Starts a check unless one is open."""
        with self._lock:
            if self._check is None or not self._check.open:
                self._check = self._ask()

    def result(self) -> bool:
        """Waits for the started check; False if it fails or times out."""
        check = self._check
        return check is not None and check.wait()
