"""Output of `conch models`, apart from the source of its data."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.cli.load_progress import lines
from conch.cli.models_output import (
    description_text,
    event_line,
    index_json,
    models_table,
    moment,
    size,
    staged,
)
from conch_control.agent_api import Index, ModelDescription, ModelStatus, VersionStatus
from conch_control.events import Event
from conch_control.remote_api.client import Update
from conch_control.version_phase import Phase


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (-3 << 20, "-3.0 MiB"), (1 << 50, "1024.0 TiB")],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


@given(st.floats())
def test_moments(seconds: float) -> None:
    assert isinstance(moment(seconds), str)


def test_a_moment() -> None:
    assert (moment(0.0), moment(1_700_000_000.9)) == ("", "2023-11-14 22:13:20Z")


@pytest.mark.parametrize(
    ("phase", "done", "total", "text"),
    [
        (Phase.STAGING, 1, 3, "33 % of 3 B"),
        (Phase.STAGING, 0, 0, ""),
        (Phase.LOADING, 1, 3, ""),
    ],
)
def test_staging(phase: Phase, done: int, total: int, text: str) -> None:
    assert staged(VersionStatus(1, phase, done_bytes=done, total_bytes=total)) == text


def test_the_table_of_models() -> None:
    models = (
        ModelStatus("a", "/m/a", reason="model appears in two or more repositories"),
        ModelStatus("b", "/m/b", (VersionStatus(2, Phase.STAGING, done_bytes=1, total_bytes=4),)),
        ModelStatus("c", "/m/c", (VersionStatus(1, Phase.FAILED, "one\ntwo"),)),
        ModelStatus("d", "/m/d", (VersionStatus(1, Phase.READY, "old"), VersionStatus(2, Phase.READY))),
    )
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in models_table(models).splitlines()]
    assert [row for row in rows if row] == [
        ["Model", "Version", "State", "Since", "Memory", "Reason"],
        ["a", "-", "not loaded", "", "", "model appears in two or more repositories"],
        ["b", "2", "STAGING 25 % of 4 B", "", "", ""],
        ["c", "1", "FAILED", "", "", "one"],
        ["", "", "", "", "", "two"],
        ["d", "1", "READY (newer load failed)", "", "", "old"],
        ["d", "2", "READY", "", "", ""],
    ]


def test_origins_are_those_of_the_nearest_field_around() -> None:
    config = {
        "input": [{"dims": [1], "name": "IN"}],
        "parameters": {},
        "version_policy": {"latest": {"n": 1}},
    }
    description = ModelDescription(
        ModelStatus("m", ""),
        json.dumps(config),
        {"input[0]": "model", "input[0].name": "override", "version_policy": "default"},
        (),
    )
    text = description_text(description)
    assert text.splitlines()[0] == "m from nowhere now"
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert [row for row in rows if row][-5:] == [
        ["Config field", "Value", "Origin"],
        ["input[0].dims", "[1]", "model"],
        ["input[0].name", '"IN"', "override"],
        ["parameters", "{}", ""],
        ["version_policy.latest.n", "1", "default"],
    ]


def test_an_event_of_a_whole_model() -> None:
    assert event_line(Event(7, "m", 0, Phase.FAILED, "a\nb", 0.0)) == "      7 m FAILED: a b".rjust(18)


def test_lines_of_progress() -> None:
    staging = VersionStatus(1, Phase.STAGING, done_bytes=1, total_bytes=2)
    update = Update(
        "e",
        1,
        None,
        (Event(1, "m", 1, Phase.STAGING, "", 0.0),),
        (ModelStatus("m", "", (staging, VersionStatus(2, Phase.READY))),),
    )
    assert lines(update) == ["m 1 STAGING", "m 1 STAGING 50 % of 2 B"]


def test_json_without_memory() -> None:
    found = index_json(Index("e", 1, (ModelStatus("m", "", (VersionStatus(1, Phase.READY),)),)))
    assert found["models"][0]["versions"][0]["host_bytes"] is None
