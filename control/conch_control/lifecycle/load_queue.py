"""Serialises loads per model; a newer load or unload supersedes older ones.

Loads of one model run one at a time, loads of different models in parallel up to a limit. Tickets order
calls: a call takes one on arrival (`requested_ticket`) and one before it reads the files
(`scanned_ticket`); a later scan is newer however long it takes. `submit` compares a load with the newest
one of its model; the first line that fits counts:

| newest load of the model              | new load      | result                         |
|---------------------------------------|---------------|--------------------------------|
| none, or stopped                      | any           | runs                           |
| same files, and same or no own config | any           | waits for the newest load      |
| other config, requested later         | with a config | SupersededError for the new    |
| other files or config, scanned later  | any           | scans again                    |
| other files or config, scanned before | any           | stops the older one, then runs |
| (an unload came after the request)    | any           | SupersededError for the new    |

Guarantees: a stopped load publishes nothing; an unload stops every load requested before it. `stopped` is
set only under `LoadQueue.lock`, so a holder of the lock that finds a load not stopped may publish its
result.

Threads: any. Owns: the loads and the lock of the lifecycle.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from conch.core.errors import ConchError, UnavailableError
from conch_control.repository.layout import Fingerprint


class SupersededError(UnavailableError):
    """A later load or unload has replaced this load; the text is Triton's."""

    def __init__(self) -> None:
        super().__init__(
            "Newer operation has been applied to the model lifecycle, current load operation is out-dated."
        )


@dataclass(slots=True, eq=False)
class QueuedLoad:
    """One load of one model, shared by one or more callers.

    Attributes:
        requested_ticket: Ticket of the call.
        scanned_ticket: Ticket taken before the files were scanned.
        state: Fingerprint of the scan, later of the staged files; None for a refresh.
        override: Config in JSON that replaces the file, if any.
        stopped: Reason for which the load must stop; set only under the queue's lock.
        finished: True once no part of it runs.
        error: Error with which it ended; None if it has succeeded.
    """

    name: str
    requested_ticket: int
    scanned_ticket: int = 0
    state: Fingerprint | None = None
    override: str | None = None
    stopped: ConchError | None = field(default=None, init=False)
    finished: bool = field(default=False, init=False)
    error: BaseException | None = field(default=None, init=False)

    def check(self) -> None:
        """Raises the reason if the load was stopped."""
        if self.stopped is not None:
            raise self.stopped

    def satisfies(self, other: QueuedLoad) -> bool:
        """True if this load produces what the other one wants.

        A load without an override keeps the override in force that was given with the same files.
        """
        same_config = other.override is None or other.override == self.override
        return same_config and self.state is not None and self.state == other.state


class LoadQueue:
    """The running and waiting loads.

    Attributes:
        lock: Guards the queue and everything loads depend on. Re-entrant.
        nested_loads: Number of calls inside `extra_slot`.
        newest: The newest load of each model that has not finished, without refreshes.
    """

    def __init__(self, limit: int) -> None:
        self.lock = threading.Condition()
        self.nested_loads = 0
        self._limit = limit
        self._ticket = 0
        self._calls = 0
        self._live: dict[str, list[QueuedLoad]] = {}
        self.newest: dict[str, QueuedLoad] = {}
        self._running: dict[str, QueuedLoad] = {}
        self._unloaded: dict[str, int] = {}  # ticket of the last unload by name, while calls are open
        self._closed: ConchError | None = None

    def ticket(self) -> int:
        """Returns a number larger than all before."""
        with self.lock:
            self._ticket += 1
            return self._ticket

    @contextmanager
    def call(self) -> Iterator[int]:
        """Context of a call that loads something; yields its ticket."""
        with self.lock:
            self._calls += 1
            ticket = self.ticket()
        try:
            yield ticket
        finally:
            with self.lock:
                self._calls -= 1
                if not self._calls:
                    self._unloaded.clear()  # no open call is older than these

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed is not None

    def check_open(self) -> None:
        """Raises the closing error after `close`."""
        if self._closed is not None:
            raise self._closed

    def submit(self, load: QueuedLoad) -> QueuedLoad | None:
        """Queues a load that has scanned the files; see the table above.

        Returns the load itself, to be run; another one to wait for; or None to scan the files again.

        Raises:
            SupersededError: A newer call has replaced it.
            UnavailableError: The queue is closed.
        """
        name = load.name
        with self.lock:
            self._check(load)
            newest = self.newest.get(name)
            if newest is not None and newest.stopped is None:
                if newest.satisfies(load):
                    return newest
                other_config = load.override is not None and load.override != newest.override
                if other_config and newest.requested_ticket > load.requested_ticket:
                    raise SupersededError
                if newest.scanned_ticket > load.scanned_ticket:
                    return None
                newest.stopped = SupersededError()
            self.newest[name] = load
            self._add(load)
            self.lock.notify_all()
            return load

    def append(self, load: QueuedLoad) -> None:
        """Queues a refresh, which is not shared and stops no other load.

        Raises:
            SupersededError: The model was unloaded since the request.
            UnavailableError: The queue is closed.
        """
        with self.lock:
            self._check(load)
            self._add(load)

    @contextmanager
    def running(self, load: QueuedLoad) -> Iterator[None]:
        """Waits for the load's turn, marks it running, and records how it ends.

        Raises:
            ConchError: The load was stopped while it waited.
        """
        name = load.name
        try:
            with self.lock:
                self.lock.wait_for(
                    lambda: (
                        load.stopped is not None
                        or (name not in self._running and len(self._running) < self._limit)
                    )
                )
                load.check()
                self._running[name] = load
            yield
        except BaseException as error:  # kept for those that wait, and raised again
            load.error = error
            raise
        finally:
            with self.lock:
                load.finished = True
                if self._running.get(name) is load:
                    del self._running[name]
                if self.newest.get(name) is load:
                    del self.newest[name]
                self._live[name].remove(load)
                if not self._live[name]:
                    del self._live[name]
                self.lock.notify_all()

    def wait(self, load: QueuedLoad) -> BaseException | None:
        """Waits for another caller's load; returns its error, if any.

        Raises:
            ConchError: The load was stopped.
        """
        with self.lock:
            self.lock.wait_for(lambda: load.finished or load.stopped is not None)
            load.check()
            return load.error

    def fetched(self, load: QueuedLoad, state: Fingerprint, looked: int) -> None:
        """Records the state of the staged files, with a ticket taken before they were read."""
        with self.lock:
            load.state, load.scanned_ticket = state, looked

    @contextmanager
    def extra_slot(self) -> Iterator[None]:
        """Raises the limit by one, for a load that a running load waits for."""
        with self.lock:
            self._limit += 1
            self.nested_loads += 1
            self.lock.notify_all()
        try:
            yield
        finally:
            with self.lock:
                self._limit -= 1
                self.nested_loads -= 1

    def unload(self, name: str) -> None:
        """Stops all loads of a model requested so far."""
        with self.lock:
            if self._calls:
                self._unloaded[name] = self.ticket()
            for load in self._live.get(name, ()):
                load.stopped = load.stopped or SupersededError()
            self.lock.notify_all()

    def close(self, error: ConchError) -> None:
        """Stops all present and future loads with an error."""
        with self.lock:
            self._closed = error
            for queue in self._live.values():
                for load in queue:
                    load.stopped = load.stopped or error
            self.lock.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no load runs; returns False on timeout."""
        with self.lock:
            return self.lock.wait_for(lambda: not self._running, timeout_s)

    def _check(self, load: QueuedLoad) -> None:
        self.check_open()
        if self._unloaded.get(load.name, 0) > load.requested_ticket:
            raise SupersededError

    def _add(self, load: QueuedLoad) -> None:
        self._live.setdefault(load.name, []).append(load)
