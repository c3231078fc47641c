"""Process limit of a worker: finds out when the worker and its children are more processes than allowed.

RLIMIT_NPROC counts all processes of a user and does not bind root, and a cgroup needs rights that a server
seldom has. So the processes of the worker's session are counted, often enough to stop a fork bomb while it is
small. A process that begins a session of its own is not counted.

Owns: a timer. Threads: the monitor's thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from conch.workers.supervision.process_monitor import ProcessMonitor, Timer

INTERVAL_NS = 200_000_000
"""Time between two counts. A count reads a file for each process of the machine, about 15 µs each."""

_SESSION = 3
"""Field of ``/proc/PID/stat`` behind the command's name, see proc(5)."""


class ProcessLimit:
    """Counts the processes of one worker until it is closed.

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
        self._timer = self._monitor.at(self._monitor.clock() + INTERVAL_NS, self._count)

    def close(self) -> None:
        """Stops counting; on the monitor's thread."""
        self._session = 0
        if self._timer is not None:
            self._timer.cancel()

    def _count(self) -> None:
        if not self._session:
            return
        count = count_processes(self._session)
        if count > self._most:
            self._on_beyond(count)
        elif count:
            self.watch(self._session)


def count_processes(session: int) -> int:
    """Number of processes in a session."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):  # it has just ended
                fields = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
                count += int(fields[_SESSION]) == session
    return count
