"""Messages that come in masses: so many are let through, and all the others counted."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from conch.observability.logging.repeat_limit import WINDOW_NS, Fate, RepeatLimit, Repeats


def admit(limit: RepeatLimit[str], place: str, message: str, now_ns: int) -> Fate:
    return limit.admit(place, lambda: message, now_ns)


def test_so_many_in_a_second() -> None:
    limit = RepeatLimit[str](2)
    fates = [admit(limit, "a", str(number), number) for number in range(5)]
    assert fates == [Fate.LOGGED] * 2 + [Fate.COUNTED_FIRST] + [Fate.COUNTED] * 2
    assert admit(limit, "b", "other", 5) is Fate.LOGGED
    assert limit.next_ns() == WINDOW_NS
    assert limit.due(WINDOW_NS - 1) == []
    assert limit.due(WINDOW_NS) == [Repeats("2", 3)]
    assert limit.next_ns() is None
    assert admit(limit, "a", "next", WINDOW_NS) is Fate.LOGGED


def test_what_was_counted_is_told_when_the_next_second_begins() -> None:
    limit = RepeatLimit[str](1)
    for number in range(3):
        admit(limit, "a", str(number), 0)
    assert admit(limit, "a", "later", 3 * WINDOW_NS) is Fate.LOGGED
    assert limit.next_ns() == 0
    assert limit.due(3 * WINDOW_NS) == [Repeats("1", 2)]


def test_everything_is_told_at_the_end() -> None:
    limit = RepeatLimit[str](1)
    for number in range(3):
        admit(limit, "a", str(number), 0)
    assert limit.due(None) == [Repeats("1", 2)]
    assert limit.due(None) == []


def test_no_limit() -> None:
    limit = RepeatLimit[str](0)
    assert {admit(limit, "a", "x", 0) for _ in range(1000)} == {Fate.LOGGED}
    assert limit.next_ns() is None


def test_places_are_forgotten() -> None:
    limit = RepeatLimit[str](1)
    for number in range(5000):
        admit(limit, str(number), "x", number * WINDOW_NS)
    assert len(limit) <= 1000


@dataclass
class Event:
    place: str
    after_ns: int
    look: bool


EVENTS = st.lists(
    st.builds(Event, st.sampled_from("abc"), st.integers(0, WINDOW_NS // 2), st.booleans()), max_size=80
)


@given(EVENTS, st.integers(1, 4))
def test_every_message_is_logged_or_counted_once(events: list[Event], most: int) -> None:
    limit = RepeatLimit[str](most)
    now = logged = counted = 0
    logged_at: dict[str, list[int]] = {}
    for event in events:
        now += event.after_ns
        if admit(limit, event.place, event.place, now) is Fate.LOGGED:
            logged += 1
            logged_at.setdefault(event.place, []).append(now)
        if event.look:
            counted += sum(repeats.count for repeats in limit.due(now))
            next_ns = limit.next_ns()
            assert next_ns is None or now < next_ns <= now + WINDOW_NS
    counted += sum(repeats.count for repeats in limit.due(None))
    assert logged + counted == len(events)
    for times in logged_at.values():
        # Two windows may touch, so within any second there are at most those of both.
        assert all(sum(start <= time < start + WINDOW_NS for time in times) <= 2 * most for start in times)
