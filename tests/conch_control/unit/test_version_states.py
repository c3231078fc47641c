"""One place changes states: legal ones, the registry and the events all at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from conch.core.registry import UNLOADED, Registry, VersionState
from conch.core.servable import Servable
from conch_control.events import EventLog
from conch_control.lifecycle.version_states import FORGOTTEN, Change, VersionStates
from conch_control.version_phase import Phase

MODEL = cast(Servable, SimpleNamespace(workers=(), readiness=()))


def a_book() -> tuple[VersionStates, Registry, EventLog]:
    registry, events = Registry(), EventLog(lambda: 7.0)
    return VersionStates(registry, events), registry, events


def through(states: VersionStates, *phases: Phase) -> None:
    """Takes version 1 of a model through phases."""
    for phase in phases:
        ready = {1: MODEL} if phase is Phase.READY else {}
        states.change("m", {1: Change(phase)}, ready)


LOADED = (Phase.STAGING, Phase.LOADING, Phase.READY)


def test_each_phase_is_published_and_logged() -> None:
    states, registry, events = a_book()
    shown = []
    for phase in (*LOADED[:2], Phase.WARMING, Phase.READY, Phase.DRAINING):
        through(states, phase)
        shown.append(registry.entries["m"].states[1].state)
    assert shown == ["LOADING", "LOADING", "LOADING", "READY", "UNLOADING"]
    assert [(event.version, event.phase) for event in events.after(0)] == [
        (1, phase) for phase in (*LOADED[:2], Phase.WARMING, Phase.READY, Phase.DRAINING)
    ]
    assert states.snapshot().revision == 5


def test_a_version_is_ready_before_the_one_that_it_replaces_drains() -> None:
    states, _, events = a_book()
    through(states, *LOADED)
    for phase in LOADED[:2]:
        states.change("m", {2: Change(phase)}, {1: MODEL})
    before = events.revision
    states.change("m", {1: Change(Phase.DRAINING), 2: Change(Phase.READY)}, {2: MODEL})
    seen = [(event.version, event.phase) for event in events.after(before)]
    assert seen == [(2, Phase.READY), (1, Phase.DRAINING)]


def test_the_registry_is_changed_when_an_event_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    states, registry, events = a_book()
    seen = []
    append = events.append

    def watching(model: str, version: int, phase: Phase, reason: str = "") -> object:
        seen.append(registry.entries["m"].states[1].state)
        return append(model, version, phase, reason)

    monkeypatch.setattr(events, "append", watching)
    through(states, *LOADED)
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
    states, registry, events = a_book()
    through(states, *before)
    entry, revision = registry.entries["m"], events.revision
    with pytest.raises(ValueError, match=f"can't become {after.value}"):
        through(states, after)
    assert registry.entries["m"] is entry
    assert events.revision == revision == states.snapshot().revision


def test_ready_versions_are_those_that_take_requests() -> None:
    states, registry, _ = a_book()
    through(states, *LOADED[:2])
    with pytest.raises(ValueError, match=r"versions \[1\] are said to be ready, \[\] are"):
        states.change("m", {1: Change(Phase.READY)})
    assert registry.entries["m"].ready == {}


def test_what_was_loaded_again_while_it_drained_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    states, registry, _ = a_book()
    through(states, *LOADED, Phase.DRAINING)
    first = states.versions("m")[1]
    through(states, *LOADED, Phase.DRAINING)
    states.mark_unloaded("m", first)
    assert states.versions("m")[1].phase is Phase.DRAINING, "that of the second unload"
    states.mark_unloaded("m", states.versions("m")[1])
    assert registry.entries["m"].states == {1: VersionState("UNAVAILABLE", UNLOADED)}


def test_memory_is_said_until_it_is_free() -> None:
    states, _, _ = a_book()
    through(states, *LOADED[:2])
    states.change("m", {1: Change(Phase.READY, "", 5)}, {1: MODEL})
    assert states.versions("m")[1].host_bytes == 5
    through(states, Phase.DRAINING)
    assert states.versions("m")[1].host_bytes == 5
    through(states, Phase.UNLOADED)
    assert states.versions("m")[1].host_bytes is None


def test_forgotten_versions_are_not_in_the_registry() -> None:
    states, registry, _ = a_book()
    through(states, Phase.STAGING)
    states.change("m", {1: Change(Phase.UNLOADED, FORGOTTEN)})
    assert "m" not in registry.entries
    assert states.snapshot().versions["m"][1].reason == FORGOTTEN


def test_progress_is_no_event() -> None:
    states, _, events = a_book()
    through(states, Phase.STAGING)
    states.report_progress("m", [1, 2], 3, 9)
    status = states.versions("m")[1]
    assert (status.done_bytes, status.total_bytes, events.revision) == (3, 9, 1)
    through(states, Phase.LOADING)
    assert states.versions("m")[1].total_bytes == 0


def test_failures_of_a_model_as_a_whole() -> None:
    states, _, events = a_book()
    states.failed("m", "no config")
    states.failed("m", "no config")
    assert states.failures == {"m": "no config"}
    states.clear_failure("m")
    states.clear_failure("m")
    assert states.snapshot().failures == {}
    assert [(event.version, event.phase, event.reason) for event in events.after(0)] == [
        (0, Phase.FAILED, "no config"),
        (0, Phase.UNLOADED, ""),
    ]
