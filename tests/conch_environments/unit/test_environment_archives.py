"""Archives: permitted and forbidden members, digests."""

from __future__ import annotations

import io
import os
import stat
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tests.support.environments import link, of_type, tar_of

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch_environments.archives import digest, unpack


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "inside" / "env"
    folder.mkdir(parents=True)
    return folder


READS_ZSTANDARD = sys.version_info >= (3, 14)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz", *(["w:zst"] if READS_ZSTANDARD else [])])
def test_links_and_permissions_are_kept(tmp_path: Path, folder: Path, mode: str) -> None:
    made = tmp_path / "made"
    (made / "bin").mkdir(parents=True)
    tool = made / "bin" / "tool"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    (made / "bin" / "same").hardlink_to(tool)
    (made / "bin" / "python").symlink_to("tool")
    (made / "bin" / "python3").symlink_to("/usr/bin/env")
    (made / "lib").mkdir(mode=0o555)
    (made / "lib64").symlink_to("lib")
    with tarfile.open(tmp_path / "archive", mode) as tar:  # type: ignore[call-overload]
        tar.add(made, ".")
    unpack(tmp_path / "archive", folder, "env")
    assert os.access(folder / "bin" / "tool", os.X_OK)
    assert os.path.samefile(folder / "bin" / "tool", folder / "bin" / "same")
    assert os.readlink(folder / "bin" / "python") == "tool"
    assert os.readlink(folder / "bin" / "python3") == "/usr/bin/env"
    assert os.readlink(folder / "lib64") == "lib"
    assert stat.S_IMODE((folder / "lib").stat().st_mode) == 0o755


def test_nobody_gets_rights_from_an_archive(tmp_path: Path, folder: Path) -> None:
    with tarfile.open(tmp_path / "archive", "w") as tar:
        member = tarfile.TarInfo("tool")
        member.mode, member.uid, member.gid, member.uname = 0o6755, 12345, 12345, "daemon"
        tar.addfile(member)
    unpack(tmp_path / "archive", folder, "env")
    status = (folder / "tool").stat()
    assert stat.S_IMODE(status.st_mode) == 0o755
    assert (status.st_uid, status.st_gid) == (os.getuid(), os.getgid())


HOSTILE: dict[str, list[Any]] = {
    "absolute": [("/tmp/conch-hostile", b"x")],
    "dots": [("../outside", b"x")],
    "dots inside": [("a/../../outside", b"x")],
    "behind a link": [link("a", "/tmp"), ("a/conch-hostile", b"x")],
    "behind a relative link": [link("a", "."), ("a/b", b"x")],
    "in place of a link": [link("a", "../../outside"), ("a", b"x")],
    "in place of an absolute link": [link("a", "/tmp/conch-hostile"), ("a", b"x")],
    "link that leaves": [link("b/a", "../../outside")],
    "link to the folder above": [link("a", "..")],
    "hard link that leaves": [link("a", "../outside", hard=True)],
    "hard link to an absolute path": [link("a", "/etc/passwd", hard=True)],
    "hard link to a link": [link("a", "/etc/passwd"), link("b", "a", hard=True)],
    "hard link through a link": [link("a", "/etc"), link("b", "a/passwd", hard=True)],
    "device": [of_type("a", tarfile.CHRTYPE)],
    "pipe": [of_type("a", tarfile.FIFOTYPE)],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_archives_are_refused(tmp_path: Path, folder: Path, name: str) -> None:
    archive = tar_of(tmp_path / "archive", *HOSTILE[name])
    with pytest.raises(InvalidArgumentError, match=r"^env: the archive is refused: '"):
        unpack(archive, folder, "env")
    assert not (tmp_path / "outside").exists()
    assert not (tmp_path / "inside" / "outside").exists()
    assert not Path("/tmp/conch-hostile").exists()


def test_bombs_are_refused_before_they_fill_the_disk(tmp_path: Path, folder: Path) -> None:
    with tarfile.open(tmp_path / "archive", "w:gz") as tar:
        for name in ("small", "large", "last"):
            member = tarfile.TarInfo(name)
            member.size = (70 << 20) if name == "large" else 1
            tar.addfile(member, io.BytesIO(bytes(member.size)))
    with pytest.raises(
        InvalidArgumentError, match=r"'large' makes it 73400321 bytes large, and \d+ are allowed"
    ):
        unpack(tmp_path / "archive", folder, "env")
    assert [each.name for each in folder.iterdir()] == ["small"]


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("before", [0, 1])
def test_headers_that_would_fill_the_memory_are_refused(
    tmp_path: Path, folder: Path, mode: str, form: int, before: int
) -> None:
    with tarfile.open(tmp_path / "archive", mode, format=form) as tar:  # type: ignore[call-overload]
        for number in range(before):
            tar.addfile(tarfile.TarInfo(f"small {number}"))
        tar.addfile(tarfile.TarInfo("n" * (2 << 20)))
    with pytest.raises(InvalidArgumentError, match="headers of more than 1048576 bytes are too large"):
        unpack(tmp_path / "archive", folder, "env")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "can't be unpacked as a tar archive"),
        (b"not an archive at all", "can't be unpacked as a tar archive"),
        (b"PK\x03\x04", "the archive is a zip file; pack it as .tar.gz"),
        (b"\x1f\x8b\x08\x00garbage and more garbage", "can't be unpacked as a tar archive"),
    ],
)
def test_what_is_no_archive_is_said(tmp_path: Path, folder: Path, content: bytes, text: str) -> None:
    (tmp_path / "archive").write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=text):
        unpack(tmp_path / "archive", folder, "env")


@pytest.mark.skipif(READS_ZSTANDARD, reason="this Python reads Zstandard")
def test_compression_that_cannot_be_read_is_said(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "archive").write_bytes(b"\x28\xb5\x2f\xfd and so on")
    with pytest.raises(InvalidArgumentError, match=r"compressed with Zstandard, which Python 3.* can't read"):
        unpack(tmp_path / "archive", folder, "env")


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_half_an_archive_is_none(tmp_path: Path, folder: Path, share: float) -> None:
    whole = tar_of(tmp_path / "whole", *((f"f{n}", os.urandom(2000)) for n in range(20))).read_bytes()
    (tmp_path / "archive").write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(InvalidArgumentError, match="can't be unpacked as a tar archive"):
        unpack(tmp_path / "archive", folder, "env")


def test_unpacking_can_be_stopped(tmp_path: Path, folder: Path) -> None:
    archive = tar_of(tmp_path / "archive", *((f"f{n}", b"x") for n in range(10)))
    polls: list[None] = []

    def stopped() -> bool:
        polls.append(None)
        return len(polls) > 3

    with pytest.raises(UnavailableError, match="the load was stopped while"):
        unpack(archive, folder, "env", stopped)
    assert len(list(folder.iterdir())) == 3


def test_a_hash_is_remembered_until_the_file_changes(tmp_path: Path) -> None:
    archive, notes = tmp_path / "archive", tmp_path / "notes"
    archive.write_bytes(b"1")
    first = digest(archive, notes)
    (note,) = notes.iterdir()
    note.write_text(note.read_text().replace(first, "from the note"))
    assert digest(archive, notes) == "from the note"
    archive.write_bytes(b"22")
    second = digest(archive, notes)
    assert second not in (first, "from the note")
    note.write_text("damaged")
    assert digest(archive, notes) == second
