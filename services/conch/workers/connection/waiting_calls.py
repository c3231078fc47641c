"""Tracks the calls and loads for which models in workers wait, for deadlock detection.

A worker reports a long wait, with the requests that the waiting thread executes. The server accepts the
report when it comes a second time with no response sent in between: by then the worker has received all that
was sent before the first report. An accepted wait holds until a response is sent.

Owns: reported waits. Locks: one; any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager

from conch.backends.python.calls.call_context import loading
from conch.backends.python.calls.deadlock_detection import is_deadlocked
from conch.core.bls import ServerCalls, Wait
from conch.core.errors import UnavailableError
from conch.core.request import InferenceRequest
from conch.core.spec import ModelSpec


class WorkerWaiter:
    """An instance in a worker, across restarts, as a `conch.core.bls.Waiter`.

    Attributes:
        opening: True while it loads, so that the loading thread waits for it.
        thread: A number that no thread of the server has.
    """

    __slots__ = ("known_as", "known_server", "loads", "model", "name", "opening", "thread", "waiting")

    def __init__(self, server: ServerCalls, name: str, spec: ModelSpec) -> None:
        self.known_server = server
        self.name = name
        self.known_as = spec.identifier, spec.identifier.removeprefix(f"{spec.namespace}::")
        self.opening = False
        self.loads = ""
        self.model = spec.identifier, spec.version
        self.thread = -id(self)
        self.waiting: WorkerWait | None = None


class WorkerWait:
    """A call for which a thread of a worker waits, as a `conch.core.bls.Wait`."""

    __slots__ = ("caller", "core", "parents", "seen", "since_ns")

    def __init__(
        self, caller: WorkerWaiter, core: InferenceRequest, parents: Sequence[InferenceRequest]
    ) -> None:
        self.caller = caller
        self.core = core
        self.parents = parents
        self.since_ns = core.received_ns
        self.seen: frozenset[Wait] = frozenset()


class WaitingCalls:
    """The calls for which threads of one worker wait."""

    def __init__(self, waiter: WorkerWaiter) -> None:
        self._waiter = waiter
        self._lock = threading.Lock()
        self._by_number: dict[int, WorkerWait] = {}

    def __bool__(self) -> bool:
        return bool(self._by_number)

    def report(self, number: int, core: InferenceRequest, parents: Sequence[InferenceRequest]) -> bool:
        """Records a reported wait; True if it is accepted, else it must be reported again.

        Args:
            number: The call's number on the socket.
            core: The call.
            parents: The requests that the thread executes; empty for another thread of the model.
        """
        with self._lock:
            wait = self._by_number.get(number)
            if wait is None or wait.core is not core or list(wait.parents) != list(parents):
                self._by_number[number] = WorkerWait(self._waiter, core, parents)
                return False
            if parents:
                self._waiter.waiting = wait
            return True

    def check(self, number: int) -> tuple[bool, bool]:
        """Checks an accepted wait.

        Returns:
            True if only other calls stand between it and its response; and True if it is a deadlock.
        """
        wait = self._by_number.get(number)
        if wait is None:
            return False, False
        wait.seen, deadlocked = is_deadlocked(wait, wait.seen)
        return bool(wait.seen), deadlocked

    def finish(self, number: int) -> None:
        """Ends a wait: a response was sent, or the call was cancelled."""
        with self._lock:
            wait = self._by_number.pop(number, None)
            if wait is not None and self._waiter.waiting is wait:
                self._waiter.waiting = None

    def loading(self, name: str) -> AbstractContextManager[None]:
        """See `conch.backends.python.calls.call_context.loading`; it raises `UnavailableError`."""
        return loading(self._waiter, name, UnavailableError)

    def close(self) -> None:
        """Ends all waits, as the worker has ended."""
        with self._lock:
            self._by_number.clear()
            self._waiter.waiting = None
