"""Long work that other threads are to run beside."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_MOMENT_S = 0.0001
_NEVER = threading.Event()


class _OfThread(threading.local):
    pause: Callable[[], None] | None = None


_here = _OfThread()


def yield_gil() -> None:
    """Lets other threads run before the next piece of a long work.

    Python has a thread pass the interpreter on when another has waited for it for 5 ms without a break. Work
    in whose course numpy lets go of it for moments, and takes it back before anybody has woken up, is never
    told to: others may wait for as long as it takes. So it stops for a moment that is long enough.

    Raises:
        ConchError: The work is of no use any more (see `on_yield`).
    """
    if _here.pause is not None:
        _here.pause()
    _NEVER.wait(_MOMENT_S)


@contextmanager
def on_yield(pause: Callable[[], None]) -> Iterator[None]:
    """Has `yield_gil` call something too, on this thread and in this block.

    Args:
        pause: WaitsFor for the next turn of the work, or raises to end it.
    """
    _here.pause = pause
    try:
        yield
    finally:
        _here.pause = None
