"""One place changes states: legal ones, the registry and the events all at once."""

from __future__ import annotations

from typing import cast

import pytest

from conch.core.registry import Registry, VersionState
from conch.core.servable import Servable
from conch_control.events import EventLog
from conch_control.lifecycle.version_phase import Phase
from conch_control.lifecycle.version_states import FORGOTTEN, UNLOADED, Book, Change

MODEL = cast(Servable, object())


def a_book() -> tuple[Book, Registry, EventLog]:
    registry, events = Registry(), EventLog(lambda: 7.0)
    return Book(registry, events), registry, events


def through(book: Book, *phases: Phase) -> None:
    """Takes version 1 of a model through phases."""
    for phase in phases:
        ready = {1: MODEL} if phase is Phase.READY else {}
        book.change("m", {1: Change(phase)}, ready)


LOADED = (Phase.STAGING, Phase.LOADING, Phase.READY)


def test_each_phase_is_published_and_logged() -> None:
    book, registry, events = a_book()
    shown = []
    for phase in (*LOADED[:2], Phase.WARMING, Phase.READY, Phase.DRAINING):
        through(book, phase)
        shown.append(registry.entries["m"].states[1].state)
    assert shown == ["LOADING", "LOADING", "LOADING", "READY", "UNLOADING"]
    assert [(event.version, event.phase) for event in events.after(0)] == [
        (1, phase) for phase in (*LOADED[:2], Phase.WARMING, Phase.READY, Phase.DRAINING)
    ]
    assert book.snapshot().revision == 5


def test_the_registry_is_changed_when_an_event_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    book, registry, events = a_book()
    seen = []
    append = events.append

    def watching(model: str, version: int, phase: Phase, reason: str = "") -> object:
        seen.append(registry.entries["m"].states[1].state)
        return append(model, version, phase, reason)

    monkeypatch.setattr(events, "append", watching)
    through(book, *LOADED)
    assert seen == ["LOADING", "LOADING", "READY"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((Phase.STAGING,), Phase.READY),
        (LOADED, Phase.LOADING),
        (LOADED, Phase.FAILED),
        ((*LOADED, Phase.DRAINING, Phase.UNLOADED), Phase.READY),
    ],
)
def test_what_may_not_follow_changes_nothing(before: tuple[Phase, ...], after: Phase) -> None:
    book, registry, events = a_book()
    through(book, *before)
    entry, revision = registry.entries["m"], events.revision
    with pytest.raises(ValueError, match=f"can't become {after.value}"):
        through(book, after)
    assert registry.entries["m"] is entry
    assert events.revision == revision == book.snapshot().revision


def test_ready_versions_are_those_that_take_requests() -> None:
    book, registry, _ = a_book()
    through(book, *LOADED[:2])
    with pytest.raises(ValueError, match=r"versions \[1\] are said to be ready, \[\] are"):
        book.change("m", {1: Change(Phase.READY)})
    assert registry.entries["m"].ready == {}


def test_what_was_loaded_again_while_it_drained_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    book, registry, _ = a_book()
    through(book, *LOADED, Phase.DRAINING)
    first = book.versions("m")[1]
    through(book, *LOADED, Phase.DRAINING)
    book.drained("m", first)
    assert book.versions("m")[1].phase is Phase.DRAINING, "that of the second unload"
    book.drained("m", book.versions("m")[1])
    assert registry.entries["m"].states == {1: VersionState("UNAVAILABLE", UNLOADED)}


def test_memory_is_said_until_it_is_free() -> None:
    book, _, _ = a_book()
    through(book, *LOADED[:2])
    book.change("m", {1: Change(Phase.READY, "", 5)}, {1: MODEL})
    assert book.versions("m")[1].host_bytes == 5
    through(book, Phase.DRAINING)
    assert book.versions("m")[1].host_bytes == 5
    through(book, Phase.UNLOADED)
    assert book.versions("m")[1].host_bytes is None


def test_forgotten_versions_are_not_in_the_registry() -> None:
    book, registry, _ = a_book()
    through(book, Phase.STAGING)
    book.change("m", {1: Change(Phase.UNLOADED, FORGOTTEN)})
    assert "m" not in registry.entries
    assert book.snapshot().versions["m"][1].reason == FORGOTTEN


def test_progress_is_no_event() -> None:
    book, _, events = a_book()
    through(book, Phase.STAGING)
    book.fetched("m", [1, 2], 3, 9)
    status = book.versions("m")[1]
    assert (status.done_bytes, status.total_bytes, events.revision) == (3, 9, 1)
    through(book, Phase.LOADING)
    assert book.versions("m")[1].total_bytes == 0


def test_failures_of_a_model_as_a_whole() -> None:
    book, _, events = a_book()
    book.failed("m", "no config")
    book.failed("m", "no config")
    assert book.failures == {"m": "no config"}
    book.settled("m")
    book.settled("m")
    assert book.snapshot().failures == {}
    assert [(event.version, event.phase, event.reason) for event in events.after(0)] == [
        (0, Phase.FAILED, "no config"),
        (0, Phase.UNLOADED, ""),
    ]
