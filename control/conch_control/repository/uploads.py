"""Models that exist only while the server runs: files of a load request, and links into mounted directories.

Their directories are temporary; the next server removes at its start those of one that was killed.
"""

from __future__ import annotations

import posixpath
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

from conch.core.errors import CancelledError, InvalidArgumentError
from conch.core.temporary_folder import TemporaryFolder, remove_abandoned
from conch_control.repository.layout import Fingerprint
from conch_control.repository.source import Progress

FILE_PREFIX = "file:"
"""Prefix of file parameters; the path follows."""

_PREFIX = "conch-model-"
_MOST_NAME_BYTES = 255
# Far below the system's limit, so that recursion can walk and remove the directories.
_MOST_PATH_BYTES = 1024


class UploadDirectory:
    """A private temporary directory; a `Staged`. Removed on release, or as a `TemporaryFolder` is."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        self._folder = TemporaryFolder(_PREFIX)
        self.directory = self._folder.path
        self.fingerprint = fingerprint

    def release(self) -> None:
        """Removes the directory."""
        self._folder.release()


def remove_abandoned_uploads() -> None:
    """Removes directories of this user's killed servers."""
    remove_abandoned(_PREFIX)


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
