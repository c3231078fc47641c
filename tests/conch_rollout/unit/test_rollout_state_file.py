"""State files of rollouts: what is written is read again, whatever else lies there or breaks."""

from __future__ import annotations

import errno
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.errors import InvalidArgumentError
from conch_rollout.rollout_file import WHOLE, Declaration, parse_toml
from conch_rollout.rollout_state import Progress, Refusal, State
from conch_rollout.state_file import SavedRollout, StateDirectory, file_name

PROGRESS = Progress(
    State.STEP, 3, 7, 8, "d1", 6, 2, 500, 0, "resumed by a call", True, (Refusal(5, "d0"),), "d2", 7
)

numbers = st.integers(0, 2**63)
digests = st.text("0123456789abcdef", max_size=32)
progresses = st.builds(
    Progress,
    state=st.sampled_from(State),
    number=numbers,
    stable=st.none() | numbers,
    candidate=st.none() | numbers,
    digest=digests,
    previous=st.none() | numbers,
    step=numbers,
    weight=st.integers(0, WHOLE),
    shadow=st.integers(0, WHOLE),
    reason=st.text(),
    called=st.booleans(),
    refused=st.lists(st.builds(Refusal, numbers, digests), max_size=3).map(tuple),
    declared=digests,
    declared_stable=st.none() | numbers,
    places=st.just(()) | st.builds(lambda n: ((8, n), (7, WHOLE - n)), st.integers(0, WHOLE)),
)
declarations = st.sampled_from(
    [None, Declaration({"stable": 7}), parse_toml('[rollout]\ncandidate = 8\nsteps = ["5% 10m"]', "f")]
)
names = st.text(st.characters(exclude_characters="\0/"), min_size=1, max_size=255)


@given(st.dictionaries(names, st.builds(SavedRollout, progresses, declarations), max_size=3))
def test_what_is_written_is_read_again(states: dict[str, SavedRollout]) -> None:
    with tempfile.TemporaryDirectory() as path:
        directory = StateDirectory(Path(path) / "state")
        for model, saved in states.items():
            directory.write(model, SavedRollout(Progress()))
            directory.write(model, saved)
        assert StateDirectory(directory.path).read() == states
        assert {each.name for each in directory.path.iterdir()} == set(map(file_name, states))
        for model in states:
            directory.remove(model)
            directory.remove(model)
        assert directory.read() == {}


def content(**changes: Any) -> bytes:
    """The file of model m, with changes of its fields."""
    fields = {
        "format": 1,
        "model": "m",
        "progress": {
            **{key: getattr(PROGRESS, key) for key in Progress.__slots__},
            "state": "STEP",
            "refused": [{"version": 5, "digest": "d0", "by_call": True}],
        },
    }
    for key, value in changes.items():
        table = (
            fields if key in ("format", "model", "declaration", "progress", "colour") else fields["progress"]
        )
        assert isinstance(table, dict)
        table[key] = value
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (b"{", "Expecting property name"),
        (b"\xff", "can't decode"),
        (b"[]", "its content: is no table"),
        (content(format=2), "format: is 2, this server reads 1"),
        (content(model="n"), "it is of model 'n', which has n.json"),
        (content(colour=1), "colour: unknown field"),
        (content(progress=3), "progress: is 3"),
        (content(state="RUNNING"), "progress.state: is 'RUNNING', which is no state"),
        (content(step=-1), "progress.step: is -1, below 0"),
        (content(step=True), "progress.step: is True"),
        (content(weight=WHOLE + 1), "progress.weight: is 10001, above 10000"),
        (content(stable="7"), "progress.stable: is '7'"),
        (content(refused=[{"version": 5}]), "progress.refused.digest: is missing"),
        (content(declaration={"rollout": {"step": 1}}), "rollout.step: unknown field; did you mean 'steps'?"),
    ],
)
def test_files_that_are_no_state_are_logged_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, written: bytes, problem: str
) -> None:
    directory = StateDirectory(tmp_path)
    directory.write("other", SavedRollout(PROGRESS))
    (tmp_path / "m.json").write_bytes(content())
    assert directory.read() == dict.fromkeys(("m", "other"), SavedRollout(PROGRESS))
    (tmp_path / "m.json").write_bytes(written)
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "m.json.tmp").write_bytes(b"{")
    with caplog.at_level(logging.WARNING):
        assert directory.read() == {"other": SavedRollout(PROGRESS)}
    folder, file = (record.getMessage() for record in caplog.records)
    assert folder.startswith(f"{tmp_path}/lost+found is no state of a rollout and is ignored: ")
    assert file.startswith(f"{tmp_path}/m.json is no state of a rollout and is ignored: ")
    assert problem in file
    assert not (tmp_path / "m.json.tmp").exists()
    directory.write("m", SavedRollout(PROGRESS))
    assert directory.read()["m"] == SavedRollout(PROGRESS)


def test_a_failed_write_leaves_the_former_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = StateDirectory(tmp_path)
    directory.write("m", SavedRollout(PROGRESS))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            directory.write("m", SavedRollout(Progress()))
    assert os.listdir(tmp_path) == ["m.json"]
    assert directory.read() == {"m": SavedRollout(PROGRESS)}


def test_a_state_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        InvalidArgumentError, match=r"state directory .*file can't be used: File exists; name a"
    ):
        StateDirectory(tmp_path / "file")
