"""Local model repositories: each subdirectory is a model, served in place."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from conch.core.errors import InvalidArgumentError
from conch_control.repository.layout import Fingerprint, fingerprint, list_directory
from conch_control.repository.source import ModelSource, Progress

log = logging.getLogger(__name__)

# Directories of a Kubernetes volume, whose models are links into them, and those that `conch pull` fills.
_INTERNAL = re.compile(r"\.\.(data|data_tmp|\d{4}_\d\d_\d\d_\d\d_\d\d_\d\d\.\d+)|\..+\.pull", re.DOTALL)


@dataclass(frozen=True, slots=True)
class InPlace:
    """A model served from its own directory; a `Staged` with nothing to release."""

    directory: Path
    fingerprint: Fingerprint

    def release(self) -> None:
        """Keeps the files: they are the operator's."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model in a local directory; a `ModelSource`."""

    directory: Path

    @property
    def name(self) -> str:
        """Model name."""
        return self.directory.name

    @property
    def location(self) -> str:
        """The directory."""
        return str(self.directory)

    def fingerprint(self) -> Fingerprint:
        """Current state of the files; unreadable ones are included as such."""
        return fingerprint(self.directory)

    def read(self, path: str) -> bytes:
        """Contents of a file. Raises OSError: it is missing or can't be read."""
        return (self.directory / path).read_bytes()

    def stage(self, progress: Progress, cancelled: Callable[[], bool]) -> InPlace:
        """Returns the directory itself."""
        return InPlace(self.directory, self.fingerprint())


class LocalRepository:
    """A directory of models; a `Repository`."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._device: int | None = None  # device of the last listing with models

    @property
    def location(self) -> str:
        """The directory."""
        return str(self._path)

    def check(self) -> None:
        """Checks that the directory can be read. Raises InvalidArgumentError: it can't be, or is none."""
        if not self._path.is_dir():
            raise InvalidArgumentError(f"repository path is not a valid directory: '{self._path}'")
        if not os.access(self._path, os.R_OK | os.X_OK):  # a listing may hang with its file system
            raise InvalidArgumentError(
                f"repository path '{self._path}' can't be read by user {os.geteuid()} and group "
                f"{os.getegid()}, which the server runs as"
            )

    def models(self) -> Mapping[str, ModelSource]:
        """Lists the models.

        Raises:
            OSError: The directory can't be read, or is the empty mount point of a lost file system.
        """
        names = [name for name, is_directory in list_directory(self._path).items() if is_directory]
        device = os.stat(self._path).st_dev
        if names:
            self._device = device
        elif self._device not in (None, device):
            raise OSError(
                "it is empty, and on another file system than its models were: is that not mounted?"
            )
        models: dict[str, ModelSource] = {}
        for name in names:
            if _INTERNAL.fullmatch(name):
                continue
            if name.isprintable():
                models[name] = LocalModel(self._path / name)
            else:
                log.error("ignoring model directory %r in '%s': its name is not text", name, self._path)
        return models

    def close(self) -> None:
        """Returns at once: a directory holds nothing open."""
