"""`FairPool`: threads for long work, shared fairly between clients.

Two works run at a time. Long work yields its slot regularly, so that short work waits only milliseconds. One
client has at most half of the threads. Work aborts at its next yield after a disconnect.

Threads and locks: `submit_for` runs on any thread; no lock is held while work runs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from conch.core.errors import CancelledError
from conch.door.thread_pool import TurnPool
from conch.frontends.yield_gil import on_yield

_THREADS: Final = 16
_AT_ONCE: Final = 2

T = TypeVar("T")


class AbandonedError(CancelledError):
    """Work was aborted because its client disconnected."""


class FairSemaphore:
    """A semaphore that serves threads in order of arrival."""

    def __init__(self, permits: int) -> None:
        self._lock = threading.Lock()
        self._free = permits
        self._waiting: deque[threading.Lock] = deque()

    def acquire(self) -> None:
        """Waits for a permit."""
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()

    def release(self) -> None:
        """Passes the permit to the longest waiting thread."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1

    def rotate(self) -> None:
        """Releases and reacquires the permit if a thread waits."""
        if self._waiting:  # without the lock: a thread that comes just now gets the next rotation
            self.release()
            self.acquire()


class FairPool(TurnPool):
    """Threads for long work of clients."""

    def __init__(self, name: str) -> None:
        super().__init__(_THREADS, name)
        self._slots = FairSemaphore(_AT_ONCE)

    def submit_for(
        self, client: str, gone: Callable[[], bool], work: Callable[..., T], *arguments: Any
    ) -> Future[T]:
        """Queues work for a client.

        Args:
            client: Address of the client; clients of one host share their threads.
            gone: True once the client disconnected; called on any thread.
            work: The function; calls `yield_gil` regularly.
            arguments: Its arguments.

        Returns:
            The result, or an `AbandonedError` after a disconnect.

        Raises:
            RuntimeError: The pool is closed, or no thread can be started.
        """
        return self.submit_in_turn(
            client.rpartition(":")[0], lambda: self._run_sliced(gone, lambda: work(*arguments))
        )

    def _run_sliced(self, gone: Callable[[], bool], work: Callable[[], T]) -> T:
        def check() -> None:
            if gone():
                raise AbandonedError("the client is gone")

        def pause() -> None:
            check()
            self._slots.rotate()

        self._slots.acquire()
        try:
            with on_yield(pause):
                check()
                return work()
        finally:
            self._slots.release()
