"""Measures the process memory that loads take, and returns freed memory to the system.

Threads and locks: any thread; `MemoryMeter` has a lock, `ReleasePace` needs one.
"""

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

from conch.core.clock import Clock, monotonic_ns

log = logging.getLogger(__name__)

STATM = Path("/proc/self/statm")
_MEBIBYTE = 1 << 20
_S = 1_000_000_000
_LEFT_BYTES = _MEBIBYTE
"""Most memory of unloaded models that may wait for the next release."""
_frozen = threading.Event()


def resident_bytes() -> int | None:
    """Resident memory of this process; None if the platform does not report it."""
    try:
        pages = int(STATM.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True, eq=False)
class Measurement:
    """State of a measurement."""

    before: int | None
    alone: bool


class MemoryMeter:
    """Estimates the memory growth of a load, if no other load overlaps. Requests meanwhile count too."""

    def __init__(self, resident: Callable[[], int | None] = resident_bytes) -> None:
        self._resident = resident
        self._lock = threading.Lock()
        self._open: set[Measurement] = set()

    def begin(self) -> Measurement:
        """Starts a measurement; `end` must follow."""
        with self._lock:
            for other in self._open:
                other.alone = False
            measurement = Measurement(self._resident(), not self._open)
            self._open.add(measurement)
            return measurement

    def end(self, measurement: Measurement) -> int | None:
        """Growth in bytes; None if unknown or if another load overlapped."""
        with self._lock:
            self._open.remove(measurement)
            after = self._resident()
        if after is None or measurement.before is None or not measurement.alone:
            return None
        return max(after - measurement.before, 0)


class ReleasePace:
    """Decides which unloads release memory; the caller serialises the calls.

    A collection holds the GIL for milliseconds, in which no request goes on. So unloads of small models in
    quick succession share one.
    """

    def __init__(self, clock: Clock = monotonic_ns) -> None:
        self._clock = clock
        self._released_ns: int | None = None
        self._left = 0

    def due(self, taken: int | None) -> bool:
        """True if memory is to be released after an unload.

        Args:
            taken: Memory that the model has taken; None if unknown.
        """
        now = self._clock()
        if taken is not None and self._released_ns is not None and now < self._released_ns + _S:
            self._left += taken
            if self._left <= _LEFT_BYTES:
                return False
        self._released_ns, self._left = now, 0
        return True


def gc_frozen() -> bool:
    """True if `gc.freeze` has been called."""
    # Kept, as counting takes milliseconds with many objects; nothing here unfreezes them for good.
    if not _frozen.is_set() and gc.get_freeze_count():
        _frozen.set()
    return _frozen.is_set()


def release_memory(also_frozen: bool = False) -> None:
    """Collects garbage and trims the heap."""
    if also_frozen and gc_frozen():
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    else:
        gc.collect()
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache  # each CDLL object creates new types
def _malloc_trim() -> Callable[[int], object] | None:
    try:
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None  # no glibc
    return trim


def log_taken(what: str, grown: int | None) -> None:
    """Logs how much resident memory has grown, if it has: a model in a worker takes none."""
    _log("%s has taken %s", what, grown)


def log_released(what: str, before: int | None) -> None:
    """Logs how much resident memory has shrunk, if it has."""
    after = resident_bytes()
    if before is not None and after is not None:
        _log("%s gave back %s", what, before - after)


def _log(text: str, what: str, count: int | None) -> None:
    amount = f"{max(count or 0, 0) / _MEBIBYTE:.1f} MiB"
    if amount != "0.0 MiB":
        log.info(text, what, amount)
