"""Decisions of when to poll and when to rest, with a clock that the test moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.ipc.busy_poll import (
    ALONE_AFTER,
    ALONE_LATE_NS,
    ALONE_MOST_NS,
    AT_ONCE_NS,
    LATE_NS,
    LONGEST_REST_HELD_UP,
    MOST_NS,
    BusyPoll,
)

STEP_NS = 1_000


class Arrival:
    """Something that is there after a time, if a thread looks for it then.

    Attributes:
        now: The time.
        at: Time at which it comes.
        step: Duration of a look.
        looks: Number of looks.
        courtesies: Number of times others were let go first.
    """

    def __init__(self) -> None:
        self.now = 0
        self.at = 0
        self.step = STEP_NS
        self.looks = 0
        self.courtesies = 0

    def yield_cpu(self) -> None:
        self.courtesies += 1

    def look(self) -> bool:
        self.now += self.step
        self.looks += 1
        return self.now >= self.at

    def wait(self, spinning: BusyPoll, after_ns: int) -> bool:
        """One wait for what comes after a time; whether it was there in time."""
        self.at = self.now + after_ns
        there = spinning.wait()
        self.now = max(self.now, self.at)
        return there

    def come(self, spinning: BusyPoll, after_ns: int, requests: int = 1) -> bool:
        """One wait for requests that come after a time, and what they tell."""
        since = self.now
        there = self.wait(spinning, after_ns)
        spinning.record_arrival(requests, since)
        return there


def made() -> tuple[Arrival, BusyPoll]:
    arrival = Arrival()
    return arrival, BusyPoll(arrival.look, lambda: arrival.now, arrival.yield_cpu)


def alone() -> tuple[Arrival, BusyPoll]:
    """One that waits for a single client's requests, which come too late to be looked for otherwise."""
    arrival, spinning = made()
    for _ in range(ALONE_AFTER):
        arrival.come(spinning, ALONE_MOST_NS - STEP_NS)
    assert not arrival.courtesies
    return arrival, spinning


def test_what_comes_soon_is_waited_for_every_time() -> None:
    arrival, spinning = made()
    assert all(arrival.wait(spinning, MOST_NS // 2) for _ in range(100))


def test_what_comes_late_is_hardly_looked_for() -> None:
    arrival, spinning = made()
    for _ in range(100):
        assert not arrival.wait(spinning, 10 * MOST_NS)
    spent = arrival.looks * STEP_NS
    assert spent <= 8 * MOST_NS  # at first, and then after 1, 3, 7, ... waits
    while not arrival.wait(spinning, 0):
        pass  # there is another look in the end
    assert sum(arrival.wait(spinning, 0) for _ in range(1000)) > 900


@pytest.mark.parametrize("single", [False, True])
def test_after_polls_that_are_held_up_there_are_hardly_any(single: bool) -> None:
    arrival, spinning = alone() if single else made()
    arrival.looks = 0
    arrival.step = ALONE_LATE_NS + 1  # others have the processor between two looks
    for _ in range(4000):
        assert not arrival.wait(spinning, 3 * arrival.step)
    assert arrival.looks <= 6
    arrival.step = STEP_NS
    while not arrival.wait(spinning, 2 * STEP_NS):
        pass  # there is another look in the end
    assert all(arrival.wait(spinning, 2 * STEP_NS) for _ in range(100))


@given(st.lists(st.tuples(st.integers(0, 2 * MOST_NS), st.integers(100, 2 * LATE_NS)), max_size=60))
def test_a_wait_ends(waits: list[tuple[int, int]]) -> None:
    arrival, spinning = made()
    for after, arrival.step in waits:
        before, looks = arrival.now, arrival.looks
        there = spinning.wait() if not after else arrival.wait(spinning, after)
        assert arrival.now - before <= max(MOST_NS + 2 * arrival.step, after)
        assert not there or arrival.looks > looks
    looks, waits_without = arrival.looks, 0
    while arrival.looks == looks:
        assert waits_without <= LONGEST_REST_HELD_UP
        spinning.wait()
        waits_without += 1


def test_a_single_client_is_waited_for_longer_and_others_go_first() -> None:
    arrival, spinning = alone()
    arrival.looks = 0
    assert all(arrival.come(spinning, ALONE_MOST_NS - STEP_NS) for _ in range(100))
    assert arrival.courtesies == arrival.looks - 100  # after each look in vain


def test_a_single_client_is_waited_for_although_others_had_the_processor() -> None:
    arrival, spinning = alone()
    arrival.step = 2 * ALONE_LATE_NS // 3
    assert all(arrival.come(spinning, 2 * arrival.step - STEP_NS) for _ in range(100))
    arrival.step = ALONE_LATE_NS + 1
    there = [arrival.wait(spinning, ALONE_MOST_NS + ALONE_LATE_NS) for _ in range(100)]
    assert not any(there)


def test_requests_that_come_together_or_at_once_are_not_a_single_client_s() -> None:
    for after, requests in ((MOST_NS, 2), (AT_ONCE_NS - 2 * STEP_NS, 1)):
        arrival, spinning = alone()
        arrival.come(spinning, after, requests)
        arrival.courtesies = 0
        for _ in range(ALONE_AFTER):
            arrival.come(spinning, ALONE_MOST_NS - STEP_NS)
        assert not arrival.courtesies
        arrival.come(spinning, ALONE_MOST_NS - STEP_NS)
        assert arrival.courtesies


def test_a_client_that_takes_its_time_is_hardly_looked_for() -> None:
    arrival, spinning = alone()
    for _ in range(ALONE_AFTER):
        arrival.come(spinning, 10 * ALONE_MOST_NS)
    arrival.looks = arrival.courtesies = 0
    for _ in range(1000):
        arrival.come(spinning, 10 * ALONE_MOST_NS)
    assert not arrival.courtesies
    assert arrival.looks * STEP_NS <= 10 * MOST_NS
