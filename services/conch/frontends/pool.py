"""Threads that front ends have requests wait on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

T = TypeVar("T")


class Pool(ThreadPoolExecutor):
    """Threads that can be waited for within a time."""

    def __init__(self, threads: int, name: str) -> None:
        super().__init__(threads, name)
        self._running: set[Future[Any]] = set()

    def submit(self, work: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        """See `ThreadPoolExecutor`."""
        future = super().submit(work, *arguments, **named)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def close(self, timeout_s: float) -> bool:
        """Takes no more work, gives up what has not begun, and waits for what has.

        Args:
            timeout_s: How long; storage that hangs may keep a thread for longer than anybody waits.

        Returns:
            Whether all has ended.
        """
        self.shutdown(wait=False, cancel_futures=True)
        ended = not wait(set(self._running), timeout_s).not_done
        if ended:
            self.shutdown(wait=True)  # the threads have nothing left to do
        return ended
