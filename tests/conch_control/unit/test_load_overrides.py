from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.waiting import PATIENCE_S

from conch.core.errors import CancelledError, ConchError, InternalError, InvalidArgumentError
from conch.core.model_control import IndexEntry
from conch_control.lifecycle.load_overrides import Overrides, read_overrides
from conch_control.repository.layout import fingerprint
from conch_control.repository.uploads import (
    UploadDirectory,
    UploadedModel,
    normalized_files,
    normalized_path,
    remove_abandoned_uploads,
)

if TYPE_CHECKING:
    from tests.support.sites import Site

UNPOLLED = "failed to load 'm', failed to poll from model repository"
CONFIG = json.dumps(
    {
        "backend": "echo",
        "input": [{"name": "X", "data_type": "TYPE_UINT8", "dims": [1]}],
        "output": [{"name": "X", "data_type": "TYPE_UINT8", "dims": [1]}],
    }
)

part = st.sampled_from(("..", ".", "", "1", "a", "é", "..a", "x" * 255, "x" * 256, "é" * 128, "\0"))
paths = st.one_of(st.lists(part, max_size=8).map("/".join), st.text(max_size=40))


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Directory of temporary directories; nothing may be left there."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield directory
    assert os.listdir(directory) == []


def never() -> bool:
    return False


def ignore(done: int, total: int) -> None:
    pass


def parameters(config: str | None = CONFIG, **files: str) -> dict[str, Any]:
    """Parameters of a load with files in versions: ``v1="text of model.echo"``."""
    given = {f"file:{version[1:]}/model.echo": text.encode() for version, text in files.items()}
    return given if config is None else {"config": config, **given}


@given(paths)
def test_no_file_ever_lands_outside(path: str) -> None:
    try:
        place = normalized_path(path)
    except InvalidArgumentError as error:
        assert error.message.startswith("Invalid file parameter 'file:")
        return
    root = "/some/where"
    assert os.path.normpath(os.path.join(root, place)) == f"{root}/{place}"
    assert not place.startswith("/")
    parts = place.split("/")
    assert not {"", ".", "..", "\0"} & set(parts)
    assert max(len(os.fsencode(part)) for part in parts) <= 255
    assert normalized_path(place) == place


@given(st.dictionaries(paths, st.binary(max_size=3), max_size=6))
def test_what_can_be_arranged_can_be_written(files: dict[str, bytes]) -> None:
    try:
        arrangement = normalized_files(files)
    except InvalidArgumentError:
        return
    assert sorted(arrangement.values()) == sorted(files.values())
    staged = UploadedModel("m", arrangement).stage(ignore, never)
    try:
        found = {
            str(path.relative_to(staged.directory)): path.read_bytes()
            for path in staged.directory.rglob("*")
            if path.is_file()
        }
        assert found == arrangement
    finally:
        staged.release()
    assert not staged.directory.exists()


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("1/model.py", "1/model.py"),
        ("/etc/passwd", "etc/passwd"),
        ("//1//a", "1/a"),
        ("./1/./a", "1/a"),
        ("1/b/../a", "1/a"),
        ("labels.txt", "labels.txt"),
        ("...", "..."),
        ("1/..a", "1/..a"),
        ("1/a\\b", "1/a\\b"),
    ],
)
def test_where_files_go(path: str, place: str) -> None:
    assert normalized_path(path) == place


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("..", " with normalized path '..' must stay within model directory."),
        ("../x", " with normalized path '../x' must stay within model directory."),
        ("/../x", " with normalized path '../x' must stay within model directory."),
        ("1/../../x", " with normalized path '../x' must stay within model directory."),
        ("1/../..", " with normalized path '..' must stay within model directory."),
        ("", ", path must name a file, not a directory"),
        ("/", ", path must name a file, not a directory"),
        ("1/", ", path must name a file, not a directory"),
        ("1/.", ", path must name a file, not a directory"),
        ("1/..", ", path must name a file, not a directory"),
        ("1/\0", ", path must not contain a null character"),
        ("1/\ud800", ", path must be text"),
        ("1/" + "x" * 256, ", names in it must have at most 255 bytes each"),
        ("é" * 128, ", names in it must have at most 255 bytes each"),
        ("1/" * 600 + "x", ", path must have at most 1024 bytes"),
    ],
)
def test_paths_that_are_refused(path: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        normalized_path(path)
    assert raised.value.message == InvalidArgumentError(f"Invalid file parameter 'file:{path}'{text}").message


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        (
            ["1/model.py/x", "1/model.py"],
            "Invalid file parameter 'file:1/model.py/x', directory has been created as a file",
        ),
        (["1", "1/a/b"], "Invalid file parameter 'file:1/a/b', directory has been created as a file"),
        (["1/a", "1/./a"], "Invalid file parameter 'file:1/./a', it is the same file as 'file:1/a'"),
    ],
)
def test_files_that_can_not_be_together(paths: list[str], text: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        normalized_files(dict.fromkeys(paths, b""))
    assert raised.value.message == text


def test_parameters_are_read() -> None:
    assert read_overrides({}) == Overrides()
    assert read_overrides({"config": "{}"}) == Overrides("{}")
    assert read_overrides({"file:1/a": b"x", "config": "{}"}) == Overrides("{}", {"1/a": b"x"})


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("config", b"{}", "Config parameter 'config' must have string type for its value"),
        ("config", True, "Config parameter 'config' must have string type for its value"),
        ("file:1/a", "eA==", "File parameter 'file:1/a' must have bytes type for its value"),
        ("file:", 1, "File parameter 'file:' must have bytes type for its value"),
        ("file", b"", "Unrecognized load parameter 'file' with type 'BYTES'"),
        ("File:1/a", b"", "Unrecognized load parameter 'File:1/a' with type 'BYTES'"),
        ("", "", "Unrecognized load parameter '' with type 'STRING'"),
        ("Config", 1, "Unrecognized load parameter 'Config' with type 'INT'"),
        ("x", False, "Unrecognized load parameter 'x' with type 'BOOL'"),
    ],
)
def test_parameters_that_are_refused(key: str, value: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        read_overrides({key: value})
    assert raised.value.message == text


def test_files_are_put_where_nobody_else_can_look() -> None:
    source = UploadedModel("m", {"1/a/b": b"x" * 10, "1/c": b"", "d": b"1"})
    told: list[tuple[int, int]] = []
    staged = source.stage(lambda done, total: told.append((done, total)), never)
    assert stat.S_IMODE(staged.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((staged.directory / "1").stat().st_mode) == 0o700
    assert told == [(10, 11), (10, 11), (11, 11)]
    assert (staged.directory / "1" / "a" / "b").read_bytes() == b"x" * 10
    assert [path for path, *_ in fingerprint(staged.directory)] == ["1/", "1/a/", "1/a/b", "1/c", "d"]
    again = source.stage(ignore, never)
    assert again.directory != staged.directory
    for each in (staged, again, staged):
        each.release()


def test_the_source_of_given_files() -> None:
    source = UploadedModel("m", {"b": b"2", "a": b"1"})
    assert (source.name, source.location) == ("m", "load request")
    assert source.read("a") == b"1"
    with pytest.raises(FileNotFoundError, match="no file 'config"):
        source.read("config.pbtxt")
    assert [path for path, *_ in source.fingerprint()] == ["a", "b"]
    assert source.fingerprint() != UploadedModel("m", {"b": b"2", "a": b"1"}).fingerprint()


def test_a_load_that_is_given_up_leaves_nothing() -> None:
    asked = iter([False, True])
    with pytest.raises(CancelledError):
        UploadedModel("m", {"a": b"", "b": b""}).stage(ignore, lambda: next(asked))


def test_a_disk_that_is_full_leaves_nothing() -> None:
    def full(done: int, total: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        UploadedModel("m", {"a": b"", "b": b""}).stage(full, never)


@pytest.mark.process
def test_the_end_of_the_process_removes_what_was_not_released(tmp_path: Path) -> None:
    program = (
        "from conch_control.repository.uploads import UploadDirectory\n"
        "kept = UploadDirectory(())\nprint(kept.directory.is_dir())"
    )
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path / "temporary")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


FORKING = """
import multiprocessing
from conch_control.repository.uploads import UploadDirectory

folder = UploadDirectory(())
child = multiprocessing.get_context("fork").Process(target=folder.release)
child.start()
child.join()
assert child.exitcode == 0
assert folder.directory.is_dir()
folder.release()
assert not folder.directory.exists()
"""


@pytest.mark.process
def test_a_process_that_was_forked_removes_nothing() -> None:
    # Not here: libraries that other tests have used have hooks of their own for forks.
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.process
def test_what_a_killed_process_has_left_is_removed(folders: Path) -> None:
    mine = UploadDirectory(())
    program = (
        "import os, signal\nfrom conch_control.repository.uploads import UploadDirectory\n"
        "kept = UploadDirectory(())\n"
        "(kept.directory / 'x').touch()\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folders)}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == -9
    (left,) = set(folders.iterdir()) - {mine.directory}
    for name, target in (("conch-model-link", left), ("conch-model-nothing", folders / "nothing")):
        (folders / name).symlink_to(target)
    (folders / "conch-model-file").touch()
    (folders / "others").mkdir()
    remove_abandoned_uploads()
    assert not left.exists()
    kept = {mine.directory.name, "conch-model-link", "conch-model-nothing", "conch-model-file", "others"}
    assert set(os.listdir(folders)) == kept
    mine.release()
    for path in folders.iterdir():
        path.rmdir() if path.name == "others" else path.unlink()


def test_a_directory_that_is_found_before_it_is_locked(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its maker makes another one."""
    made: list[str] = []
    make, lock = tempfile.mkdtemp, fcntl.flock

    def mkdtemp(prefix: str) -> str:
        made.append(make(prefix=prefix))
        if len(made) == 1:
            remove_abandoned_uploads()
        return made[-1]

    def flock(descriptor: int, how: int) -> None:
        if how == fcntl.LOCK_SH and len(made) == 2:
            os.rmdir(made[-1])
        lock(descriptor, how)

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    monkeypatch.setattr(fcntl, "flock", flock)
    folder = UploadDirectory(())
    assert len(made) == 3
    assert os.listdir(folders) == [folder.directory.name]
    folder.release()


def test_files_replace_the_whole_model(site: Site, folders: Path) -> None:
    site.model("m", {1: "ok", 2: "ok"})
    agent = site.agent()
    agent.load("m", {})
    agent.load("m", parameters(v1="ok"))
    assert site.loads() == ["m:2", "m:1"]
    assert list(site.serving("m")) == [1]
    assert site.serving("m")[1].spec.version_directory.is_relative_to(folders)
    site.backend.loaded.clear()
    agent.load("m", {})
    assert site.loads() == ["m:2"]
    assert list(site.serving("m")) == [2]
    assert agent.close(PATIENCE_S)


def test_files_of_a_model_that_no_repository_has(site: Site) -> None:
    agent = site.agent()
    agent.load("m", parameters(v3="ok"))
    assert site.send("m").error() is None
    assert agent.index(False) == []
    assert agent.ready()
    with pytest.raises(InternalError, match=UNPOLLED):
        agent.load("m", {})
    assert site.send("m").error() is None
    agent.unload("m", False)
    site.close()
    assert agent.ready()
    with pytest.raises(ConchError, match="has no available versions"):
        site.send("m")


def test_a_config_alone_goes_with_the_repositorys_files(site: Site, folders: Path) -> None:
    site.model("m", {2: "ok"})
    agent = site.agent()
    agent.load("m", parameters(v1="ok"))
    agent.load("m", parameters())
    assert list(site.serving("m")) == [2]
    assert not site.serving("m")[2].spec.version_directory.is_relative_to(folders)


def test_files_are_there_as_long_as_anything_is_served_from_them(site: Site, folders: Path) -> None:
    site.model("m")
    agent = site.agent()
    agent.load("m", parameters(v1="slow"))
    answer = site.send("m")
    agent.load("m", {})
    assert len(os.listdir(folders)) == 1
    assert answer.pending
    site.backend.gate.set()
    assert answer.error() is None
    site.close()


def test_files_that_fail_are_removed_and_the_old_ones_serve(site: Site, folders: Path) -> None:
    agent = site.agent()
    agent.load("m", parameters(v1="ok"))
    (serving,) = os.listdir(folders)
    with pytest.raises(InvalidArgumentError, match="version 1 is at UNAVAILABLE state: Internal: boom"):
        agent.load("m", parameters(v1="crash boom"))
    assert os.listdir(folders) == [serving]
    assert site.send("m").error() is None
    with pytest.raises(InternalError, match=UNPOLLED):
        agent.load("m", parameters("no json", v1="ok"))
    assert os.listdir(folders) == [serving]
    with pytest.raises(InvalidArgumentError, match="at least one version must be available"):
        agent.load("m", {"config": CONFIG, "file:labels.txt": b""})
    assert os.listdir(folders) == [serving]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (parameters(None, v1="ok"), "Load parameter 'config' must be specified for model file override"),
        (
            {"config": CONFIG, "file:../x": b""},
            "Invalid file parameter 'file:../x' with normalized path '../x' must stay within model",
        ),
        (parameters("{", v1="ok"), "Invalid config override: "),
        (parameters("{"), "Invalid config override: "),
        (parameters(""), "Invalid config override: "),
        (
            parameters('{"name": "other", "backend": "echo"}', v1="ok"),
            "unexpected directory name 'm' for model 'other', directory name must equal model name",
        ),
    ],
)
def test_the_log_says_why_overrides_are_refused(
    site: Site, given: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    site.model("m")
    agent = site.agent()
    with pytest.raises(InternalError) as raised, caplog.at_level(logging.ERROR):
        agent.load("m", given)
    assert raised.value.message.startswith(f"{UNPOLLED}: {reason}")
    assert any(
        line.startswith(f"Poll failed for model directory 'm': {reason}") for line in caplog.messages
    ), caplog.messages
    assert agent.ready()
    (entry,) = agent.index(False)
    assert (entry.name, entry.state) == ("m", "UNAVAILABLE") and entry.reason.startswith(reason)
    agent.load("m", {})
    assert agent.index(False) == [IndexEntry("m", "1", "READY")]
    with pytest.raises(InternalError):
        agent.load("m", given)
    (entry,) = agent.index(False)
    assert entry.state == "READY" and reason in entry.reason
    with pytest.raises(InternalError):
        agent.load("gone", given)
    assert "gone" not in [each.name for each in agent.models().models], "nothing is kept of an unknown name"


def test_a_disk_that_takes_no_files(site: Site, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folders / "nowhere"))
    with pytest.raises(InternalError, match=UNPOLLED):
        site.agent().load("m", parameters(v1="ok"))


def test_the_name_of_a_model_that_is_given_is_text(site: Site) -> None:
    with pytest.raises(InternalError, match=re.escape("failed to load 'a\nb', failed to poll")):
        site.agent().load("a\nb", parameters(v1="ok"))


def test_files_beat_two_repositories(site: Site, tmp_path: Path) -> None:
    site.model("m")
    second = tmp_path / "second"
    site.model("m", repository=second)
    agent = site.agent(repositories=(site.repository, second))
    with pytest.raises(InternalError, match=UNPOLLED):
        agent.load("m", {})
    agent.load("m", parameters(v7="ok"))
    assert list(site.serving("m")) == [7]
    twice = IndexEntry("m", "", "UNAVAILABLE", "model appears in two or more repositories")
    assert agent.index(False) == [twice]


def test_an_override_outlives_loads_of_files_that_have_not_changed(site: Site) -> None:
    site.model("m")
    agent = site.agent()
    changed = json.dumps({**json.loads(CONFIG), "max_batch_size": 4})

    def batch() -> int:
        size = site.serving("m")[1].spec.config["max_batch_size"]
        assert isinstance(size, int)
        return size

    agent.load("m", {"config": changed})
    agent.load("m", {})
    assert batch() == 4
    assert site.loads() == ["m:1"]
    os.utime(site.repository / "m" / "1" / "model.echo", ns=(1, 1))
    agent.load("m", {})
    assert batch() == 0
    agent.load("m", {"config": changed})
    agent.unload("m", False)
    agent.load("m", {})
    assert batch() == 0
