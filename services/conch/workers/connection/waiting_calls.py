"""What the server knows of the calls, and the loads, that models in workers wait for.

A worker tells what its threads wait for when that takes a while, with the numbers of the requests that its
model executes if it is the executing thread. It is believed when it has said so twice without anything
having been sent for the call meanwhile: by the second time it has received all that was sent before the
first. So whoever is known to wait does, until something is sent.
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
    """One instance in a worker, whichever process that is at the time; a `conch.core.bls.Waiter`.

    Args:
        server: The server that it calls.
        name: Its name.
        spec: The model version.

    Attributes:
        known_server: As above.
        name: As above.
        known_as: See `Waiter`.
        opening: Whether it is being made, so that whoever loads the model waits for it.
        loads: See `Waiter`.
        model: See `Waiter`.
        thread: See `Waiter`; no thread of the server's.
        waiting: See `Waiter`.
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
    """A call for which a thread of a worker waits; a `conch.core.bls.Wait`."""

    __slots__ = ("caller", "core", "parents", "seen", "since_ns")

    def __init__(
        self, caller: WorkerWaiter, core: InferenceRequest, parents: Sequence[InferenceRequest]
    ) -> None:
        self.caller = caller
        self.core = core
        self.parents = parents
        self.since_ns = core.received_ns
        self.seen: frozenset[Wait] = frozenset()


class Waits:
    """The calls that the threads of one worker wait for.

    Args:
        waiter: The instance.
    """

    def __init__(self, waiter: WorkerWaiter) -> None:
        self._waiter = waiter
        self._lock = threading.Lock()
        self._by_number: dict[int, WorkerWait] = {}

    def __bool__(self) -> bool:
        return bool(self._by_number)

    def said(self, number: int, core: InferenceRequest, parents: Sequence[InferenceRequest]) -> bool:
        """Takes notice of a wait.

        Args:
            number: The call's number on the socket.
            core: The call.
            parents: The requests that the thread executes; none for another thread of the model's.

        Returns:
            Whether it is believed; else it has to be said again.
        """
        with self._lock:
            wait = self._by_number.get(number)
            if wait is None or wait.core is not core or list(wait.parents) != list(parents):
                self._by_number[number] = WorkerWait(self._waiter, core, parents)
                return False
            if parents:
                self._waiter.waiting = wait
            return True

    def look(self, number: int) -> tuple[bool, bool]:
        """Looks at a wait that is believed.

        Returns:
            Whether nothing but calls stands between it and its answer; and whether it has to fail, as it
            could never be served.
        """
        wait = self._by_number.get(number)
        if wait is None:
            return False, False
        wait.seen, for_ever = is_deadlocked(wait, wait.seen)
        return bool(wait.seen), for_ever

    def over(self, number: int) -> None:
        """Takes notice of something that ends a wait: a response has been sent, or the call is cancelled."""
        with self._lock:
            wait = self._by_number.pop(number, None)
            if wait is not None and self._waiter.waiting is wait:
                self._waiter.waiting = None

    def loading(self, name: str) -> AbstractContextManager[None]:
        """See `conch.backends.python.calls.call_context.loading`; it raises `UnavailableError`."""
        return loading(self._waiter, name, UnavailableError)

    def close(self) -> None:
        """Forgets all of them: the worker is gone."""
        with self._lock:
            self._by_number.clear()
            self._waiter.waiting = None
