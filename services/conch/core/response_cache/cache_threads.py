"""Threads for calls to a blocking cache, and the cache's health.

Owns: the threads, at most one for each connection, and a bounded queue of calls. A request does not wait for
long: calls beyond the bounds are refused, and after an error the cache is not called for a while. Requests
are then served without the cache.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from conch.core.clock import Clock
from conch.core.response_cache.base import ResponseCache
from conch.core.tensor import Buffer

log = logging.getLogger(__name__)

MOST_WAITING = 1024
MOST_BYTES_WAITING = 64 * 1024 * 1024
_PAUSE_NS = 1_000_000_000
_CLOSE_S = 5.0


class CacheThreads:
    """Makes the calls to one blocking cache."""

    def __init__(self, cache: ResponseCache, clock: Clock) -> None:
        self._cache = cache
        self._clock = clock
        self._lock = threading.Lock()
        self._woken = threading.Condition(self._lock)
        self._tasks: deque[tuple[Callable[[], None], int]] = deque()
        self._bytes = 0
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._failed = False
        self._retry_ns = 0

    @property
    def healthy(self) -> bool:
        """True if the last calls of the cache succeeded, or a retry is due."""
        return not self._failed or self._clock() >= self._retry_ns

    def submit(self, task: Callable[[], None], nbytes: int = 0) -> bool:
        """Calls a function on a thread; False, without a call, if the queue is full.

        `nbytes` is the memory that only the function keeps alive.
        """
        with self._lock:
            full = len(self._tasks) >= MOST_WAITING or self._bytes + nbytes > MOST_BYTES_WAITING
            if self._closed or full:
                return False
            self._tasks.append((task, nbytes))
            self._bytes += nbytes
            if len(self._tasks) <= self._idle:
                self._woken.notify()
            elif len(self._threads) < self._cache.connections:
                name = f"conch-cache-{len(self._threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        return True

    def lookup(self, key: bytes) -> Buffer | None:
        """An entry; None also while the cache is out of order."""
        if not self.healthy:
            return None
        try:
            entry = self._cache.lookup(key)
        except Exception as error:  # boundary: caches
            self._fail(error)
            return None
        self._recover()
        return entry

    def insert(self, key: bytes, entry: bytes, ttl_ns: int) -> bool:
        """Stores an entry; False only if the cache has no room for it."""
        if not self.healthy:
            return True
        try:
            kept = self._cache.insert(key, entry, ttl_ns)
        except Exception as error:  # boundary: caches
            self._fail(error)
            return True
        self._recover()
        return kept

    def close(self) -> None:
        """Drops queued calls and ends the threads; running calls may take a while."""
        with self._lock:
            self._closed = True
            self._tasks.clear()
            self._bytes = 0
            self._woken.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                task()
            except Exception:  # boundary: top of a thread
                log.exception("a call to the response cache failed")
            del task  # or it lives for as long as the thread sleeps

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            self._idle += 1
            self._woken.wait_for(lambda: self._closed or self._tasks)
            self._idle -= 1
            if self._closed:
                return None
            task, nbytes = self._tasks.popleft()
            self._bytes -= nbytes
            return task

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._retry_ns = self._clock() + _PAUSE_NS
            logged, self._failed = self._failed, True
        if not logged:
            log.warning("the response cache is out of order, models answer without it: %s", error)

    def _recover(self) -> None:
        if not self._failed:
            return
        with self._lock:
            logged, self._failed = not self._failed, False
        if not logged:
            log.info("the response cache answers again")
