"""The threads that read and write large bodies, shared fairly between clients.

Two bodies are worked on at a time, and those that take long take turns: a short one waits for some
milliseconds, whatever else is there. One client has half of the threads at most. Work ends at its
next pause once its connection is closed.

Threads and locks: `submit_for` may be called on any thread; no lock is held while work runs.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from conch.core.errors import CancelledError
from conch.frontends.http.turns import pausing
from conch.frontends.thread_pool import ThreadPool

_THREADS: Final = 16
_OF_ONE_CLIENT: Final = 8
_AT_ONCE: Final = 2

T = TypeVar("T")


class AbandonedError(CancelledError):
    """Work has ended early as the client that it was for is gone."""


class Turnstile:
    """Lets a number of threads run at once, in the order in which they come.

    Args:
        at_once: How many.
    """

    def __init__(self, at_once: int) -> None:
        self._lock = threading.Lock()
        self._free = at_once
        self._waiting: deque[threading.Lock] = deque()

    def enter(self) -> None:
        """Waits for a place."""
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()

    def leave(self) -> None:
        """Gives the place to the thread that has waited longest."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1

    def pass_on(self) -> None:
        """Gives the place away and waits for the next one, if any thread waits."""
        if self._waiting:
            self.leave()
            self.enter()


class ParsingPool(ThreadPool):
    """The threads.

    Args:
        name: The beginning of their names.
    """

    def __init__(self, name: str = "conch-http-parse") -> None:
        super().__init__(_THREADS, name)
        self._turns = Turnstile(_AT_ONCE)
        self._lock = threading.Lock()
        self._queues: dict[str, deque[_Job]] = {}
        self._threads_of: Counter[str] = Counter()
        self._closed = False

    def submit_for(
        self, client: str, gone: Callable[[], bool], work: Callable[..., T], *arguments: Any
    ) -> Future[T]:
        """Runs something when it is its turn.

        Args:
            client: The client's address; clients with the same host share their turns.
            gone: Whether the client has hung up; asked on any thread.
            work: What to run; it calls `give_way` from time to time.
            arguments: What it takes.

        Returns:
            The result; an `AbandonedError` if the client has gone before.

        Raises:
            RuntimeError: The pool is closed.
        """
        job = _Job(self._turns, gone, lambda: work(*arguments))
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
    def __init__(self, turns: Turnstile, gone: Callable[[], bool], work: Callable[[], Any]) -> None:
        self._turns = turns
        self._gone = gone
        self._work = work
        self.future: Future[Any] = Future()

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        self._turns.enter()
        try:
            with pausing(self._pause):
                self._check()
                result = self._work()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)
        finally:
            self._turns.leave()

    def _pause(self) -> None:
        self._check()
        self._turns.pass_on()

    def _check(self) -> None:
        if self._gone():
            raise AbandonedError("the client is gone")
