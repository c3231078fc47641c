from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.waiting import PATIENCE_S

from conch.core.errors import OutOfRangeError
from conch_control.events import Event, EventLog
from conch_control.remote_api.remote_agent import EventMirror
from conch_control.version_phase import Phase


def event(revision: int) -> Event:
    return Event(revision, "m", 1, Phase.READY, "", 0.0)


def events(*revisions: int) -> list[Event]:
    return [event(revision) for revision in revisions]


def revisions(mirror: EventMirror, after: int) -> list[int]:
    return [event.revision for event in mirror.after(after)]


def test_it_keeps_epoch_and_numbers() -> None:
    mirror = EventMirror()
    assert (mirror.position, mirror.after(0), mirror.after(7)) == (("", 0), [], [])
    mirror.begin("e", 7)
    assert mirror.extend("e", events(8, 9))
    assert mirror.position == ("e", 9)
    assert revisions(mirror, 7) == [8, 9]
    with pytest.raises(OutOfRangeError, match="read the index"):
        mirror.after(6)


def test_what_is_known_already_is_left_out() -> None:
    mirror = EventMirror()
    mirror.begin("e", 0)
    assert mirror.extend("e", events(1, 2))
    mirror.begin("e", 1)
    assert mirror.extend("e", events(2, 3))
    assert revisions(mirror, 0) == [1, 2, 3]


def test_what_does_not_follow_is_refused() -> None:
    mirror = EventMirror()
    mirror.begin("e", 0)
    assert not mirror.extend("other", events(1))
    assert not mirror.extend("e", events(1, 3))
    assert mirror.position == ("e", 1)
    with pytest.raises(TypeError):
        mirror.append("m", 1, Phase.READY)


def test_missed_events_are_an_error_until_the_index_has_been_read() -> None:
    mirror = EventMirror()
    mirror.begin("e", 0)
    mirror.extend("e", events(1))
    mirror.begin("e", 5)
    for _ in range(2):
        with pytest.raises(OutOfRangeError):
            mirror.after(5)
    mirror.index_read("e", 6)
    assert mirror.after(6) == []  # the index was faster
    mirror.extend("e", events(6, 7))
    assert revisions(mirror, 6) == [7]


def test_a_server_that_was_started_again_and_has_got_just_as_far() -> None:
    mirror = EventMirror()
    mirror.begin("e", 3)
    mirror.begin("f", 3)
    with pytest.raises(OutOfRangeError, match="started again"):
        mirror.after(3)
    mirror.index_read("f", 3)
    assert mirror.after(3) == []


def test_an_index_of_another_epoch_is_where_it_goes_on() -> None:
    mirror = EventMirror()
    mirror.begin("e", 3)
    mirror.index_read("f", 1)
    assert mirror.position == ("f", 1)
    assert mirror.after(1) == []
    assert not mirror.extend("e", events(4))


@pytest.mark.parametrize("how", ["events", "lost", "index", "closed", "given up"])
def test_a_reader_that_waits(how: str) -> None:
    mirror = EventMirror()
    mirror.begin("e", 0)
    waits, gone = threading.Event(), threading.Event()
    found: list[object] = []

    def given_up() -> bool:
        waits.set()
        return gone.is_set()

    def read() -> None:
        try:
            found.append(len(mirror.after(0, None, given_up)))
        except OutOfRangeError:
            found.append("lost")

    thread = threading.Thread(target=read)
    thread.start()
    assert waits.wait(PATIENCE_S)
    if how == "events":
        mirror.extend("e", events(1))
    elif how == "lost":
        mirror.begin("f", 0)
    elif how == "index":
        mirror.index_read("f", 0)
    elif how == "closed":
        mirror.close()
    else:
        gone.set()
        mirror.wake()
    thread.join(PATIENCE_S)
    expected = {"events": 1, "lost": "lost", "index": "lost"}.get(how, 0)
    assert found == [expected]


@given(st.lists(st.sampled_from(["append", "watch", "restart", "miss", "read"]), max_size=40))
def test_a_reader_misses_nothing_unnoticed(steps: list[str]) -> None:
    """Whatever happens: what the reader has read since its last index is what the log has had since."""
    mirror = EventMirror()
    log = EventLog(lambda: 0.0)
    mirror.index_read(log.epoch, log.revision)
    known = (log.epoch, 0)  # of the reader
    for step in [*steps, "watch", "read"]:
        if step == "append":
            log.append("m", 1, Phase.READY)
        elif step == "restart":
            log = EventLog(lambda: 0.0)
        elif step == "miss":
            mirror.begin(log.epoch, log.revision)
        elif step == "watch":
            epoch, revision = mirror.position
            if epoch != log.epoch:
                mirror.begin(log.epoch, log.revision)
            else:
                assert mirror.extend(epoch, log.after(revision))
        else:
            try:
                read = mirror.after(known[1])
            except OutOfRangeError:
                known = (log.epoch, log.revision)
                mirror.index_read(*known)
                continue
            assert mirror.position[0] == known[0]
            numbers = [event.revision for event in read]
            assert numbers == list(range(known[1] + 1, known[1] + 1 + len(read)))
            known = (known[0], known[1] + len(read))
    assert known == (log.epoch, log.revision)
