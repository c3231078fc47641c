"""Who waits awake, and when not: with a clock that somebody moves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from conch.workers.spinning import LATE_NS, LONGEST_REST, MOST_NS, Spinning

STEP_NS = 1_000


class Arrival:
    """Something that is there after a time, if somebody looks for it then.

    Attributes:
        now: The time.
        at: When it comes.
        step: How long a look takes.
        looks: How many there were.
    """

    def __init__(self) -> None:
        self.now = 0
        self.at = 0
        self.step = STEP_NS
        self.looks = 0

    def look(self) -> bool:
        self.now += self.step
        self.looks += 1
        return self.now >= self.at

    def wait(self, spinning: Spinning, after_ns: int) -> bool:
        """One wait for what comes after a time; whether it was there in time."""
        self.at = self.now + after_ns
        there = spinning.wait()
        self.now = max(self.now, self.at)
        return there


def made() -> tuple[Arrival, Spinning]:
    arrival = Arrival()
    return arrival, Spinning(arrival.look, lambda: arrival.now)


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


def test_who_is_held_up_looks_no_more() -> None:
    arrival, spinning = made()
    arrival.step = LATE_NS + 1  # others have the processor between two looks
    for _ in range(10):
        assert not arrival.wait(spinning, MOST_NS // 2)
    assert arrival.looks <= 5


@given(st.lists(st.tuples(st.integers(0, 2 * MOST_NS), st.integers(100, 2 * LATE_NS)), max_size=60))
def test_a_wait_ends(waits: list[tuple[int, int]]) -> None:
    arrival, spinning = made()
    for after, arrival.step in waits:
        before, looks = arrival.now, arrival.looks
        there = spinning.wait() if not after else arrival.wait(spinning, after)
        assert arrival.now - before <= max(MOST_NS + 2 * arrival.step, after)
        assert not there or arrival.looks > looks
        assert spinning._resting <= LONGEST_REST
