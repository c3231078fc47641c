"""A directory that a platform mounts: it may appear late, and may be one model instead of a repository.

`MountedRepository` waits for its path (KServe's modelcar links it after the start), looks at what it holds
and serves that: a repository as it is, one model or bare model files under a given name. Mounts are
read-only, so files get their version directory in a temporary directory of links.

Threads: `check` waits on the starting thread; `close` ends the wait.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import InvalidArgumentError, UnavailableError
from conch_control.repository.directory_layout import DirectoryLayout, LayoutKind, find_layout
from conch_control.repository.layout import Fingerprint, fingerprint
from conch_control.repository.local import LocalModel, LocalRepository
from conch_control.repository.source import ModelSource, Progress
from conch_control.repository.uploads import UploadDirectory

log = logging.getLogger(__name__)

_LOOK_S = 0.1
_LOG_S = 10.0
_S = 1_000_000_000
_VERSION = 1


@dataclass(frozen=True, slots=True)
class RenamedModel(LocalModel):
    """A model's directory, served under a given name whatever its config says."""

    given_name: str
    renamed: bool = True

    @property
    def name(self) -> str:
        """The given name."""
        return self.given_name


@dataclass(frozen=True, slots=True)
class LinkedModel:
    """Bare model files, served as version 1 of a model; a `ModelSource`."""

    given_name: str
    layout: DirectoryLayout
    renamed: bool = True

    @property
    def name(self) -> str:
        """The given name."""
        return self.given_name

    @property
    def location(self) -> str:
        """The directory of the files."""
        return str(self.layout.directory)

    def fingerprint(self) -> Fingerprint:
        """Current state of the files, by their paths in the model's directory."""
        return tuple(
            sorted(
                (*_states(f"{_VERSION}/", self.layout.files), *_states("", self.layout.shared)),
                key=lambda entry: entry[0],
            )
        )

    def read(self, path: str) -> bytes:
        """Contents of a file. Raises OSError: it is missing or can't be read."""
        if path not in dict(self.layout.shared):
            raise FileNotFoundError(f"'{self.location}' has no file '{path}'")
        return (self.layout.directory / path).read_bytes()

    def stage(self, progress: Progress, cancelled: Callable[[], bool]) -> UploadDirectory:
        """Links the files into a temporary directory. Raises OSError: that can't be written."""
        staged = UploadDirectory(self.fingerprint())
        with ExitStack() as undo:
            undo.callback(staged.release)
            version = staged.directory / str(_VERSION)
            version.mkdir()
            for parent, files in ((version, self.layout.files), (staged.directory, self.layout.shared)):
                for name, source in files:
                    (parent / name).symlink_to(source)
            undo.pop_all()
        return staged


def _states(prefix: str, files: tuple[tuple[str, Path], ...]) -> list[tuple[str, int, int, int | str]]:
    found: list[tuple[str, int, int, int | str]] = []
    for name, source in files:
        path = f"{prefix}{name}"
        if source.is_dir():
            found.append((f"{path}/", 0, 0, 0))
            found += [(f"{path}/{each[0]}", each[1], each[2], each[3]) for each in fingerprint(source)]
            continue
        try:
            status = source.stat()
            found.append((path, status.st_size, status.st_mtime_ns, status.st_ino))
        except OSError:
            found.append((path, -1, -1, -1))
    return found


class MountedRepository:
    """A mounted directory; a `Repository`.

    Args:
        path: The directory, or a model's file.
        model_name: Name of the model, if the path is one model; empty to take it for a repository.
        wait_s: Time to wait for the path.
        clock: Monotonic nanoseconds.
    """

    def __init__(
        self, path: Path, model_name: str = "", wait_s: float = 0.0, clock: Clock = monotonic_ns
    ) -> None:
        self._path = path.absolute()
        self._model_name = model_name
        self._wait_s = wait_s
        self._clock = clock
        self._repository = LocalRepository(path)
        self._closed = threading.Event()
        self._logged = False

    @property
    def location(self) -> str:
        """The path."""
        return str(self._path)

    def check(self) -> None:
        """Waits for the path, and checks that it can be served.

        Raises:
            InvalidArgumentError: It has not appeared, or holds nothing that can be served.
            UnavailableError: The server was stopped meanwhile.
        """
        self._wait()
        if not self._model_name or not self._path.exists():
            self._repository.check()
            return
        self.models()

    def models(self) -> Mapping[str, ModelSource]:
        """Lists the models.

        Raises:
            InvalidArgumentError: It is empty, or which file is the model can't be told.
            OSError: It can't be read.
        """
        if not self._model_name:
            return self._repository.models()
        layout = find_layout(self._path)
        if layout.kind is LayoutKind.REPOSITORY:
            if not self._logged:
                self._logged = True
                log.info(
                    "'%s' is a repository: its models keep their names, and '%s' names none",
                    self._path,
                    self._model_name,
                )
            return self._repository.models()
        return {self._model_name: single_model(layout, self._model_name)}

    def close(self) -> None:
        """Ends a wait."""
        self._closed.set()

    def _wait(self) -> None:
        """Waits until the path exists and has entries; a platform makes it with its contents."""
        began = self._clock()
        next_log = 0.0
        while not self._is_there():
            waited = (self._clock() - began) / _S
            if waited >= self._wait_s:
                return  # the checks say what is missing
            if waited >= next_log:
                next_log = waited + _LOG_S
                log.info("waiting for '%s', which is not there yet (%.0f s so far)", self._path, waited)
            if self._closed.wait(_LOOK_S):
                raise UnavailableError("Server exiting")

    def _is_there(self) -> bool:
        try:
            if not self._path.is_dir():
                return self._path.exists()
            with os.scandir(self._path) as entries:
                return any(True for _ in entries)
        except OSError:
            return False


def single_model(layout: DirectoryLayout, name: str) -> ModelSource:
    """The model of a layout that is no repository, under a name. Raises InvalidArgumentError: a bad name."""
    if not name.isprintable() or not name.strip() or "/" in name or name in (".", ".."):
        raise InvalidArgumentError(f"'{name}' can't be the name of a model")
    if layout.kind is LayoutKind.MODEL:
        return RenamedModel(layout.directory, name)
    return LinkedModel(name, layout)
