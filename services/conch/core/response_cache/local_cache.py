"""A least-recently-used cache in this process's memory, shared by all models.

Threads and locks: any thread; one lock.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from conch.core.clock import Clock, monotonic_ns
from conch.core.response_cache.base import ResponseCache

ENTRY_OVERHEAD = 320
"""Bytes counted for an entry besides key and data: Python's overhead."""


@dataclass(frozen=True, slots=True)
class LocalCacheStatistics:
    """Counters of a local cache at one moment: bytes, entries, calls, and nanoseconds spent in them.

    `rejections` counts entries larger than the cache, `evictions` those dropped to make room, and
    `expirations` those dropped because they were too old.
    """

    size: int
    capacity: int
    entries: int
    lookups: int
    hits: int
    evictions: int
    expirations: int
    rejections: int
    lookup_ns: int = 0
    insertion_ns: int = 0

    @property
    def utilization(self) -> float:
        """Fraction of the capacity in use."""
        return self.size / self.capacity


class _Slot:
    __slots__ = ("cost", "entry", "expires_ns")

    def __init__(self, entry: bytes, cost: int, expires_ns: int) -> None:
        self.entry = entry
        self.cost = cost
        self.expires_ns = expires_ns


class LocalCache(ResponseCache):
    """A cache of `capacity` bytes, which evicts the least recently used entries.

    An expired entry is dropped when it is looked up or evicted.

    Args:
        capacity: Bytes of keys, entries and overhead.
        ttl_ns: Default lifetime of entries, in nanoseconds; 0 for no limit.
        clock: Monotonic time in nanoseconds.
    """

    def __init__(self, capacity: int, ttl_ns: int = 0, clock: Clock = monotonic_ns) -> None:
        self.ttl_ns = ttl_ns
        self._capacity = capacity
        self._clock = clock
        self._lock = threading.Lock()
        self._slots: OrderedDict[bytes, _Slot] = OrderedDict()  # least recently used first
        self._size = 0
        self._lookups = 0
        self._hits = 0
        self._evictions = 0
        self._expirations = 0
        self._rejections = 0
        self._lookup_ns = 0
        self._insertion_ns = 0

    def lookup(self, key: bytes) -> bytes | None:
        """The valid entry of a key, or None."""
        start = self._clock()
        with self._lock:
            self._lookups += 1
            entry = self._found(key, start)
            self._lookup_ns += self._clock() - start
            return entry

    def insert(self, key: bytes, entry: bytes, ttl_ns: int) -> bool:
        """Stores an entry; False if it is larger than the cache, which then drops the key's old one."""
        cost = len(key) + len(entry) + ENTRY_OVERHEAD
        dropped: list[_Slot] = []  # freed without the lock: freeing large blocks takes time
        start = self._clock()
        with self._lock:
            if key in self._slots:
                dropped.append(self._remove(key))
            if cost > self._capacity:
                self._rejections += 1
                return False
            while self._size + cost > self._capacity:
                dropped.append(self._remove(next(iter(self._slots))))
                self._evictions += 1
            self._slots[key] = _Slot(entry, cost, start + ttl_ns if ttl_ns else 0)
            self._size += cost
            self._insertion_ns += self._clock() - start
        return True

    def close(self) -> None:
        """Drops everything."""
        with self._lock:
            self._slots.clear()
            self._size = 0

    def snapshot(self) -> LocalCacheStatistics:
        """A consistent copy of all counters."""
        with self._lock:
            return LocalCacheStatistics(
                size=self._size,
                capacity=self._capacity,
                entries=len(self._slots),
                lookups=self._lookups,
                hits=self._hits,
                evictions=self._evictions,
                expirations=self._expirations,
                rejections=self._rejections,
                lookup_ns=self._lookup_ns,
                insertion_ns=self._insertion_ns,
            )

    def _found(self, key: bytes, now: int) -> bytes | None:
        slot = self._slots.get(key)
        if slot is None:
            return None
        if slot.expires_ns and now >= slot.expires_ns:
            self._expirations += 1
            self._remove(key)
            return None
        self._slots.move_to_end(key)
        self._hits += 1
        return slot.entry

    def _remove(self, key: bytes) -> _Slot:
        slot = self._slots.pop(key)
        self._size -= slot.cost
        return slot
