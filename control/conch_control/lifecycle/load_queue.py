"""Whose turn it is: loads of one model follow one another, and newer ones do away with older ones.

A load that wants what another one is about to bring about shares it. One that wants something else stops the
older one, and an unload stops all: what has been stopped is told so where it can be, publishes nothing, and
cleans up. Who is newer is decided by tickets: calls take one when they come in, and one before they look at
the files, since what was looked at later is newer however long the look took.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from conch.core.errors import ConchError, UnavailableError
from conch_control.repository.layout import Fingerprint


class SupersededError(UnavailableError):
    """A load or unload that came later has made this load pointless; the text is Triton's."""

    def __init__(self) -> None:
        super().__init__(
            "Newer operation has been applied to the model lifecycle, current load operation is out-dated."
        )


@dataclass(slots=True, eq=False)
class Operation:
    """One load of one model, for one caller or several.

    Attributes:
        name: Model name.
        asked: Ticket of the call.
        looked: Ticket from before its look at the files.
        state: What it saw there, later what it has fetched; None for one that is not about files.
        override: Config in JSON to use in place of the file's, if any.
        stopped: Why it is not to go on, once that is so; only set under the lock of the operations.
        finished: Whether nothing of it runs any more.
        error: What it ended with.
    """

    name: str
    asked: int
    looked: int = 0
    state: Fingerprint | None = None
    override: str | None = None
    stopped: ConchError | None = field(default=None, init=False)
    finished: bool = field(default=False, init=False)
    error: BaseException | None = field(default=None, init=False)

    def check(self) -> None:
        """Raises what it was stopped with, if it was."""
        if self.stopped is not None:
            raise self.stopped

    def serves(self, other: Operation) -> bool:
        """Whether what this one brings about is what another one wants.

        One without an override leaves the one in force that was given with the same files.
        """
        same_config = other.override is None or other.override == self.override
        return same_config and self.state is not None and self.state == other.state


class Operations:
    """The loads that are under way or wait for their turn.

    Args:
        limit: Most loads at the same time; they are of different models.

    Attributes:
        lock: Guards everything here; whoever changes what loads depend on holds it too. Re-entrant.
        awaited: How many calls run inside `one_more`.
    """

    def __init__(self, limit: int) -> None:
        self.lock = threading.Condition()
        self.awaited = 0
        self._limit = limit
        self._ticket = 0
        self._calls = 0
        self._live: dict[str, list[Operation]] = {}
        self._newest: dict[str, Operation] = {}
        self._running: dict[str, Operation] = {}
        self._unloaded: dict[str, int] = {}  # by name, the ticket of the last unload, while there are calls
        self._closed: ConchError | None = None

    def ticket(self) -> int:
        """A number larger than all before."""
        with self.lock:
            self._ticket += 1
            return self._ticket

    @contextmanager
    def call(self) -> Iterator[int]:
        """A call that will load something; gives its ticket."""
        with self.lock:
            self._calls += 1
            ticket = self.ticket()
        try:
            yield ticket
        finally:
            with self.lock:
                self._calls -= 1
                if not self._calls:
                    self._unloaded.clear()  # nobody is left who could have come before them

    @property
    def closed(self) -> bool:
        """Whether everything has been stopped for good."""
        return self._closed is not None

    def check_open(self) -> None:
        """Raises what everything was closed with, if it was."""
        if self._closed is not None:
            raise self._closed

    def enter(self, operation: Operation) -> Operation | None:
        """Finds out what has to be done for a load.

        Args:
            operation: The load, which has looked at the files.

        Returns:
            The load itself, to be run in its turn; or another one to wait for, which does what it wants; or
            None: somebody has looked at the files since and seen others, so it has to look again.

        Raises:
            SupersededError: Something newer has been asked for already.
            UnavailableError: Everything has been closed.
        """
        name = operation.name
        with self.lock:
            self._check(operation)
            newest = self._newest.get(name)
            if newest is not None and newest.stopped is None:
                if newest.serves(operation):
                    return newest
                other_config = operation.override is not None and operation.override != newest.override
                if other_config and newest.asked > operation.asked:
                    raise SupersededError
                if newest.looked > operation.looked:
                    return None
                newest.stopped = SupersededError()
            self._newest[name] = operation
            self._add(operation)
            self.lock.notify_all()
            return operation

    def join(self, operation: Operation) -> None:
        """Enters a load that nobody can share and that stops nobody: it waits for its turn.

        Raises:
            SupersededError: The model has been unloaded since it was asked for.
            UnavailableError: Everything has been closed.
        """
        with self.lock:
            self._check(operation)
            self._add(operation)

    @contextmanager
    def turn(self, operation: Operation) -> Iterator[None]:
        """Waits until an operation may run, and keeps its ending.

        Raises:
            ConchError: It has been stopped before.
        """
        name = operation.name
        try:
            with self.lock:
                self.lock.wait_for(lambda: operation.stopped is not None or self._free(name))
                operation.check()
                self._running[name] = operation
            yield
        except BaseException as error:
            operation.error = error
            raise
        finally:
            with self.lock:
                operation.finished = True
                if self._running.get(name) is operation:
                    del self._running[name]
                if self._newest.get(name) is operation:
                    del self._newest[name]
                self._live[name].remove(operation)
                if not self._live[name]:
                    del self._live[name]
                self.lock.notify_all()

    def wait(self, operation: Operation) -> BaseException | None:
        """Waits for somebody else's operation.

        Returns:
            What it failed with, if it did.

        Raises:
            ConchError: It has been stopped.
        """
        with self.lock:
            self.lock.wait_for(lambda: operation.finished or operation.stopped is not None)
            operation.check()
            return operation.error

    def fetched(self, operation: Operation, state: Fingerprint, looked: int) -> None:
        """Says what an operation has found when it fetched the files."""
        with self.lock:
            operation.state, operation.looked = state, looked

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Lets one more load run: one that others wait for which run themselves."""
        with self.lock:
            self._limit += 1
            self.awaited += 1
            self.lock.notify_all()
        try:
            yield
        finally:
            with self.lock:
                self._limit -= 1
                self.awaited -= 1

    def unload(self, name: str) -> None:
        """Stops all loads of a model that were asked for before this."""
        with self.lock:
            if self._calls:
                self._unloaded[name] = self.ticket()
            for operation in self._live.get(name, ()):
                operation.stopped = operation.stopped or SupersededError()
            self.lock.notify_all()

    def close(self, error: ConchError) -> None:
        """Stops everything, now and later, with an error."""
        with self.lock:
            self._closed = error
            for operations in self._live.values():
                for operation in operations:
                    operation.stopped = operation.stopped or error
            self.lock.notify_all()

    def wait_ended(self, timeout_s: float) -> bool:
        """Waits until nothing runs; whether that is so."""
        with self.lock:
            return self.lock.wait_for(lambda: not self._running, timeout_s)

    def _check(self, operation: Operation) -> None:
        self.check_open()
        if self._unloaded.get(operation.name, 0) > operation.asked:
            raise SupersededError

    def _add(self, operation: Operation) -> None:
        self._live.setdefault(operation.name, []).append(operation)

    def _free(self, name: str) -> bool:
        return name not in self._running and len(self._running) < self._limit
