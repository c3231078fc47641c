"""Which executions count as hanging."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from conch.workers.hangs import HangDetector
from conch.workers.monitor import Timer

S = 1_000_000_000


class _Monitor:
    """Time that tests move, and the timers that are due with it."""

    def __init__(self) -> None:
        self.now = 0
        self.timers: list[tuple[int, Callable[[], None]]] = []
        self.clock = lambda: self.now

    def at(self, time_ns: int, function: Callable[[], None]) -> Any:
        timer = Timer(function)
        self.timers.append((time_ns, timer.fire))
        return timer

    def move(self, ns: int) -> None:
        self.now += ns
        while due := [each for each in self.timers if each[0] <= self.now]:
            self.timers.remove(due[0])
            due[0][1]()


def _detector(monitor: Any, found: list[int]) -> HangDetector:
    return HangDetector(monitor, 10.0, found.append)


def test_an_execution_that_lasts_too_long() -> None:
    monitor, found = _Monitor(), list[int]()
    hangs = _detector(monitor, found)
    first = hangs.begin()
    monitor.move(6 * S)
    hangs.begin()
    monitor.move(4 * S)
    assert found == [first]
    monitor.move(5 * S)
    assert found == [first]
    monitor.move(1 * S)
    assert len(found) == 2


def test_what_is_closed_notices_nothing() -> None:
    monitor, found = _Monitor(), list[int]()
    hangs = _detector(monitor, found)
    hangs.begin()
    hangs.close()
    monitor.move(100 * S)
    assert not found


@given(st.lists(st.tuples(st.integers(0, 15 * S), st.integers(0, 3)), max_size=40))
def test_exactly_those_that_did_not_end_in_time(steps: list[tuple[int, int]]) -> None:
    monitor, found = _Monitor(), list[int]()
    hangs = _detector(monitor, found)
    running: dict[int, int] = {}
    late: set[int] = set()
    for ns, ends in steps:
        number = hangs.begin()
        running[number] = monitor.now
        assert len(monitor.timers) == 1
        monitor.move(ns)
        late |= {each for each, start in running.items() if monitor.now - start >= 10 * S}
        running = {each: start for each, start in running.items() if each not in late}
        assert set(found) == late and len(found) == len(late)
        for each in list(running)[:ends]:
            hangs.end(each)
            del running[each]
    monitor.move(100 * S)
    assert set(found) == late | set(running)
    assert not monitor.timers
