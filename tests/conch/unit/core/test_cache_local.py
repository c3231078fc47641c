"""The local cache against a plain list that does the same, and its clock."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.support.clocks import Clock
from tests.support.profiles import scaled

from conch.core.response_cache.local_cache import ENTRY_OVERHEAD, LocalCache

KEYS = st.integers(0, 7).map(lambda number: bytes([number]) * 32)
S = 1_000_000_000


class LocalCacheMachine(RuleBasedStateMachine):
    """The reference: (key, entry, end) in a list, the one used longest ago first."""

    @initialize(capacity=st.integers(1, 4 * (ENTRY_OVERHEAD + 64)))
    def start(self, capacity: int) -> None:
        self.capacity = capacity
        self.clock = Clock(1)
        self.cache = LocalCache(capacity, clock=self.clock)
        self.kept: list[tuple[bytes, bytes, int]] = []

    def size(self) -> int:
        return sum(len(key) + len(entry) + ENTRY_OVERHEAD for key, entry, _ in self.kept)

    @rule(key=KEYS, size=st.integers(0, 200), ttl=st.sampled_from([0, 5, 20]))
    def insert(self, key: bytes, size: int, ttl: int) -> None:
        entry = bytes([size]) * size
        self.kept = [kept for kept in self.kept if kept[0] != key]
        fits = len(key) + size + ENTRY_OVERHEAD <= self.capacity
        assert self.cache.insert(key, entry, ttl) is fits
        if fits:
            self.kept.append((key, entry, self.clock.now + ttl if ttl else 0))
            while self.size() > self.capacity:
                del self.kept[0]

    @rule(key=KEYS)
    def lookup(self, key: bytes) -> None:
        found = next((kept for kept in self.kept if kept[0] == key), None)
        if found is not None:
            self.kept.remove(found)
            if found[2] and self.clock.now >= found[2]:
                found = None
            else:
                self.kept.append(found)
        assert self.cache.lookup(key) == (found[1] if found else None)

    @rule(ns=st.integers(1, 10))
    def wait(self, ns: int) -> None:
        self.clock.now += ns

    @invariant()
    def balances(self) -> None:
        if not hasattr(self, "cache"):
            return
        state = self.cache.snapshot()
        assert state.size == self.size() <= self.capacity == state.capacity
        assert state.entries == len(self.kept)
        assert 0 <= state.utilization <= 1


TestLocalCache = LocalCacheMachine.TestCase
TestLocalCache.settings = settings(max_examples=scaled(100), stateful_step_count=50, deadline=None)


def test_entries_end_in_time() -> None:
    clock = Clock(1)
    cache = LocalCache(10_000, clock=clock)
    cache.insert(b"short", b"1", 10 * S)
    cache.insert(b"long", b"2", 0)
    clock.now += 10 * S - 1
    assert (cache.lookup(b"short"), cache.lookup(b"long")) == (b"1", b"2")
    clock.now += 1
    assert (cache.lookup(b"short"), cache.lookup(b"long")) == (None, b"2")
    cache.insert(b"short", b"3", 10 * S)
    clock.now += 5 * S
    assert cache.lookup(b"short") == b"3"
    clock.now += 5 * S  # a look does not make it last longer
    assert cache.lookup(b"short") is None
    state = cache.snapshot()
    assert (state.entries, state.expirations, state.lookups, state.hits) == (1, 2, 6, 4)


def test_counters() -> None:
    cache = LocalCache(2 * (ENTRY_OVERHEAD + 2))
    for key in (b"a", b"b", b"c"):
        assert cache.insert(key, b"1", 0)
    assert not cache.insert(b"d", bytes(10_000), 0)
    assert [cache.lookup(key) for key in (b"a", b"b", b"c", b"d")] == [None, b"1", b"1", None]
    state = cache.snapshot()
    assert (state.evictions, state.rejections, state.lookups, state.hits) == (1, 1, 4, 2)
    assert state.utilization == 1
    cache.close()
    assert cache.snapshot().size == cache.snapshot().entries == 0


@pytest.mark.parametrize("threads", [4])
def test_many_threads_keep_the_budget(threads: int) -> None:
    cache = LocalCache(20 * (ENTRY_OVERHEAD + 300))
    start = threading.Barrier(threads)

    def work(seed: int) -> None:
        start.wait()
        for step in range(3000):
            number = (step * 7919 + seed * 31) % 60
            key = bytes([number]) * 32
            if step % 3:
                found = cache.lookup(key)
                assert found is None or found == key * (1 + number % 5)
            else:
                cache.insert(key, key * (1 + number % 5), 0)
            if not step % 100:
                state = cache.snapshot()
                assert state.size <= state.capacity

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    state = cache.snapshot()
    assert state.evictions > 0
    assert state.hits > 0
    assert state.size <= state.capacity


def test_the_entry_used_longest_ago_goes_first() -> None:
    cache = LocalCache(2 * (ENTRY_OVERHEAD + 2))
    for key in (b"a", b"b"):
        assert cache.insert(key, b"1", 0)
    assert cache.lookup(b"a") == b"1"
    assert cache.insert(b"c", b"1", 0)
    assert [cache.lookup(key) for key in (b"a", b"b", b"c")] == [b"1", None, b"1"]
