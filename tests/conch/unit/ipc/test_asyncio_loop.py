"""Coroutines on an I/O loop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from tests.support.servers import WAIT_S

from conch.ipc.asyncio_loop import AsyncioLoop, asyncio_loop
from conch.ipc.loop import SharedLoop

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture
def loop() -> Iterator[AsyncioLoop]:
    """A loop that is closed after the test."""
    shared = SharedLoop("test-loop")
    io = shared.hold()
    loop = asyncio_loop(io)
    yield loop
    asyncio.run_coroutine_threadsafe(loop.cancel_tasks(), loop).result(WAIT_S)
    loop.close()
    assert io.stop(WAIT_S)


@pytest.fixture
def run(loop: AsyncioLoop) -> Run:
    """Runs a coroutine on the loop."""
    return lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(WAIT_S)


def test_tasks_locks_timeouts_and_threads_work(run: Run) -> None:
    async def work() -> list[object]:
        lock, queue = asyncio.Lock(), asyncio.Queue[int](1)

        async def put() -> None:
            for number in range(3):
                async with lock:
                    await queue.put(number)
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(put())
            got: list[object] = [await queue.get() for _ in range(3)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        got.append(await asyncio.to_thread(threading.current_thread) is not threading.current_thread())
        got.append(asyncio.get_running_loop() is asyncio.current_task().get_loop())  # type: ignore[union-attr]
        return got

    assert run(work()) == [0, 1, 2, True, True]


def test_between_callbacks_its_thread_has_no_running_loop(loop: AsyncioLoop, run: Run) -> None:
    """As a model runs there, whose code may have a loop of its own."""
    seen: list[object] = []
    done = threading.Event()

    async def answer() -> int:
        return 7

    def model() -> None:
        try:
            seen.append(asyncio.run(answer()))
        finally:
            done.set()

    run(asyncio.sleep(0))
    loop.io.call_soon(model)
    assert done.wait(WAIT_S)
    assert seen == [7]


def test_what_is_cancelled_does_not_run(loop: AsyncioLoop, run: Run) -> None:
    async def work() -> list[str]:
        ran: list[str] = []
        for handle in (loop.call_soon(ran.append, "soon"), loop.call_later(0, ran.append, "later")):
            handle.cancel()
            assert handle.cancelled()
        loop.call_at(loop.time() - 1, ran.append, "at")
        while not ran:
            await asyncio.sleep(0)
        return ran

    assert run(work()) == ["at"]


def test_a_callback_that_fails_is_logged(
    loop: AsyncioLoop, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ValueError("unforeseen")

    async def work() -> None:
        loop.call_soon(fail)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    with caplog.at_level(logging.ERROR):
        run(work())
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ValueError]


def test_a_reader_is_called_until_it_is_removed(loop: AsyncioLoop, run: Run) -> None:
    one, other = socket.socketpair()
    one.setblocking(False)

    async def work() -> tuple[bytes, bool]:
        got: asyncio.Future[bytes] = loop.create_future()
        loop.add_reader(one, lambda: got.set_result(one.recv(10)))
        os.write(other.fileno(), b"abc")
        return await got, loop.remove_reader(one)

    with one, other:
        assert run(work()) == (b"abc", True)
        assert not loop.remove_reader(one), "it is removed"


def test_a_closed_loop_takes_nothing() -> None:
    shared = SharedLoop("test-loop")
    io = shared.hold()
    loop = asyncio_loop(io)
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon_threadsafe(print)
    assert io.stop(WAIT_S)
