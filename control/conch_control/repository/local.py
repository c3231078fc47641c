"""Repositories in local directories: every subdirectory is a model, served from where it is."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from conch.core.errors import InvalidArgumentError
from conch_control.repository.layout import Fingerprint, fingerprint, is_directory
from conch_control.repository.source import ModelSource, Progress

log = logging.getLogger(__name__)

# What a volume of Kubernetes is made of, besides links into it: they are no models.
_KUBERNETES = re.compile(r"\.\.(data|data_tmp|\d{4}_\d\d_\d\d_\d\d_\d\d_\d\d\.\d+)")


@dataclass(frozen=True, slots=True)
class InPlace:
    """A model that is served from its own directory; a `Staged` that has nothing to release.

    Attributes:
        directory: The model's directory.
        fingerprint: Its state when it was looked at.
    """

    directory: Path
    fingerprint: Fingerprint

    def release(self) -> None:
        """Does nothing: the files are the operator's."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model in a local directory; a `ModelSource`.

    Attributes:
        directory: The model's directory.
    """

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
        """The state of the files now; what can't be read counts as such."""
        return fingerprint(self.directory)

    def read(self, path: str) -> bytes:
        """The contents of a file.

        Raises:
            OSError: There is none, or it can't be read.
        """
        return (self.directory / path).read_bytes()

    def stage(self, progress: Progress, cancelled: Callable[[], bool]) -> InPlace:
        """The directory as it is."""
        return InPlace(self.directory, self.fingerprint())


class LocalRepository:
    """A directory of models; a `Repository`.

    Args:
        path: The directory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._device: int | None = None  # the file system that models were seen on last

    @property
    def location(self) -> str:
        """The directory."""
        return str(self._path)

    def check(self) -> None:
        """Checks that it is there.

        Raises:
            InvalidArgumentError: It is not a directory.
        """
        if not self._path.is_dir():
            raise InvalidArgumentError(f"repository path is not a valid directory: '{self._path}'")

    def models(self) -> Mapping[str, ModelSource]:
        """The models it has now.

        Raises:
            OSError: The directory can't be read, or it is what was below a file system that has gone.
        """
        with os.scandir(self._path) as entries:
            names = [entry.name for entry in entries if is_directory(entry)]
        device = os.stat(self._path).st_dev
        if names:
            self._device = device
        elif self._device not in (None, device):
            raise OSError(
                "it is empty, and on another file system than its models were: is that not mounted?"
            )
        models: dict[str, ModelSource] = {}
        for name in names:
            if _KUBERNETES.fullmatch(name):
                continue
            if name.isprintable():
                models[name] = LocalModel(self._path / name)
            else:
                log.error("ignoring model directory %r in '%s': its name is not text", name, self._path)
        return models

    def close(self) -> None:
        """Does nothing: it holds nothing."""
