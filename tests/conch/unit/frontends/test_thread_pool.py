"""Pools of threads: as many as there is work for, and none without."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import pytest
from tests.support.core import WAIT_S
from tests.support.servers import eventually

from conch.core.errors import ResourceExhaustedError
from conch.door.thread_pool import QueueBounds, ThreadPool


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def test_threads_that_a_burst_has_started_end() -> None:
    pool = ThreadPool(4, "pool-burst", idle_s=0.01)
    go_on = threading.Event()
    futures = [pool.submit(go_on.wait, WAIT_S) for _ in range(10)]
    assert len(named("pool-burst")) == 4
    go_on.set()
    assert all(future.result(WAIT_S) for future in futures)
    eventually(lambda: not named("pool-burst"), "the threads end")
    assert pool.submit(max, 1, 2).result(WAIT_S) == 2  # and come again
    assert pool.close(WAIT_S)


def test_an_idle_thread_takes_the_next_work(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = threading.Semaphore(0)

    class Condition(threading.Condition):
        def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
            idle.release()  # what submits needs the lock, which the thread has until it sleeps
            return super().wait_for(predicate, timeout)

    with monkeypatch.context() as patch:
        patch.setattr("conch.door.thread_pool.threading.Condition", Condition)
        pool = ThreadPool(4, "pool-idle")
    for text in ["0"] * 100 + ["x"]:
        number = pool.submit(int, text)
        assert idle.acquire(timeout=WAIT_S)
    with pytest.raises(ValueError, match="invalid literal"):
        number.result(WAIT_S)
    assert len(named("pool-idle")) == 1
    assert pool.close(WAIT_S)
    assert not named("pool-idle")


def test_a_closed_pool_gives_up_what_has_not_begun() -> None:
    pool = ThreadPool(1, "pool-closed")
    begun, go_on = threading.Event(), threading.Event()

    def hang() -> bool:
        begun.set()
        return go_on.wait(WAIT_S)

    hangs = pool.submit(hang)
    assert begun.wait(WAIT_S)
    waits = pool.submit(int)
    assert not pool.close(0.0)
    with pytest.raises(CancelledError):
        waits.result(WAIT_S)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(int)
    go_on.set()
    assert hangs.result(WAIT_S)
    assert pool.close(WAIT_S)
    assert not named("pool-closed")


def test_what_waits_is_bounded_and_leaves_when_it_is_cancelled() -> None:
    pool = ThreadPool(1, "pool-bounded", bounds=QueueBounds("jobs", most=3, most_bytes=100))
    begun, go_on = threading.Event(), threading.Event()

    def hang() -> bool:
        begun.set()
        return go_on.wait(WAIT_S)

    running = pool.submit_sized(1000, hang)
    assert begun.wait(WAIT_S)
    large = pool.submit_sized(1000, int)  # alone, whatever its size
    with pytest.raises(ResourceExhaustedError, match=r"^1 jobs wait already, with 1000 bytes; try again"):
        pool.submit_sized(1, int)
    assert large.cancel()
    waiting = [pool.submit_sized(50, int), pool.submit_sized(50, int), pool.submit(int)]
    with pytest.raises(ResourceExhaustedError, match=r"^3 jobs wait already; try again"):
        pool.submit(int)
    assert waiting[0].cancel()
    waiting.append(pool.submit_sized(50, int))
    go_on.set()
    assert running.result(WAIT_S)
    assert [future.result(WAIT_S) for future in waiting[1:]] == [0, 0, 0]
    assert pool.close(WAIT_S)
