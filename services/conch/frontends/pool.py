"""Threads that front ends have requests wait on.

A thread is started when work comes and none is idle, up to a number; one that is idle for long ends, so that
what a burst of slow requests has started goes back.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

IDLE_S = 20.0
"""How long a thread waits for more work before it ends."""


class Pool(Executor):
    """Threads that can be waited for within a time.

    Args:
        threads: How many there are at most.
        name: What they are called after.
        idle_s: How long one waits for more work before it ends.
    """

    def __init__(self, threads: int, name: str, idle_s: float = IDLE_S) -> None:
        self._most = threads
        self._name = name
        self._idle_s = idle_s
        self._changed = threading.Condition()
        self._todo: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._started = 0
        self._closed = False
        self._running: set[Future[Any]] = set()

    def submit(self, work: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        """See `Executor.submit`.

        Raises:
            RuntimeError: The pool is closed, or no thread can be started.
        """
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("the pool is closed")
            item = future, partial(work, *arguments, **named)
            self._todo.append(item)
            if self._idle >= len(self._todo):
                self._changed.notify()
            elif len(self._threads) < self._most:
                try:
                    self._start()
                except RuntimeError:
                    if not self._threads:
                        self._todo.remove(item)
                        raise
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
        with self._changed:
            self._closed = True
            dropped, threads = [future for future, _ in self._todo], list(self._threads)
            self._todo.clear()
            self._changed.notify_all()
        for future in dropped:
            future.cancel()
        ended = not wait(set(self._running), timeout_s).not_done
        if ended:
            for thread in threads:
                thread.join()  # they have nothing left to do
        return ended

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more work; see `Executor.shutdown`."""
        if cancel_futures or not wait:
            self.close(threading.TIMEOUT_MAX if wait else 0)
            return
        with self._changed:
            self._closed = True
            threads = list(self._threads)
            self._changed.notify_all()
        for thread in threads:
            thread.join()

    def _start(self) -> None:
        # A daemon, as a process must not wait for storage that hangs.
        thread = threading.Thread(target=self._run, name=f"{self._name}_{self._started}", daemon=True)
        thread.start()
        self._started += 1
        self._threads.add(thread)

    def _run(self) -> None:
        while (item := self._next()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                try:
                    result = work()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del item, future, work  # what they refer to is not to wait for the next ones

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        """What to do next; None where the thread is to end."""
        with self._changed:
            if not self._todo and not self._closed:
                self._idle += 1
                try:
                    self._changed.wait_for(lambda: self._todo or self._closed, self._idle_s)
                finally:
                    self._idle -= 1
            if self._todo:
                return self._todo.popleft()
            self._threads.discard(threading.current_thread())
            return None
