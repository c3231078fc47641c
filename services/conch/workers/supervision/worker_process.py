"""Runs one worker process, from start to end.

Owns: the child process, its connection and the reason of its end.
Threads and locks: the end is reported on any thread; timers run on the monitor's thread.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from conch.backends.python.python_settings import Settings
from conch.core.backend import ConfigNotes
from conch.core.bls import ServerCalls
from conch.core.custom_metrics import CustomFamilies
from conch.core.errors import ConchError
from conch.core.execution.placement import Placement
from conch.core.model_control import load_cancelled
from conch.core.spec import ModelSpec
from conch.ipc.channel import PacketChannel
from conch.ipc.spec_json import Library
from conch.workers.connection.in_flight import InFlight
from conch.workers.connection.waiting_calls import WorkerWaiter
from conch.workers.connection.worker_connection import WorkerConnection
from conch.workers.environment import Environment
from conch.workers.supervision.child_process import start_worker
from conch.workers.supervision.crash_report import crash_report, crashed, in_flight_error, sentence
from conch.workers.supervision.process_monitor import ProcessMonitor, Timer

log = logging.getLogger(__name__)

_CLOSE_S = 30.0
"""Timeout of a model's `finalize`."""

_END_S = 5.0
"""Timeout of the process's end after `finalize`."""

_GRACE_S = 0.2
"""Time after the end of its socket at which a process is killed."""

_LOOK_S = 0.1
"""Interval at which a start checks for cancellation."""

_WELL = "exited with status 0"

_ABORT_NS = 1_000_000_000
"""Time after an abort at which a process is killed."""

_COUNT_NS = 200_000_000
"""Time between two counts of processes; one reads a file for each process of the machine, 15 µs each."""

_SESSION_FIELD = 3
"""Field of ``/proc/PID/stat`` behind the command's name, see proc(5)."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Settings of all processes of a worker.

    Attributes:
        placements: Its instances: one, or any number if a library runs the model.
        library: The backend, if it is compiled for Triton.
        waiter: The worker in deadlock detection.
    """

    spec: ModelSpec
    placements: Sequence[Placement]
    settings: Settings
    environment: Environment
    calls: ServerCalls
    waiter: WorkerWaiter
    families: CustomFamilies
    monitor: ProcessMonitor
    notes: ConfigNotes
    library: Library | None = None

    @property
    def name(self) -> str:
        """Name for messages: the instance's, or the model's if a library runs all its instances."""
        return self.placements[0].name if self.library is None else self.spec.name


class ProcessOwner(Protocol):
    """Receives the loss and the end of a process."""

    def begin_loss(self, worker: WorkerProcess) -> int:
        """The worker is lost; returns the retry hint for its requests in ms."""

    def lost(self, worker: WorkerProcess) -> None:
        """The process has ended and all its requests are completed; on any thread."""


class WorkerProcess:
    """One process of a worker, from its start to its end.

    Args:
        launch: Settings.
        owner: Receives its end.

    Attributes:
        process: The process.
        link: The connection to the worker.
        over: True once it has ended and all its requests are completed.
        how: Its end, with the reason if the server killed it.

    Raises:
        UnavailableError: The start failed.
    """

    def __init__(self, launch: Launch, owner: ProcessOwner) -> None:
        self._launch = launch
        self._owner = owner
        self._name = launch.name
        self.over = False
        self._why = ""
        self._in_flight: list[InFlight] = []
        self._ended_ns = 0
        self._channel: PacketChannel | None = None
        self._loaded = threading.Event()
        self._error: ConchError | None = None
        most = launch.settings.process_limit
        self._limit = None if most is None else _ProcessLimit(launch.monitor, most, self._too_many)
        self.process, sock = start_worker(
            launch.monitor, self._name, launch.environment, "serve", self._process_ended
        )
        channel = self._channel = PacketChannel(sock, blocking=False)
        if self.process.how:
            channel.shut_down()
        elif self._limit is not None:
            self._limit.watch(self.process.pid)
        self.link = WorkerConnection(
            channel,
            self._name,
            launch.spec,
            launch.calls,
            self._link_lost,
            self._explain,
            launch.families,
            launch.waiter,
            notes=launch.notes,
        )

    @property
    def how(self) -> str:
        """One sentence: how the process ended and, if the server ended it, why."""
        return sentence(self.process.how, self._why)

    def load(self, timeout_s: float | None) -> None:
        """Loads the model.

        Raises:
            ConchError: The model raised, or the process ended.
        """
        timer: Timer | None = None
        if timeout_s is not None:
            text = (
                f"it had not loaded the model after the {timeout_s:g} s that 'CONCH_START_TIMEOUT_SECONDS' "
                f"allows"
            )
            end_ns = self._launch.monitor.clock() + round(timeout_s * 1e9)
            timer = self._launch.monitor.at(end_ns, partial(self.abort, text))
        stopped = load_cancelled()
        self.link.load(self._launch.placements, self._on_loaded, self._launch.library)
        while not self._loaded.wait(_LOOK_S):
            if stopped():
                self._why = "its load was stopped"
                self.process.kill()
                self._loaded.wait()
        if timer is not None:
            timer.cancel()
        if self._error is not None:
            raise self._error

    def close(self, serving: bool) -> None:
        """Ends the process and waits; a serving one is asked to finalize its model first."""
        ended = serving and self.link.close(_CLOSE_S)
        if not ended:
            if serving:
                log.error(
                    "worker of '%s' (pid %d) did not finalize its model in time and is killed",
                    self._name,
                    self.process.pid,
                )
            self.process.kill()
        if not self.process.wait(_END_S):
            self.process.kill()
            self.process.wait()
        self.link.lose("it is closed")
        if ended and self.process.how != _WELL:
            log.error("%s", self.report())

    def end(self) -> None:
        """Kills what is left of the process group."""
        self.process.kill()
        self.process.wait()
        self.link.lose("it could not be loaded")

    def abort(self, why: str) -> None:
        """Kills it; its crash report gets the stacks."""
        self._why = self._why or why
        self.process.abort()
        self._launch.monitor.at(self._launch.monitor.clock() + _ABORT_NS, self.process.kill)

    def report(self) -> str:
        """The crash report."""
        ids = [each for batch in self._in_flight for each in batch.request_ids]
        since = min((batch.since_ns for batch in self._in_flight), default=None)
        executing_s = None if since is None else (self._ended_ns - since) / 1e9
        return crash_report(
            self._name,
            self.process.pid,
            self.how,
            self.process.errors,
            ids,
            executing_s,
            self._launch.library,
        )

    def _on_loaded(self, error: ConchError | None) -> None:
        self._error = error
        self._loaded.set()

    def _explain(self, reason: str) -> ConchError:
        """Waits for the end of the process; returns the error for its requests. `reason` may be empty."""
        retry_after_ms = self._owner.begin_loss(self)
        if not reason and not self.process.wait(_GRACE_S):
            reason = "it has closed its socket"
        if reason:
            self._why = self._why or reason
            self.process.kill()
            self.process.wait(_END_S)
        self._ended_ns = self._launch.monitor.clock()
        self._in_flight = self.link.in_flight()
        if not self._loaded.is_set():
            return crashed(self._name, self.how, self.process.errors, self._launch.library)
        return in_flight_error(self._name, self.how, retry_after_ms, self._launch.library)

    def _too_many(self, count: int) -> None:
        """Kills a worker that has started too many processes, and them; on the monitor's thread."""
        most = self._launch.settings.process_limit
        self._why = self._why or (
            f"it and its children were {count} processes, and 'CONCH_PROCESS_LIMIT' allows {most}"
        )
        self.process.kill()

    def _process_ended(self) -> None:
        """Runs on the monitor's thread."""
        if self._limit is not None:
            self._limit.close()
        if self._channel is not None:
            self._channel.shut_down()  # its children may hold the other end open

    def _link_lost(self, reason: str) -> None:
        self.over = True
        self._owner.lost(self)


class _ProcessLimit:
    """Counts the processes of one worker until it is closed.

    RLIMIT_NPROC counts all processes of a user and does not bind root, and a cgroup needs rights that a
    server seldom has. So the processes of the worker's session are counted, often enough to stop a fork bomb
    while it is small. A process that begins a session of its own is not counted.

    Args:
        monitor: Runs the timer; held by the worker meanwhile.
        most: Most processes, the worker included.
        on_beyond: Called once, on the monitor's thread, with the number of processes beyond the limit.
    """

    def __init__(self, monitor: ProcessMonitor, most: int, on_beyond: Callable[[int], None]) -> None:
        self._monitor = monitor
        self._most = most
        self._on_beyond = on_beyond
        self._timer: Timer | None = None
        self._session = 0

    def watch(self, session: int) -> None:
        """Starts counting the processes of a session."""
        self._session = session
        self._timer = self._monitor.at(self._monitor.clock() + _COUNT_NS, self._count)

    def close(self) -> None:
        """Stops counting; on the monitor's thread."""
        self._session = 0
        if self._timer is not None:
            self._timer.cancel()

    def _count(self) -> None:
        if not self._session:
            return
        count = _count_processes(self._session)
        if count > self._most:
            self._on_beyond(count)
        elif count:
            self.watch(self._session)


def _count_processes(session: int) -> int:
    """Number of processes in a session."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):  # it has just ended
                fields = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
                count += int(fields[_SESSION_FIELD]) == session
    return count
