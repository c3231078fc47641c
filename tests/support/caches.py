"""Caches for tests: one that takes as long as a test wants it to, or fails."""

from __future__ import annotations

import threading

from tests.support.core import WAIT_S

from conch.core.response_cache.base import ResponseCache


class NetworkCache(ResponseCache):
    """Stands for a cache behind a network.

    Attributes:
        entries: Values that it holds, with the time each is valid.
        calls: Every call, in their order.
        error: Error that calls raise, if any.
        threads: Names of the threads that called.
    """

    blocking = True
    shared = True

    def __init__(self, connections: int = 2, patience_ns: int = 60_000_000_000) -> None:
        self.connections = connections
        self.patience_ns = patience_ns
        self.entries: dict[bytes, tuple[bytes, int]] = {}
        self.calls: list[str] = []
        self.error: Exception | None = None
        self.room = True
        self.threads: set[str] = set()
        self.closed = 0
        self._entered = threading.Semaphore(0)
        self._open = threading.Event()
        self._open.set()

    def hold(self) -> None:
        """Makes calls wait."""
        self._open.clear()

    def release(self) -> None:
        """Lets them go on."""
        self._open.set()

    def wait_entered(self) -> None:
        """Waits for a call to come."""
        assert self._entered.acquire(timeout=WAIT_S), "nobody asks the cache"

    def lookup(self, key: bytes) -> bytes | None:
        self._enter("lookup")
        found = self.entries.get(key)
        return None if found is None else found[0]

    def insert(self, key: bytes, entry: bytes, ttl_ns: int) -> bool:
        self._enter("insert")
        if self.room:
            self.entries[key] = (entry, ttl_ns)
        return self.room

    def close(self) -> None:
        self.closed += 1

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        self.threads.add(threading.current_thread().name)
        self._entered.release()
        assert self._open.wait(WAIT_S), "the test never released the cache"
        if self.error is not None:
            raise self.error
