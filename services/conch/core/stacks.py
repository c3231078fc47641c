"""Has a process write the stacks of its threads on a signal, also while Python code can't run.

The stacks go into a nameless file that the process keeps open. `conch dump` finds that file through /proc, so
it signals only processes that take the signal.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal

FILE = "conch-stacks"
"""Name of the file in /proc, behind ``/memfd:``."""

SIGNAL = signal.SIGRTMIN + 3
"""A real-time signal: models and libraries use the ordinary ones."""

_descriptor: int | None = None


def register() -> None:
    """Makes this process answer the signal, once and for good."""
    global _descriptor
    if _descriptor is None:
        _descriptor = os.memfd_create(FILE, os.MFD_CLOEXEC)
        # The reader empties the file; what is written next must not leave a hole.
        flags = fcntl.fcntl(_descriptor, fcntl.F_GETFL)
        fcntl.fcntl(_descriptor, fcntl.F_SETFL, flags | os.O_APPEND)
        faulthandler.register(SIGNAL, file=_descriptor, all_threads=True, chain=False)
