"""The threads for large bodies: short work overtakes long work, and work of closed connections ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import pytest
from tests.support.servers import WAIT_S, eventually

from conch.core.errors import CancelledError
from conch.frontends.fair_pool import AbandonedError, FairPool
from conch.frontends.yield_gil import yield_gil


class Long:
    """Work that goes on until it is ended, or its client goes."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.end = threading.Event()
        self.gone = threading.Event()
        self.steps = 0

    def __call__(self) -> int:
        self.begun.set()
        while not self.end.is_set():
            self.steps += 1
            yield_gil()
        return self.steps


@pytest.fixture
def pool() -> Iterator[FairPool]:
    pool = FairPool("test-parse")
    yield pool
    assert pool.close(WAIT_S)


def flood(pool: FairPool, count: int) -> list[Long]:
    """So many long works of one client, on connections of their own."""
    works = [Long() for _ in range(count)]
    for port, work in enumerate(works):
        pool.submit_for(f"10.0.0.1:{port}", work.gone.is_set, work)
    return works


def test_short_work_is_done_beside_long_work_of_the_same_client(pool: FairPool) -> None:
    works = flood(pool, 5)
    try:
        for work in works:
            assert work.begun.wait(WAIT_S), "they take slots"
        assert pool.submit_for("10.0.0.1:99", lambda: False, lambda: 7).result(WAIT_S) == 7
        steps = [work.steps for work in works]
        eventually(
            lambda: all(work.steps > step for work, step in zip(works, steps, strict=True)), "all go on"
        )
    finally:
        for work in works:
            work.end.set()


def test_another_client_has_its_turn_however_much_one_has_sent(pool: FairPool) -> None:
    works = flood(pool, 100)
    try:
        assert pool.submit_for("10.0.0.2:1", lambda: False, lambda: 7).result(WAIT_S) == 7
    finally:
        for work in works:
            work.end.set()
    for work in works:
        assert work.begun.wait(WAIT_S), "each has its turn in the end"


def test_work_of_a_client_that_is_gone_ends(pool: FairPool) -> None:
    work, waits = Long(), Long()
    future = pool.submit_for("10.0.0.1:1", work.gone.is_set, work)
    assert work.begun.wait(WAIT_S)
    waits.gone.set()
    never = pool.submit_for("10.0.0.1:2", waits.gone.is_set, waits)
    work.gone.set()
    for each in (future, never):
        with pytest.raises(AbandonedError):
            each.result(WAIT_S)
    assert not waits.begun.is_set(), "work of a closed connection does not begin"


def test_what_has_not_begun_is_given_up_when_the_pool_closes() -> None:
    pool = FairPool("test-parse")
    works = [Long() for _ in range(20)]
    futures = [pool.submit_for("10.0.0.1:1", work.gone.is_set, work) for work in works]
    assert works[0].begun.wait(WAIT_S)
    assert not pool.close(0.0)
    with pytest.raises(RuntimeError):
        pool.submit_for("10.0.0.1:1", lambda: False, lambda: 7)
    for work in works:
        work.end.set()
    for future in futures:
        with suppress(CancelledError):
            if not future.cancelled():
                future.result(WAIT_S)
    assert futures[-1].cancelled()


def test_a_thread_that_finds_its_job_taken_ends(pool: FairPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as one of its client's threads no longer, or the client would have none left in the end.

    1. Thread A runs job 1; job 2 is queued, and a thread B for it.
    2. A ends, sees job 2 and goes on: it queues itself again.
    3. B runs job 2 first; A finds no job.
    """
    queued: list[partial[object]] = []
    with monkeypatch.context() as patch:
        patch.setattr(pool, "submit", lambda work, *arguments: queued.append(partial(work, *arguments)))
        for _ in range(8):
            futures = [pool.submit_for("10.0.0.1:1", lambda: False, lambda: 7) for _ in range(2)]
            while queued:
                queued.pop(0)()
            assert [future.result(0) for future in futures] == [7, 7]
    assert pool.submit_for("10.0.0.1:1", lambda: False, lambda: 7).result(WAIT_S) == 7


def test_work_that_gets_no_thread_is_neither_queued_nor_counted(
    pool: FairPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the client would have no thread left after some failures, and old work would run later."""
    ran: list[int] = []

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        for number in range(8):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                pool.submit_for("10.0.0.1:1", lambda: False, ran.append, number)
    assert pool.submit_for("10.0.0.1:1", lambda: False, lambda: 7).result(WAIT_S) == 7
    assert ran == []
