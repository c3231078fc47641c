"""Process-wide settings: the limit of file descriptors, stack dumps on a signal, and how a process ends.

Each port and the clients' shared memory have a share of the descriptors of their own, so that a full one
takes nothing from the others. What no share takes is left to the server itself, worker processes and models.

A stack dump goes into an unnamed file that the process keeps open. `conch dump` finds it through /proc, so it
signals only processes that handle the signal.
"""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import os
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

STACKS_FILE = "conch-stacks"
"""Name of the file in /proc, behind ``/memfd:``."""

STACKS_SIGNAL = signal.SIGRTMIN + 3
"""A real-time signal: models and libraries use the ordinary ones."""

_stacks_descriptor: int | None = None
_MOST_DESCRIPTORS = 64 * 1024
_OWN_DESCRIPTORS = 64  # a server without models has about 40 open
_SHARES = 32
_LEAST_CONNECTIONS = 8
_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)

GRPC_SHARES = 10
"""Parts in 32 of the descriptors, less those of the server itself, for connections to the gRPC port."""

HTTP_SHARES = 10
"""The same for the HTTP port."""

SMALL_PORT_SHARES = 1
"""The same for each of the metrics port, the control port and the console."""

REGION_SHARES = 4
"""The same for shared memory that clients register."""


def register_stack_dump() -> None:
    """Installs the handler of the signal, once."""
    global _stacks_descriptor
    if _stacks_descriptor is None:
        _stacks_descriptor = os.memfd_create(STACKS_FILE, os.MFD_CLOEXEC)
        # The reader truncates the file; the next dump must not leave a hole.
        flags = fcntl.fcntl(_stacks_descriptor, fcntl.F_GETFL)
        fcntl.fcntl(_stacks_descriptor, fcntl.F_SETFL, flags | os.O_APPEND)
        faulthandler.register(STACKS_SIGNAL, file=_stacks_descriptor, all_threads=True, chain=False)


def raise_descriptor_limit() -> int:
    """Raises the soft limit of descriptors up to the hard limit, to 65,536 at most; returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


def most_descriptors(shares: int) -> int:
    """Largest number of descriptors of a port, or of shared memory, with so many shares."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, _MOST_DESCRIPTORS)
    return max((limit - _OWN_DESCRIPTORS) * shares // _SHARES, _LEAST_CONNECTIONS)


def memory_bytes(cgroup_limits: Sequence[Path] = _CGROUP_LIMITS) -> int:
    """Memory that this process may use: the machine's, or less in a cgroup (a container) with a limit."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in cgroup_limits:
        with suppress(OSError, ValueError):  # not this version of cgroups; "max"
            limits.append(int(path.read_text()))
    return min(limits)


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Cores that this process may use: fewer than it may run on in a cgroup (a container) with a limit."""
    cores = len(os.sched_getaffinity(0))
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        with suppress(OSError, ValueError):  # not this version of cgroups; "max"
            quota, period = map(int, " ".join((cgroup / name).read_text() for name in names).split())
            if quota > 0:  # -1 is no limit
                cores = min(cores, max(quota // period, 1))
    return cores


class ProcessEnd:
    """Ends this process behind Python's exit handlers, without the exit handlers of native libraries.

    Engines leave native threads, and C++ aborts a process whose exit destroys such a thread. `atexit` runs
    the first handler last, so a process creates this before it imports what registers others.

    Attributes:
        code: The exit code; None for an end as Python has it, as after an exception.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        atexit.register(self._end)

    def _end(self) -> None:
        if self.code is None:
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # None, broken or closed
                stream.flush()
        import ctypes

        ctypes.CDLL(None).fflush(None)  # what native code has printed
        os._exit(self.code)
