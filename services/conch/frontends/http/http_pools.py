"""The threads that read and write large bodies, shared fairly between clients.

Two bodies are worked on at a time, and those that take long take slots: a short one waits for some
milliseconds, whatever else is there. One client has half of the threads at most. Work ends at its
next pause once its connection is closed.

Threads and locks: `submit_for` may be called on any thread; no lock is held while work runs.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Final, TypeVar

from conch.core.errors import CancelledError, UnavailableError
from conch.frontends.http.yield_gil import on_yield
from conch.frontends.thread_pool import OperationPools, ThreadPool

_THREADS: Final = 16
_OF_ONE_CLIENT: Final = 8
_AT_ONCE: Final = 2

T = TypeVar("T")


class AbandonedError(CancelledError):
    """Work has ended early as the client that it was for is gone."""


class FairSemaphore:
    """Lets a number of threads run at once, in the order in which they come.

    Args:
        permits: How many.
    """

    def __init__(self, permits: int) -> None:
        self._lock = threading.Lock()
        self._free = permits
        self._waiting: deque[threading.Lock] = deque()

    def acquire(self) -> None:
        """WaitsFor for a place."""
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()

    def release(self) -> None:
        """Gives the place to the thread that has waited longest."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1

    def rotate(self) -> None:
        """Gives the place away and waits for the next one, if any thread waits."""
        if self._waiting:
            self.release()
            self.acquire()


class ParsingPool(ThreadPool):
    """The threads.

    Args:
        name: The beginning of their names.
    """

    def __init__(self, name: str = "conch-http-parse") -> None:
        super().__init__(_THREADS, name)
        self._slots = FairSemaphore(_AT_ONCE)
        self._lock = threading.Lock()
        self._queues: dict[str, deque[_Job]] = {}
        self._threads_of: Counter[str] = Counter()
        self._closed = False

    def submit_for(
        self, client: str, gone: Callable[[], bool], work: Callable[..., T], *arguments: Any
    ) -> Future[T]:
        """Runs something when it is its turn.

        Args:
            client: The client's address; clients with the same host share their slots.
            gone: Whether the client has hung up; asked on any thread.
            work: What to run; it calls `yield_gil` from time to time.
            arguments: What it takes.

        Returns:
            The result; an `AbandonedError` if the client has gone before.

        Raises:
            RuntimeError: The pool is closed.
        """
        job = _Job(self._slots, gone, lambda: work(*arguments))
        host = client.rpartition(":")[0]
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._queues.setdefault(host, deque()).append(job)
            if self._threads_of[host] >= _OF_ONE_CLIENT:
                return job.future
            self._threads_of[host] += 1
        self.submit(self._serve, host)
        return job.future

    def close(self, timeout_s: float) -> bool:
        """See `ThreadPool`."""
        with self._lock:
            self._closed = True
            for jobs in self._queues.values():
                for job in jobs:
                    job.future.cancel()
        return super().close(timeout_s)

    def _serve(self, host: str) -> None:
        """Runs the next job of a client; the one after it goes behind those of other clients."""
        with self._lock:
            job = self._queues[host].popleft()
        job.run()
        with self._lock:
            if self._queues[host] and not self._closed:
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
        except BaseException as error:
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


class Pools:
    """The thread pools of the REST front end.

    Attributes:
        operations: Run operations that block.
        parsing: Reads bodies, and writes large ones.
    """

    def __init__(self) -> None:
        self.operations = OperationPools("conch-http")
        self.parsing = ParsingPool()

    def close(self, left: Callable[[], float]) -> bool:
        """Takes no more work, gives up what has not begun, and waits for what has.

        Args:
            left: How many seconds there are left for that.

        Returns:
            Whether all has ended.
        """
        parsed = self.parsing.close(left())
        return self.operations.close(left) and parsed


async def run_on(pool: Executor, work: Callable[..., T], *arguments: object) -> T:
    """Runs something on a pool without blocking the loop.

    Raises:
        UnavailableError: The pool was closed before it could begin.
    """
    return await _result_of(lambda: pool.submit(work, *arguments))


async def parse_on(
    pool: ParsingPool, client: str, gone: Callable[[], bool], work: Callable[..., T], *arguments: object
) -> T:
    """Runs something on the pool for parsing without blocking the loop.

    Args:
        pool: The pool.
        client: The client's address.
        gone: Whether the client has hung up; asked on any thread.
        work: What to run.
        arguments: What it takes.

    Raises:
        AbandonedError: The client has hung up before it was done.
        UnavailableError: The pool was closed before it could begin.
    """
    return await _result_of(lambda: pool.submit_for(client, gone, work, *arguments))


async def _result_of(begin: Callable[[], Future[T]]) -> T:
    try:
        future = begin()
    except RuntimeError:  # the pool is closed
        raise UnavailableError("Server exiting") from None
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if future.cancelled() and not (task and task.cancelling()):
            raise UnavailableError("Server exiting") from None
        raise
