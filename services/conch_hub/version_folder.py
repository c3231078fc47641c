"""A version directory of a model that appears in its repository as a whole.

It is filled in a hidden directory of the repository, ``.NAME-VERSION.pull``, which servers pass over, and
which stays if a pull ends early. Renaming shows the model, or its new version, in one step.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from conch.core.errors import ConchError
from conch_control.config.parse import read_config
from conch_hub.source import PullError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
_CONFIG = "config.pbtxt"
_IDENTITY = "identity"


class VersionFolder:
    """An unfinished version directory; holds a lock until it is closed.

    Args:
        repository: The repository; made if it is not there.
        name: The model's name.
        version: The version.

    Attributes:
        path: The unfinished version directory.
        scratch: A directory beside it that is not part of the model.

    Raises:
        PullError: The version is there, another pull fills it, or the repository can't be written.
    """

    def __init__(self, repository: Path, name: str, version: int = 1) -> None:
        if not _NAME.fullmatch(name):
            raise PullError(
                f"'{name}' can't be the name of a model: --name gives one of letters, digits, . _ + and -"
            )
        self._model, self._version = repository / name, str(version)
        self._hidden = repository / f".{name}-{version}.pull"
        self._check_absent()
        self.path, self.scratch = self._hidden / self._version, self._hidden / ".scratch"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._hidden, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise PullError(f"--into: '{repository}' can't be written: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise PullError(f"another conch pull fills '{self._model}' right now: wait for it") from None

    def __enter__(self) -> VersionFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._arrived():
            shutil.rmtree(self._hidden, ignore_errors=True)
        os.close(self._lock)

    @property
    def place(self) -> Path:
        """The version directory once it is published."""
        return self._model / self._version

    def begin(self, identity: str) -> None:
        """Keeps what an earlier pull has left if that was of the same content, and removes it otherwise."""
        note = self.scratch / _IDENTITY
        if note.is_file() and note.read_text() == identity:
            return
        for directory in (self.path, self.scratch):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
        note.write_text(identity)

    def check_room(self, size: int) -> None:
        """Raises PullError if the rest of that many bytes does not fit on the disk."""
        there = sum(file.stat().st_size for file in self._arrived())
        free = shutil.disk_usage(self._hidden).free
        if size - there > free:
            raise PullError(
                f"'{self._model.parent}' has {free} free bytes, and {size - there} are needed: make room, or "
                f"give another directory with --into"
            )

    def check_config(self, backends: Collection[str]) -> None:
        """Raises PullError if the model is there, and its config does not serve this version.

        Args:
            backends: Backends that serve it; one is empty if it needs no config.
        """
        if not self._model.is_dir():
            return
        config, found = self._model / _CONFIG, ""
        if config.is_file():
            try:
                found = read_config(config).backend
            except ConchError as error:
                raise PullError(error.message) from None
        if found not in backends:
            has = f"has a {_CONFIG} with the backend '{found}'" if config.is_file() else f"has no {_CONFIG}"
            wanted = next(iter(backends))
            raise PullError(
                f"'{self._model}' {has}, and this version needs one with the backend '{wanted}': change it, "
                f"or give another --name"
            )

    def publish(self, config: str, backends: Collection[str]) -> None:
        """Shows the version in the repository.

        Args:
            config: Text of its ``config.pbtxt``; empty if it needs none.
            backends: As for `check_config`.

        Raises:
            PullError: The model has a config that does not fit, or the version has come meanwhile.
        """
        self._check_absent()
        self.check_config(backends)
        shutil.rmtree(self.scratch, ignore_errors=True)
        for path in (*self.path.rglob("*"), self.path):
            if path.is_dir():
                _sync(path)
        if self._model.is_dir():
            self.path.rename(self.place)
            self._hidden.rmdir()
        else:
            if config:
                (self._hidden / _CONFIG).write_text(config)
            self._hidden.rename(self._model)
        _sync(self._model)
        _sync(self._model.parent)

    def _arrived(self) -> list[Path]:
        """Files that are there."""
        return [file for file in self._hidden.rglob("*") if file.is_file() and file.name != _IDENTITY]

    def _check_absent(self) -> None:
        if self._model.exists() and not self._model.is_dir():
            raise PullError(f"'{self._model}' is a file: remove it, or give another --name")
        if self.place.exists():
            raise PullError(f"'{self.place}' is there: remove it, or give another --version or --name")


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
