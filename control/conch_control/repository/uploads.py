"""Models that exist only while the server runs: files of a load request, and links into mounted directories.

Their directories are temporary. A killed process leaves them behind, but the kernel drops its locks: a
directory without a lock is abandoned, and the next server removes it at its start.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import posixpath
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from conch.core.errors import CancelledError, InvalidArgumentError
from conch_control.repository.layout import Fingerprint
from conch_control.repository.source import Progress

log = logging.getLogger(__name__)

FILE_PREFIX = "file:"
"""Prefix of file parameters; the path follows."""

_PREFIX = "conch-model-"
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_NAME_BYTES = 255
# Far below the system's limit, so that recursion can walk and remove the directories.
_MOST_PATH_BYTES = 1024


class UploadDirectory:
    """A private temporary directory; a `Staged`. Removed on release, or at exit, or by `remove_abandoned`."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        self.directory, self._lock = _make()
        self.fingerprint = fingerprint
        self._remove = partial(_remove, os.fspath(self.directory), os.getpid())
        atexit.register(self._remove)

    def release(self) -> None:
        """Removes the directory."""
        atexit.unregister(self._remove)
        self._remove()
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def remove_abandoned() -> None:
    """Removes directories of this user's killed processes, as far as possible."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX):
                with suppress(OSError):
                    _remove_if_abandoned(entry)


def _make() -> tuple[Path, int]:
    """Creates a locked directory; returns it with the lock's descriptor."""
    while True:
        directory = tempfile.mkdtemp(prefix=_PREFIX)
        try:
            descriptor = os.open(directory, _OPEN)
        except FileNotFoundError:
            continue  # another starting server removed it before it was locked
        except OSError:
            os.rmdir(directory)
            raise
        with suppress(OSError):  # without locks it can't be taken for abandoned either
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        if os.fstat(descriptor).st_nlink:
            return Path(directory), descriptor
        os.close(descriptor)  # removed while it was being locked


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # not a process forked by a model
        shutil.rmtree(directory, ignore_errors=True)


def _remove_if_abandoned(entry: os.DirEntry[str]) -> None:
    if not entry.is_dir(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != os.geteuid():
        return
    descriptor = os.open(entry.path, _OPEN)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        log.info("removing '%s', which a server that was killed has left", entry.path)
        shutil.rmtree(entry.path, ignore_errors=True)
    finally:
        os.close(descriptor)


def normalized_path(path: str) -> str:
    """Path of an uploaded file inside the model's directory; a leading slash is dropped, as in Triton.

    Raises:
        InvalidArgumentError: It leaves the directory, names a directory, or is no valid file name.
    """
    parameter = f"Invalid file parameter '{FILE_PREFIX}{path}'"
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"{parameter}, path must be text") from None
    normal = posixpath.normpath(path.lstrip("/"))
    first = normal.partition("/")[0]
    if first == "..":
        raise InvalidArgumentError(
            f"{parameter} with normalized path '{normal}' must stay within model directory."
        )
    if posixpath.basename(path) in ("", ".", ".."):
        raise InvalidArgumentError(f"{parameter}, path must name a file, not a directory")
    if b"\0" in encoded:
        raise InvalidArgumentError(f"{parameter}, path must not contain a null character")
    if len(normal.encode()) > _MOST_PATH_BYTES:
        raise InvalidArgumentError(f"{parameter}, path must have at most {_MOST_PATH_BYTES} bytes")
    for part in normal.split("/"):
        if len(part.encode()) > _MOST_NAME_BYTES:
            raise InvalidArgumentError(
                f"{parameter}, names in it must have at most {_MOST_NAME_BYTES} bytes each"
            )
    return normal


def normalized_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Contents by normalised path.

    Raises:
        InvalidArgumentError: A path is invalid, a duplicate, or inside another file.
    """
    arrangement: dict[str, bytes] = {}
    origins: dict[str, str] = {}
    for path, content in files.items():
        place = normalized_path(path)
        if place in arrangement:
            raise InvalidArgumentError(
                f"Invalid file parameter '{FILE_PREFIX}{path}', it is the same file as "
                f"'{FILE_PREFIX}{origins[place]}'"
            )
        arrangement[place] = content
        origins[place] = path
    for place, path in origins.items():
        if any(directory in arrangement for directory in _directories(place)):
            raise InvalidArgumentError(
                f"Invalid file parameter '{FILE_PREFIX}{path}', directory has been created as a file"
            )
    return arrangement


class UploadedModel:
    """A model whose files came with a load request; a `ModelSource` with a unique fingerprint."""

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        self._name = name
        self._files = files
        identity = uuid.uuid4().hex
        self._fingerprint = tuple(sorted((path, len(data), 0, identity) for path, data in files.items()))

    @property
    def name(self) -> str:
        """Model name."""
        return self._name

    @property
    def location(self) -> str:
        """A fixed text for logs and errors."""
        return "load request"

    def fingerprint(self) -> Fingerprint:
        """Unique for each upload."""
        return self._fingerprint

    def read(self, path: str) -> bytes:
        """Contents of a file. Raises FileNotFoundError: there is none."""
        try:
            return self._files[path]
        except KeyError:
            raise FileNotFoundError(f"no file '{path}' came with the load request") from None

    def stage(self, progress: Progress, cancelled: Callable[[], bool]) -> UploadDirectory:
        """Writes the files to a temporary directory; leaves nothing behind on failure.

        Raises:
            OSError: They can't be written.
            CancelledError: `cancelled` returned True.
        """
        upload = UploadDirectory(self._fingerprint)
        with ExitStack() as undo:
            undo.callback(upload.release)
            total, done = sum(map(len, self._files.values())), 0
            for directory in sorted({part for path in self._files for part in _directories(path)}):
                (upload.directory / directory).mkdir(stat.S_IRWXU)
            for path, content in self._files.items():
                if cancelled():
                    raise CancelledError(f"the load of model '{self._name}' was given up")
                with (upload.directory / path).open("xb") as file:
                    file.write(content)
                done += len(content)
                progress(done, total)
            undo.pop_all()
        return upload


def _directories(path: str) -> Iterator[str]:
    """Parent directories of a normalised path, outermost first."""
    position = path.find("/")
    while position >= 0:
        yield path[:position]
        position = path.find("/", position + 1)
