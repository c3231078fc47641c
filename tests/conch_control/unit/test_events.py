from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

import pytest
from tests.support.waiting import PATIENCE_S

from conch.core.errors import OutOfRangeError
from conch_control.events import KEPT, Event, EventLog
from conch_control.version_phase import Phase


def test_events_are_numbered_and_read_from_anywhere() -> None:
    log = EventLog(lambda: 12.5)
    assert (log.revision, log.after(0)) == (0, [])
    events = [log.append("m", version, Phase.READY, f"reason {version}") for version in (1, 2, 3)]
    assert [event.revision for event in events] == [1, 2, 3]
    assert events[0].seconds == 12.5
    assert [log.after(revision) for revision in range(4)] == [events[index:] for index in range(4)]


def test_a_reader_that_comes_too_late_is_told_so() -> None:
    log = EventLog(lambda: 0.0, kept=2)
    for version in (1, 2, 3):
        log.append("m", version, Phase.READY)
    assert [event.version for event in log.after(1)] == [2, 3]
    for revision in (0, 4, -1):
        with pytest.raises(OutOfRangeError, match="the log has those from 2 to 3"):
            log.after(revision)


def test_readers_wait_for_events_and_for_the_end() -> None:
    log = EventLog(lambda: 0.0)
    read: list[int] = []

    def follow() -> None:
        revision = 0
        while events := log.after(revision, None):
            read.extend(event.revision for event in events)
            revision = events[-1].revision

    thread = threading.Thread(target=follow)
    thread.start()
    for _ in range(100):
        log.append("m", 1, Phase.LOADING)
    log.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    # What came after the end was said may be left over; until then nothing is lost or doubled.
    assert read == list(range(1, len(read) + 1))
    assert log.after(0, None) != []


def test_a_reader_can_give_up_waiting() -> None:
    log = EventLog(lambda: 0.0)
    gone = threading.Event()
    asked = threading.Event()
    read: list[object] = []

    def given_up() -> bool:
        asked.set()
        return gone.is_set()

    thread = threading.Thread(target=lambda: read.append(log.after(0, None, given_up)))
    thread.start()
    assert asked.wait(PATIENCE_S)
    log.wake()  # for another reader
    gone.set()
    log.wake()
    thread.join(PATIENCE_S)
    assert read == [[]]


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_can_be_left_and_ends(phase: Phase) -> None:
    assert phase.index_state in {"LOADING", "READY", "UNLOADING", "UNAVAILABLE"}
    reached = {phase}
    while more := {after for before in reached for after in Phase if before.may_become(after)} - reached:
        reached |= more
    assert reached == set(Phase)
    assert not Phase.READY.may_become(Phase.FAILED)
    assert not Phase.UNLOADED.may_become(Phase.READY)


class Counting(deque[Event]):
    """Events that count how many of them are looked at."""

    looked = 0

    def __iter__(self) -> Iterator[Event]:
        for event in super().__iter__():
            self.looked += 1
            yield event

    def __reversed__(self) -> Iterator[Event]:
        for event in super().__reversed__():
            self.looked += 1
            yield event


def test_what_is_new_costs_no_look_at_what_is_old() -> None:
    """Every watch asks after every event."""
    log = EventLog(lambda: 0.0)
    events = log.entries = Counting(maxlen=KEPT)
    for _ in range(KEPT):
        log.append("m", 1, Phase.READY)
    log.append("m", 1, Phase.FAILED)
    (new,) = log.after(log.revision - 1)
    assert new.phase is Phase.FAILED
    assert events.looked <= 2
    assert len(log.after(log.revision - KEPT)) == KEPT
    assert events.looked >= KEPT
