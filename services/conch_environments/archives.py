"""Unpacks packed environments; members can't write outside of their folder.

Owns: notes of digests, in the cache's folder. Threads and locks: none; a note is replaced atomically.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
import shutil
import sys
import tarfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch.core.model_control import LoadCancelled, never

_ZSTD = b"\x28\xb5\x2f\xfd"
_ZIP = b"PK"
_CHUNK = 1 << 20
_MOST_MEMBERS = 1_000_000
_MOST_HEADER = 1 << 20  # of long names and extended attributes, which `tarfile` reads into memory
_MOST_RATIO = 200  # unpacked to packed; environments have 2 to 5
_SMALL_BYTES = 64 << 20  # unpacked, of which any ratio is harmless
_SHARE_OF_DISK = 0.9  # of what is free
_UNREADABLE: tuple[type[Exception], ...] = (
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    ValueError,
)
if sys.version_info >= (3, 14):
    from compression.zstd import ZstdError

    _UNREADABLE += (ZstdError,)


def digest(path: Path, memory: Path, stopped: LoadCancelled = never) -> str:
    """Hash of a file's contents, cached in folder `memory` while size, time and inode stay the same.

    Raises:
        OSError: The file can't be read.
    """
    status = path.stat()
    state = [str(path), status.st_size, status.st_mtime_ns, status.st_ino]
    note = memory / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    try:
        known = json.loads(note.read_text())
        if known["state"] == state:
            return str(known["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # hashed anew
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_CHUNK):
            _check(stopped, path)
            hashed.update(data)
    found = hashed.hexdigest()
    try:
        memory.mkdir(parents=True, exist_ok=True)
        unfinished = note.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        unfinished.write_text(json.dumps({"state": state, "digest": found}))
        unfinished.rename(note)
    except OSError:
        pass
    return found


def unpack(archive: Path, folder: Path, label: str, stopped: LoadCancelled = never) -> None:
    """Unpacks a tar archive into an empty folder, with its links and permissions.

    Raises:
        InvalidArgumentError: The archive can't be read, has forbidden members, or is too large unpacked.
        OSError: The disk is full, for example.
    """
    with archive.open("rb") as file:
        start = file.read(4)
    if start == _ZSTD and sys.version_info < (3, 14):
        raise InvalidArgumentError(
            f"{label}: the archive is compressed with Zstandard, which Python {sys.version_info[0]}."
            f"{sys.version_info[1]} can't read; pack it as .tar.gz"
        )
    if start[:2] == _ZIP:
        raise InvalidArgumentError(f"{label}: the archive is a zip file; pack it as .tar.gz")
    try:
        with archive.open("rb") as file, _Tar.open(archive, "r:*", fileobj=file) as tar:
            checked = _Members(label, archive, folder, stopped).checked(tar)
            if hasattr(tarfile, "fully_trusted_filter"):
                tar.extractall(folder, checked, filter="fully_trusted")
            else:  # before Python 3.11.4
                tar.extractall(folder, checked)
    except _UNREADABLE as error:
        raise InvalidArgumentError(
            f"{label}: '{archive}' can't be unpacked as a tar archive: {error}"
        ) from error


class _Tar(tarfile.TarFile):
    """An archive with a limit of what is read for a member's headers: `tarfile` keeps them in memory."""

    def __init__(self, name: str | None = None, mode: Any = "r", fileobj: Any = None, **more: Any) -> None:
        self._reads = _LimitedReads(fileobj)
        super().__init__(name, mode, self._reads, **more)

    def each(self) -> Iterator[tarfile.TarInfo]:
        """Yields the members; the contents of one may be read until the next is asked for."""
        for member in self:
            self._reads.left = sys.maxsize
            yield member
            self._reads.left = _MOST_HEADER


class _LimitedReads:
    """A file of which so many bytes can be read."""

    def __init__(self, file: Any) -> None:
        self.left = _MOST_HEADER
        self._file = file

    def read(self, size: int) -> Any:
        self.left -= size
        if self.left < 0:
            raise ValueError(f"headers of more than {_MOST_HEADER} bytes are too large")
        return self._file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _Members:
    """Checks members; one forbidden member refuses the archive.

    Links may have absolute targets, such as a venv's interpreter, so no member may lie behind a link or
    replace one.
    """

    def __init__(self, label: str, archive: Path, folder: Path, stopped: LoadCancelled) -> None:
        self._label = label
        self._archive = archive
        self._stopped = stopped
        self._links: set[PurePosixPath] = set()
        self._files: set[PurePosixPath] = set()
        self._most_bytes = min(
            max(archive.stat().st_size * _MOST_RATIO, _SMALL_BYTES),
            int(shutil.disk_usage(folder).free * _SHARE_OF_DISK),
        )

    def checked(self, tar: _Tar) -> Iterator[tarfile.TarInfo]:
        """Yields the members with reduced permissions."""
        unpacked = 0
        for number, member in enumerate(tar.each()):
            _check(self._stopped, self._archive)
            unpacked += max(member.size, 0)
            if unpacked > self._most_bytes:
                raise self._refused(
                    member,
                    f"makes it {unpacked} bytes large, and {self._most_bytes} are allowed: {_MOST_RATIO} "
                    f"times its packed size, and at most {_SHARE_OF_DISK:.0%} of what is free on the disk",
                )
            if number >= _MOST_MEMBERS:
                raise self._refused(member, f"is one more than the {_MOST_MEMBERS} members that are allowed")
            name = self._path(member, member.name)
            if name in self._links:
                raise self._refused(member, "takes the place of a link")
            if member.issym():
                self._links.add(name)
                self._check_target(member, name)
            elif member.islnk():
                if self._path(member, member.linkname) not in self._files:
                    raise self._refused(
                        member, f"is a hard link to '{member.linkname}', which is no file before"
                    )
                self._links.add(name)
            elif member.isreg():
                self._files.add(name)
            elif not member.isdir():
                raise self._refused(member, "is neither a file nor a directory nor a link")
            # Owned by this user, without setuid bits; folders stay writable, so they can be removed.
            member.mode = (member.mode & 0o777) | (0o700 if member.isdir() else 0o400)
            member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
            yield member

    def _path(self, member: tarfile.TarInfo, name: str) -> PurePosixPath:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise self._refused(member, f"leaves the directory with '{name}'")
        if any(parent in self._links for parent in path.parents):
            raise self._refused(member, f"lies behind a link with '{name}'")
        return path

    def _check_target(self, member: tarfile.TarInfo, name: PurePosixPath) -> None:
        """Refuses relative links that leave the archive."""
        if PurePosixPath(member.linkname).is_absolute():
            return
        target = os.path.normpath(os.path.join(name.parent, member.linkname))
        if target == ".." or target.startswith("../"):
            raise self._refused(member, f"is a link to '{member.linkname}', outside of the archive")

    def _refused(self, member: tarfile.TarInfo, why: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self._label}: the archive is refused: '{member.name}' {why}")


def _check(stopped: LoadCancelled, archive: Path) -> None:
    if stopped():
        raise UnavailableError(f"the load was stopped while '{archive}' was read")
