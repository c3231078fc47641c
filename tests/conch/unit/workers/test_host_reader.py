"""One thread reads at a time, for all that wait."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from tests.support.core import WAIT_S

from conch.workers.host.host_reader import HostReader


class Messages:
    """Messages that come when the test says so; counts the threads that read at the same time."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.readers: list[threading.Thread] = []
        self.asked: list[float] = []
        self.began = threading.Event()
        self.may_come = threading.Semaphore(0)
        self._alone = threading.Lock()
        self.reading = HostReader(self._step, self._ready)

    def _step(self) -> None:
        assert self._alone.acquire(blocking=False), "two threads read"
        try:
            self.readers.append(threading.current_thread())
            self.began.set()
            assert self.may_come.acquire(timeout=WAIT_S)
            self.read.append("message")
        finally:
            self._alone.release()

    def _ready(self, left_s: float) -> bool:
        self.asked.append(left_s)
        return False

    def come(self, count: int) -> Callable[[], bool]:
        """True once so many have been read."""
        return lambda: len(self.read) >= count


def test_nothing_is_read_for_what_has_come() -> None:
    messages = Messages()
    assert messages.reading.until(lambda: True)
    assert messages.readers == []


def test_who_waits_reads_until_it_has_come() -> None:
    messages = Messages()
    messages.may_come.release(3)
    assert messages.reading.until(messages.come(2))
    assert len(messages.read) == 2
    assert not messages.reading.busy


def test_who_waits_while_another_reads_goes_on_when_that_has_read_it() -> None:
    messages = Messages()
    ended: list[bool] = []
    reader = threading.Thread(target=lambda: ended.append(messages.reading.until(messages.come(2))))
    reader.start()
    assert messages.began.wait(WAIT_S)
    assert messages.reading.busy
    looked = threading.Event()

    def first_come() -> bool:
        looked.set()
        return messages.come(1)()

    waiter = threading.Thread(target=lambda: ended.append(messages.reading.until(first_come)))
    waiter.start()
    assert looked.wait(WAIT_S)
    messages.may_come.release()
    waiter.join(WAIT_S)
    assert ended == [True] and not waiter.is_alive()
    messages.may_come.release()
    reader.join(WAIT_S)
    assert ended == [True, True]
    assert set(messages.readers) == {reader}


def test_who_waits_reads_when_the_reader_has_what_it_waited_for() -> None:
    messages = Messages()
    reader = threading.Thread(target=messages.reading.until, args=(messages.come(1),))
    reader.start()
    assert messages.began.wait(WAIT_S)
    waiter = threading.Thread(target=messages.reading.until, args=(messages.come(2),))
    waiter.start()
    messages.may_come.release(2)
    for thread in (reader, waiter):
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert len(messages.read) == 2


def test_waiting_ends_with_its_time() -> None:
    messages = Messages()
    assert not messages.reading.until(lambda: False, 1e-4)
    assert messages.readers == [] and all(0 < left <= 1e-4 for left in messages.asked)
    assert not messages.reading.busy


def test_others_read_when_a_reader_has_failed() -> None:
    calls: list[str] = []

    def step() -> None:
        calls.append("step")
        if len(calls) == 1:
            raise KeyboardInterrupt

    reading = HostReader(step, lambda left_s: True)
    with pytest.raises(KeyboardInterrupt):
        reading.until(lambda: False)
    assert not reading.busy
    assert reading.until(lambda: len(calls) > 1)
