"""Time limits of executions and of silent loops: what lasts too long has its process killed.

Owns: the start times of running executions. All share one timer, because most end in time.
Threads and locks: `Watchdog` has a lock; `on_hang` runs on the monitor's thread.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from conch.core.backend import BatchOutcome, Done
from conch.core.clock import Clock
from conch.core.errors import ConchError, DeadlineExceededError
from conch.core.scheduling.scheduler import Batch
from conch.workers.connection.worker_responses import OpenRequest
from conch.workers.supervision.process_monitor import ProcessMonitor, Timer

_NS_PER_S = 1_000_000_000
_LOOKS = 4  # during a silence that is too long


class Watchdog:
    """Watches the executions of one instance.

    Args:
        monitor: Runs the timer.
        limit_s: Limit of an execution in seconds.
        on_hang: Called on the monitor's thread, once for each execution beyond the limit, with its number.
    """

    def __init__(self, monitor: ProcessMonitor, limit_s: float, on_hang: Callable[[int], None]) -> None:
        self._monitor = monitor
        self._clock: Clock = monitor.clock
        self._limit_ns = round(limit_s * _NS_PER_S)
        self._on_hang = on_hang
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._starts: dict[int, int] = {}  # in order of their starts, and so of their deadlines
        self._timer: Timer | None = None

    def begin_batch(self) -> int:
        """Starts watching an execution; returns its number."""
        with self._lock:
            number = next(self._numbers)
            start = self._starts[number] = self._clock()
            if self._timer is None:
                self._arm(start)
        return number

    @property
    def watched(self) -> int:
        """The number of executions being watched."""
        with self._lock:
            return len(self._starts)

    def end_batch(self, number: int) -> None:
        """Stops watching an execution."""
        with self._lock:
            self._starts.pop(number, None)

    def close(self) -> None:
        """Forgets all executions."""
        with self._lock:
            self._starts.clear()
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _arm(self, start_ns: int) -> None:
        self._timer = self._monitor.at(start_ns + self._limit_ns, self._look)

    def _look(self) -> None:
        with self._lock:
            self._timer = None
            now = self._clock()
            hanging = [number for number, start in self._starts.items() if start + self._limit_ns <= now]
            for number in hanging:
                del self._starts[number]
            # Most executions end in time, so one timer watches the oldest.
            oldest = next(iter(self._starts.values()), None)
            if oldest is not None:
                self._arm(oldest)
        for number in hanging:
            self._on_hang(number)


class AnsweringConnection(Protocol):
    """The part of a worker connection that `LoopWatch` needs."""

    asked: int
    answered: int

    def ask_alive(self) -> None:
        """Asks for an answer."""


class ExecutingConnection(Protocol):
    """The part of a worker connection that the watchdog needs."""

    concurrent: bool

    @property
    def lost(self) -> bool:
        """True once the worker is lost."""

    def open_requests_of(self, batch: Batch) -> Sequence[OpenRequest]:
        """Open requests of a batch that is done."""


class AbortableProcess(Protocol):
    """A process that can be aborted."""

    def abort(self, why: str) -> None:
        """Kills it; its crash report gets the stacks."""


class ExecutionLimit:
    """The execution limit of an instance; kills the process that exceeds it.

    Args:
        monitor: Runs the timer.
        name: The instance's name.
        limit_s: Limit in seconds.
        executing: Returns the process to kill; None if it is ending anyway.
    """

    def __init__(
        self,
        monitor: ProcessMonitor,
        name: str,
        limit_s: float,
        executing: Callable[[], AbortableProcess | None],
    ) -> None:
        self._name = name
        self._text = (
            f"the execution lasted longer than the {limit_s:g} s that 'CONCH_MAX_EXECUTION_SECONDS' allows, "
            f"so its process was killed"
        )
        self._executing = executing
        self.watchdog = Watchdog(monitor, limit_s, self._hung)
        self._hung_numbers: set[int] = set()

    def watch(self, link: ExecutingConnection, done: Done) -> Done:
        """Watches a batch that is about to be sent; returns the callback that replaces `done`."""
        return _Watched(self.watchdog, link, done, self._error)

    def close(self) -> None:
        """Forgets all executions."""
        self.watchdog.close()

    def _error(self, number: int) -> ConchError | None:
        """The error of an execution that exceeded the limit; None if it did not."""
        if number not in self._hung_numbers:
            return None
        return DeadlineExceededError(
            f"Failed to process the request(s) for model instance '{self._name}', message: {self._text}"
        )

    def _hung(self, number: int) -> None:
        """Kills the process of an execution beyond the limit; on the monitor's thread."""
        process = self._executing()
        if process is None:
            return
        self._hung_numbers.add(number)  # before the connection fails what is in flight
        process.abort(self._text)


class LoopWatch:
    """Asks the loop of a serving worker for answers, and tells of one that is silent for too long.

    The loop is that of the model's coroutines, or for other models the interpreter, whose other threads
    answer unless the model holds the GIL. All calls but `close` are on the monitor's thread.

    Args:
        monitor: Runs the timer.
        link: The connection to the worker.
        silent_s: Seconds without an answer.
        busy: True while an execution is within a limit of its own.
        on_silent: Called once for each silence.
    """

    def __init__(
        self,
        monitor: ProcessMonitor,
        link: AnsweringConnection,
        silent_s: float,
        busy: Callable[[], bool],
        on_silent: Callable[[], None],
    ) -> None:
        self._monitor = monitor
        self._link = link
        self._step_ns = round(silent_s * _NS_PER_S) // _LOOKS
        self._busy = busy
        self._on_silent = on_silent
        self._looks = 0  # in this silence: a machine that was stopped meanwhile has made one
        self._closed = False
        self._timer = monitor.at(monitor.clock() + self._step_ns, self._look)

    def close(self) -> None:
        """Asks no more."""
        self._closed = True
        self._timer.cancel()

    def _look(self) -> None:
        if self._closed:
            return
        link = self._link
        answered = link.answered == link.asked
        self._looks = 0 if answered or self._busy() else self._looks + 1
        if answered:
            link.ask_alive()
        elif self._looks == _LOOKS:
            self._on_silent()
        self._timer = self._monitor.at(self._monitor.clock() + self._step_ns, self._look)


class _Watched:
    """Receives the outcome of a watched batch; a coroutine is watched until its last response."""

    def __init__(
        self,
        hangs: Watchdog,
        link: ExecutingConnection,
        done: Done,
        error: Callable[[int], ConchError | None],
    ) -> None:
        self._hangs = hangs
        self._link = link
        self._done = done
        self._error = error
        self._unfinished: set[int] = set()
        self._number = hangs.begin_batch()

    def __call__(self, batch: Batch, outcome: BatchOutcome) -> None:
        """Passes the outcome on, or the error of the limit."""
        link = self._link
        if isinstance(outcome, BaseException):
            outcome = self._error(self._number) or outcome
        elif link.concurrent and (kept := link.open_requests_of(batch)):
            self._unfinished.update(entry.number for entry in kept)
            for entry in kept:
                entry.watched = self
        if not self._unfinished or link.lost:
            self._hangs.end_batch(self._number)
        self._done(batch, outcome)

    def ended(self, entry: OpenRequest) -> None:
        """See `Watch`."""
        self._unfinished.discard(entry.number)
        if not self._unfinished:
            self._hangs.end_batch(self._number)

    def lost(self, entry: OpenRequest, error: ConchError) -> ConchError:
        """See `Watch`."""
        self.ended(entry)
        return self._error(self._number) or error
