"""`ThreadPool`: starts a thread when work comes and none is idle, up to a limit; an idle thread ends.

What waits may be bounded, in number and bytes, and leaves the queue when its future is cancelled. The clients
of a `TurnPool` take turns.
Threads and locks: any thread; one condition for each pool. Pool threads are daemons: storage may hang. A turn
pool's own lock is taken before that condition.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from functools import partial
from typing import Any, NamedTuple, TypeVar

from conch.core.errors import ResourceExhaustedError

T = TypeVar("T")

IDLE_S = 20.0
"""The time after which an idle thread ends."""

MOST_WAITING = 1024
"""Operations of a kind that may wait: as many as clients may have open on a connection."""

MOST_WAITING_BYTES = 1 << 30
"""Bytes of the requests that wait: loads bring models' files."""


class QueueBounds(NamedTuple):
    """Bounds of a pool's queue, in work items and bytes; `what` names them in the error."""

    what: str
    most: int = MOST_WAITING
    most_bytes: int = MOST_WAITING_BYTES


class _Work(NamedTuple):
    run: Callable[[], Any]
    size: int


class ThreadPool(Executor):
    """An executor that `close` waits for with a timeout.

    Args:
        threads: Largest number of threads.
        name: Prefix of the threads' names.
        idle_s: Time after which an idle thread ends.
        bounds: Bounds of the queue; None for none.
    """

    def __init__(
        self, threads: int, name: str, idle_s: float = IDLE_S, bounds: QueueBounds | None = None
    ) -> None:
        self._max_threads = threads
        self._name = name
        self._idle_s = idle_s
        self._bounds = bounds
        self._changed = threading.Condition()
        self._queue: OrderedDict[Future[Any], _Work] = OrderedDict()
        self._waiting_bytes = 0
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._started = 0
        self._closed = False
        self._running: set[Future[Any]] = set()

    def submit(self, work: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        """Submits work that holds no bytes; raises as `submit_sized`."""
        return self.submit_sized(0, partial(work, *arguments, **named))

    def submit_sized(self, size: int, work: Callable[[], T]) -> Future[T]:
        """Submits work that holds so many bytes while it waits; a future that is cancelled leaves the queue.

        Raises:
            RuntimeError: The pool is closed, or no thread can be started.
            ResourceExhaustedError: Too much waits already.
        """
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("the pool is closed")
            starts = self._idle <= len(self._queue) and len(self._threads) < self._max_threads
            if self._bounds is not None and not starts and self._idle <= len(self._queue):
                self._check_room(self._bounds, size)
            self._queue[future] = _Work(work, size)
            self._waiting_bytes += size
            if starts:
                try:
                    self._start()
                except RuntimeError:
                    if not self._threads:
                        self._take(future)
                        raise
            elif self._idle >= len(self._queue):
                self._changed.notify()
            self._running.add(future)
        future.add_done_callback(self._ended)
        return future

    def _check_room(self, bounds: QueueBounds, size: int) -> None:
        """Raises ResourceExhaustedError: the queue is full; a request of any size may wait alone."""
        advice = "try again when some of them have ended"
        if len(self._queue) >= bounds.most:
            raise ResourceExhaustedError(f"{len(self._queue)} {bounds.what} wait already; {advice}")
        if self._waiting_bytes and self._waiting_bytes + size > bounds.most_bytes:
            raise ResourceExhaustedError(
                f"{len(self._queue)} {bounds.what} wait already, with {self._waiting_bytes} bytes; {advice}"
            )

    def _take(self, future: Future[Any]) -> _Work | None:
        """Takes work out of the queue, if it still waits; the caller has the lock."""
        work = self._queue.pop(future, None)
        if work is not None:
            self._waiting_bytes -= work.size
        return work

    def _ended(self, future: Future[Any]) -> None:
        self._running.discard(future)
        if future.cancelled():
            with self._changed:
                self._take(future)

    def close(self, timeout_s: float) -> bool:
        """Cancels queued work and waits for running work; returns whether all has ended in time."""
        with self._changed:
            self._closed = True
            dropped, threads = list(self._queue), list(self._threads)
            self._queue.clear()
            self._waiting_bytes = 0
            self._changed.notify_all()
        for future in dropped:
            future.cancel()
        ended = not wait(set(self._running), timeout_s).not_done
        if ended:
            for thread in threads:
                thread.join()  # at once: the queue is empty
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
        thread = threading.Thread(target=self._run, name=f"{self._name}_{self._started}", daemon=True)
        thread.start()
        self._started += 1
        self._threads.add(thread)

    def _run(self) -> None:
        while (item := self._next()) is not None:
            _complete(item[0], item[1].run)
            del item  # frees what it refers to before the next wait

    def _next(self) -> tuple[Future[Any], _Work] | None:
        """Returns the next item; None if the thread ends."""
        with self._changed:
            if not self._queue and not self._closed:
                self._idle += 1
                try:
                    self._changed.wait_for(lambda: self._queue or self._closed, self._idle_s)
                finally:
                    self._idle -= 1
            if self._queue:
                future, work = self._queue.popitem(last=False)
                self._waiting_bytes -= work.size
                return future, work
            self._threads.discard(threading.current_thread())
            return None


class TurnPool(ThreadPool):
    """A pool whose clients take turns; one client has at most half of the threads.

    Args:
        threads: Largest number of threads.
        name: Prefix of the threads' names.
        idle_s: Time after which an idle thread ends.
    """

    def __init__(self, threads: int, name: str, idle_s: float = IDLE_S) -> None:
        super().__init__(threads, name, idle_s)
        self._of_one_client = threads // 2
        self._lock = threading.Lock()
        self._queues: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        self._threads_of: Counter[str] = Counter()
        self._refusing = False

    def submit_in_turn(self, client: str, work: Callable[[], T]) -> Future[T]:
        """Queues work for a client.

        Raises:
            RuntimeError: The pool is closed, or no thread can be started.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._refusing:
                raise RuntimeError("the pool is closed")
            if self._threads_of[client] < self._of_one_client:
                # Before the work is queued and the thread counts: it may raise. `_serve` waits for the lock.
                self.submit(self._serve, client)
                self._threads_of[client] += 1
            self._queues.setdefault(client, deque()).append((future, work))
        return future

    def close(self, timeout_s: float) -> bool:
        """Cancels queued work and waits for running work; returns whether all has ended in time."""
        with self._lock:
            self._refusing = True
            queued = [future for queue in self._queues.values() for future, _ in queue]
        for future in queued:
            future.cancel()
        return super().close(timeout_s)

    def _serve(self, client: str) -> None:
        """Runs one piece of a client's work, then queues behind other clients."""
        with self._lock:
            # Empty if another thread of the client took the work that made this one go on.
            item = self._queues[client].popleft() if self._queues[client] else None
        if item is not None:
            _complete(*item)
        with self._lock:
            again = bool(self._queues[client]) and not self._refusing
            if not again:
                self._threads_of[client] -= 1
                if not self._threads_of[client]:
                    del self._threads_of[client], self._queues[client]
        if again:
            self.submit(self._serve, client)


def _complete(future: Future[T], work: Callable[[], T]) -> None:
    """Does work, unless its future was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # boundary: the work; its future gets the error
        future.set_exception(error)
    else:
        future.set_result(result)
