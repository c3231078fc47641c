"""A model's `is_ready`: asked on a thread of its own, for a limited time, whatever it does."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.support.servers import eventually
from tests.support.waiting import PATIENCE_S

from conch.backends.python.runtime.event_loop import EventLoop
from conch.backends.python.runtime.readiness_check import ReadinessCheck
from conch.core.servable import all_ready

SHORT_S = 0.05


def ask(check: ReadinessCheck) -> bool:
    return all_ready([check])


@pytest.mark.parametrize(
    ("answer", "ready"), [(True, True), (False, False), (np.True_, True), (None, False), (1, False)]
)
def test_the_answer(answer: Any, ready: bool) -> None:
    check = ReadinessCheck("m_0", lambda: answer, None, PATIENCE_S)
    assert ask(check) is ready
    check.close()


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit("no")])
def test_an_exception_means_no(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> bool:
        raise error

    check = ReadinessCheck("m_0", fail, None, PATIENCE_S)
    assert not ask(check)
    assert "is_ready of model 'm_0' failed" in caplog.text
    check.close()


def test_changes_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([True, False, False, True])
    check = ReadinessCheck("m_0", lambda: next(answers), None, PATIENCE_S)
    assert [ask(check) for _ in range(4)] == [True, False, False, True]
    assert [record.message for record in caplog.records] == [
        "model 'm_0' says that it is not ready",
        "model 'm_0' says that it is ready",
    ]


def test_one_that_hangs_is_asked_once() -> None:
    asked, go = threading.Semaphore(0), threading.Event()

    def hang() -> bool:
        asked.release()
        return go.wait(PATIENCE_S)

    check = ReadinessCheck("m_0", hang, None, SHORT_S)
    assert [ask(check) for _ in range(3)] == [False] * 3
    assert asked.acquire(timeout=PATIENCE_S)
    assert not asked.acquire(blocking=False), "the second thread"
    go.set()
    eventually(lambda: ask(check), "it is ready when it has answered")


def test_askers_at_the_same_time_share_a_check() -> None:
    entered, go = threading.Semaphore(0), threading.Event()

    def wait() -> bool:
        entered.release()
        return go.wait(PATIENCE_S)

    check = ReadinessCheck("m_0", wait, None, PATIENCE_S)
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.append(ask(check))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert entered.acquire(timeout=PATIENCE_S)
    go.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert answers == [True] * 3


def test_several_are_asked_side_by_side() -> None:
    barrier = threading.Barrier(3)

    def meet() -> bool:
        barrier.wait(PATIENCE_S)
        return True

    assert all_ready([ReadinessCheck(f"m_{n}", meet, None, PATIENCE_S) for n in range(3)])
    mixed = [ReadinessCheck(str(answer), partial(bool, answer), None, PATIENCE_S) for answer in (False, True)]
    assert not all_ready(mixed)
    assert all_ready([])


def test_coroutines() -> None:
    loop = EventLoop("m_0")
    stopped = threading.Event()

    async def yes() -> bool:
        await asyncio.sleep(0)
        return True

    async def hang() -> bool:
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            stopped.set()
        return True

    try:
        assert ask(ReadinessCheck("m_0", yes, loop, PATIENCE_S))
        check = ReadinessCheck("m_0", hang, loop, SHORT_S)

        def cancelled() -> bool:
            assert not ask(check)
            return stopped.is_set()

        # The time may be over before the coroutine has begun.
        eventually(cancelled, "it is cancelled")
        check.close()
    finally:
        loop.close()
