"""`FairPool`: threads for long work, shared fairly between clients.

Two works run at a time. Long work yields its slot regularly, so that short work waits only milliseconds. One
client has at most half of the threads. Work aborts at its next yield after a disconnect.

Threads and locks: `submit_for` runs on any thread; no lock is held while work runs. The pool's own lock is
taken before that of `ThreadPool`.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from conch.core.errors import CancelledError
from conch.door.thread_pool import ThreadPool
from conch.frontends.yield_gil import on_yield

_THREADS: Final = 16
_OF_ONE_CLIENT: Final = 8
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


class FairPool(ThreadPool):
    """Threads for long work of clients."""

    def __init__(self, name: str) -> None:
        super().__init__(_THREADS, name)
        self._slots = FairSemaphore(_AT_ONCE)
        self._lock = threading.Lock()
        self._queues: dict[str, deque[_Job]] = {}
        self._threads_of: Counter[str] = Counter()
        self._refusing = False

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
        job = _Job(self._slots, gone, lambda: work(*arguments))
        host = client.rpartition(":")[0]
        with self._lock:
            if self._refusing:
                raise RuntimeError("the pool is closed")
            if self._threads_of[host] < _OF_ONE_CLIENT:
                # Before the job is queued and the thread counts: this may raise. `_serve` waits for the lock.
                self.submit(self._serve, host)
                self._threads_of[host] += 1
            self._queues.setdefault(host, deque()).append(job)
        return job.future

    def close(self, timeout_s: float) -> bool:
        """Cancels queued work and waits for running work; returns whether all has ended in time."""
        with self._lock:
            self._refusing = True
            for jobs in self._queues.values():
                for job in jobs:
                    job.future.cancel()
        return super().close(timeout_s)

    def _serve(self, host: str) -> None:
        """Runs one job of a client, then queues behind other clients."""
        with self._lock:
            # Empty if another thread of the client took the job that made this one go on.
            job = self._queues[host].popleft() if self._queues[host] else None
        if job is not None:
            job.run()
        with self._lock:
            if self._queues[host] and not self._refusing:
                again = True
            else:
                again = False
                self._threads_of[host] -= 1
                if not self._threads_of[host]:
                    del self._threads_of[host], self._queues[host]
        if again:
            self.submit(self._serve, host)


class _Job:
    def __init__(self, slots: FairSemaphore, gone: Callable[[], bool], work: Callable[[], Any]) -> None:
        self._slots = slots
        self._gone = gone
        self._work = work
        self.future: Future[Any] = Future()

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        self._slots.acquire()
        try:
            with on_yield(self._pause):
                self._check()
                result = self._work()
        except BaseException as error:  # boundary: the work; its future gets the error
            self.future.set_exception(error)
        else:
            self.future.set_result(result)
        finally:
            self._slots.release()

    def _pause(self) -> None:
        self._check()
        self._slots.rotate()

    def _check(self) -> None:
        if self._gone():
            raise AbandonedError("the client is gone")
