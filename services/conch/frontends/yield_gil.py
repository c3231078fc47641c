"""Releases the GIL during long work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

_PIECE = 100
_MOMENT_S = 0.0001
_NEVER = threading.Event()


class _OfThread(threading.local):
    pause: Callable[[], None] | None = None


_here = _OfThread()


def yield_gil() -> None:
    """Lets other threads run between pieces of long work.

    Python forces a thread to drop the GIL after another has waited 5 ms without a break. numpy releases and
    retakes the GIL faster than a waiter wakes up, which restarts that wait, so waiters can starve. A short
    sleep lets them run.

    Raises:
        ConchError: The work is abandoned (see `on_yield`).
    """
    if _here.pause is not None:
        _here.pause()
    _NEVER.wait(_MOMENT_S)


@contextmanager
def on_yield(pause: Callable[[], None]) -> Iterator[None]:
    """Makes `yield_gil` call `pause` too, on this thread within the block; `pause` may raise to abort."""
    _here.pause = pause
    try:
        yield
    finally:
        _here.pause = None


def in_pieces(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Pieces of a long list, between which other threads run."""
    for start in range(0, len(items), _PIECE):
        if start:
            yield_gil()
        yield items[start : start + _PIECE]
