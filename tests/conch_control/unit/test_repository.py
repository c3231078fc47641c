from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from conch.core.errors import InvalidArgumentError
from conch_control.config.parse import parse_config
from conch_control.repository.layout import config_file, fingerprint, select_versions, version_numbers
from conch_control.repository.local import LocalRepository
from conch_control.repository.repositories import Repositories


def test_version_directories(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = [
        "1",
        "10",
        "2",
        "01",
        "0",
        "abc",
        "1x",
        "-1",
        "²",
        "9" * 20,
        "warmup",
        "initial_state",
        "configs",
        "__pycache__",
        ".git",
        ".ipynb_checkpoints",
        "lost+found",
    ]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "3").write_text("a file")
    with caplog.at_level(logging.WARNING):
        assert version_numbers(tmp_path) == [1, 2, 10]
    assert "ignore version directory 'abc' which fails to convert to integral number" in caplog.messages
    assert (
        "ignore version directory '01' which contains leading zeros in its directory name" in caplog.messages
    )
    assert len(caplog.messages) == 7


@pytest.mark.parametrize(
    ("policy", "available", "selected"),
    [
        ("latest { num_versions: 1 }", [1, 10, 9], [10]),
        ("latest { num_versions: 2 }", [1, 10, 9], [9, 10]),
        ("latest { num_versions: 5 }", [1, 2], [1, 2]),
        ("all {}", [3, 1], [1, 3]),
        ("specific { versions: [ 3, 1, 7, 3 ] }", [1, 2, 3], [1, 3]),
    ],
)
def test_version_policy(policy: str, available: list[int], selected: list[int]) -> None:
    assert select_versions(parse_config(f"version_policy {{ {policy} }}", "c"), available) == selected


@pytest.mark.parametrize("policy", ["latest { num_versions: 1 }", "all {}", "specific { versions: 7 }"])
def test_version_policy_that_selects_nothing(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    available = [1] if "specific" in policy else []
    with pytest.raises(InvalidArgumentError) as raised:
        select_versions(parse_config(f'name: "m" version_policy {{ {policy} }}', "c"), available)
    assert raised.value.message == (
        "at least one version must be available under the version policy of model 'm'"
    )
    expected = "version 7 is specified for model 'm', but the version directory is not present"
    assert (expected in caplog.messages) == ("specific" in policy)


def test_named_config(tmp_path: Path) -> None:
    assert config_file(tmp_path, "h100") == tmp_path / "config.pbtxt"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "h100.pbtxt").touch()
    assert config_file(tmp_path, "h100") == tmp_path / "configs" / "h100.pbtxt"
    assert config_file(tmp_path) == tmp_path / "config.pbtxt"


def test_fingerprint_sees_every_change(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    file = tmp_path / "1" / "model"
    file.write_text("a")
    seen = [fingerprint(tmp_path)]
    assert fingerprint(tmp_path) == seen[0]

    def changed() -> bool:
        seen.append(fingerprint(tmp_path))
        return seen[-1] not in seen[:-1]

    file.write_text("bb")
    assert changed()
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert changed()
    other = tmp_path / "new"
    other.write_text("cc")
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    other.replace(file)
    assert changed()
    (tmp_path / "2").mkdir()
    assert changed()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert changed()


def test_fingerprint_ignores_caches_and_survives_loops(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "up").symlink_to(tmp_path)
    before = fingerprint(tmp_path)
    (tmp_path / "1" / "__pycache__").mkdir()
    (tmp_path / "1" / "__pycache__" / "model.pyc").touch()
    assert fingerprint(tmp_path) == before
    assert fingerprint(tmp_path / "missing") == ()


def test_scan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, two, gone = (tmp_path / name for name in ("one", "two", "gone"))
    for model in (one / "a", one / "b", two / "b", two / "c"):
        model.mkdir(parents=True)
    (one / "README").write_text("no model")
    repositories = Repositories(map(LocalRepository, [one, two, one, gone]))
    scan = repositories.scan()
    assert {name: source.location for name, source in scan.models.items()} == {
        "a": str(one / "a"),
        "c": str(two / "c"),
    }
    assert scan.unreadable.keys() == {str(gone)}
    assert scan.duplicates == {"b"}
    assert "failed to read model repository" in caplog.text
    with pytest.raises(InvalidArgumentError, match=r"^repository path is not a valid directory: "):
        repositories.check()
