"""Executions that count as hanging."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tests.support.workers import batch_of, request_of

from conch.core.backend import BatchOutcome
from conch.core.errors import DeadlineExceededError, UnavailableError
from conch.core.scheduling.scheduler import Batch
from conch.workers.connection.worker_responses import OpenRequest
from conch.workers.supervision.process_monitor import Timer
from conch.workers.supervision.watchdog import ExecutionLimit, Watchdog

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


def _detector(monitor: Any, found: list[int]) -> Watchdog:
    return Watchdog(monitor, 10.0, found.append)


def test_an_execution_that_lasts_too_long() -> None:
    monitor, found = _Monitor(), list[int]()
    hangs = _detector(monitor, found)
    first = hangs.begin_batch()
    monitor.move(6 * S)
    hangs.begin_batch()
    monitor.move(4 * S)
    assert found == [first]
    monitor.move(5 * S)
    assert found == [first]
    monitor.move(1 * S)
    assert len(found) == 2


def test_what_is_closed_notices_nothing() -> None:
    monitor, found = _Monitor(), list[int]()
    hangs = _detector(monitor, found)
    hangs.begin_batch()
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
        number = hangs.begin_batch()
        running[number] = monitor.now
        assert len(monitor.timers) == 1
        monitor.move(ns)
        late |= {each for each, start in running.items() if monitor.now - start >= 10 * S}
        running = {each: start for each, start in running.items() if each not in late}
        assert set(found) == late and len(found) == len(late)
        for each in list(running)[:ends]:
            hangs.end_batch(each)
            del running[each]
    monitor.move(100 * S)
    assert set(found) == late | set(running)
    assert not monitor.timers


class _Link:
    """A worker whose model answers requests when their batch is done."""

    concurrent = True
    lost = False

    def __init__(self) -> None:
        self.entries: list[OpenRequest] = []

    def open_requests_of(self, batch: Batch) -> list[OpenRequest]:
        return self.entries


class _Process:
    def __init__(self) -> None:
        self.why: list[str] = []

    def abort(self, why: str) -> None:
        self.why.append(why)


def _entry(number: int) -> OpenRequest:
    return OpenRequest(request_of()[0], number, cast(Any, None), None)


CRASHED = UnavailableError("it has crashed")


@pytest.mark.parametrize("ends_anyway", [False, True])
def test_a_process_is_killed_unless_it_ends_in_any_case(ends_anyway: bool) -> None:
    monitor, process, outcomes = _Monitor(), _Process(), list[BatchOutcome]()
    executing = None if ends_anyway else process
    limit = ExecutionLimit(cast(Any, monitor), "m_0_0", 10.0, lambda: executing)
    done = limit.watch(_Link(), lambda _, outcome: outcomes.append(outcome))
    monitor.move(10 * S)
    done(batch_of(request_of()[0]), CRASHED)
    (outcome,) = outcomes
    if ends_anyway:
        assert not process.why and outcome is CRASHED
    else:
        (why,) = process.why
        assert why.startswith("the execution lasted longer than the 10 s")
        assert type(outcome) is DeadlineExceededError
        assert outcome.message == (
            f"Failed to process the request(s) for model instance 'm_0_0', message: {why}"
        )


@pytest.mark.parametrize("answered", [1, 2])
def test_a_batch_that_is_done_lasts_until_its_last_request_is_answered(answered: int) -> None:
    monitor, process, link = _Monitor(), _Process(), _Link()
    limit = ExecutionLimit(cast(Any, monitor), "m_0_0", 10.0, lambda: process)
    link.entries = [_entry(1), _entry(2)]
    limit.watch(link, lambda *_: None)(batch_of(request_of()[0]), [])
    for entry in link.entries[:answered]:
        assert entry.watched is not None
        entry.watched.ended(entry)
    monitor.move(10 * S)
    assert len(process.why) == 2 - answered
    last = link.entries[1]
    assert last.watched is not None
    error = last.watched.lost(last, CRASHED)
    assert type(error) is DeadlineExceededError if answered == 1 else error is CRASHED
