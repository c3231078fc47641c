"""What a model version takes of the process's memory, and giving it back to the system."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

_STATM = Path("/proc/self/statm")
_MEBIBYTE = 1 << 20


def resident_bytes() -> int | None:
    """The memory that this process has in use now; None where the platform does not say."""
    try:
        pages = int(_STATM.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True, eq=False)
class Measurement:
    """A look at the memory before something is loaded.

    Attributes:
        before: The bytes in use then; None if they could not be had.
        alone: Whether nothing else has been loaded beside it so far.
    """

    before: int | None
    alone: bool


class MemoryMeter:
    """Says by how much the process grows for something, as long as one thing is loaded at a time.

    Requests that run meanwhile count too: it is an estimate.

    Args:
        resident: The bytes in use; None where nobody can say.
    """

    def __init__(self, resident: Callable[[], int | None] = resident_bytes) -> None:
        self._resident = resident
        self._lock = threading.Lock()
        self._open: set[Measurement] = set()

    def begin(self) -> Measurement:
        """Looks at the memory before something is loaded; `end` must follow."""
        with self._lock:
            for other in self._open:
                other.alone = False
            measurement = Measurement(self._resident(), not self._open)
            self._open.add(measurement)
            return measurement

    def end(self, measurement: Measurement) -> int | None:
        """The bytes by which the process has grown since; None if nobody can tell what for."""
        with self._lock:
            self._open.remove(measurement)
            after = self._resident()
        if after is None or measurement.before is None or not measurement.alone:
            return None
        return max(after - measurement.before, 0)


def frozen() -> bool:
    """Whether the process has put away what it had made by some moment, for the collector not to look at."""
    return gc.get_freeze_count() > 0


def give_back(also_frozen: bool = False) -> None:
    """Frees what nothing refers to any more, and returns what is free to the system.

    Args:
        also_frozen: Whether what is put away may be part of it; that takes longer, and everything waits.
    """
    if also_frozen and frozen():
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    else:
        gc.collect()
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache  # a library that is opened anew each time is new types each time
def _malloc_trim() -> Callable[[int], object] | None:
    try:
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None  # not glibc
    return trim


def log_given_back(what: str, before: int | None) -> None:
    """Logs how much less memory the process has in use than before."""
    after = resident_bytes()
    if before is not None and after is not None:
        log.info("%s gave back %s", what, mebibytes(max(before - after, 0)))


def mebibytes(count: int) -> str:
    """A number of bytes for people to read."""
    return f"{count / _MEBIBYTE:.1f} MiB"
