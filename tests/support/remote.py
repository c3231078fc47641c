"""A storage in memory: models have to be fetched from it, slowly if a test wants it so."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support.waiting import PATIENCE_S

from conch.core.errors import CancelledError
from conch_control.repository.layout import Fingerprint
from conch_control.repository.source import Progress

WAIT_S = PATIENCE_S


class RemoteStaged:
    """A copy of a remote model; a `Staged` that says so if it is released twice."""

    def __init__(self, remote: RemoteModel, directory: Path, fingerprint: Fingerprint) -> None:
        self._remote = remote
        self.directory = directory
        self.fingerprint = fingerprint

    def release(self) -> None:
        self._remote.released.append(self.directory)
        shutil.rmtree(self.directory)


class RemoteModel:
    """A model by its files; a `ModelSource`.

    Attributes:
        files: Contents by path; replaced as a whole, so that each state can be told from all others.
        error: Error with which storage answers instead.
        staged: Directories that were ever made.
        released: Those that are gone again.
        fetching: Released once for each fetch that has begun.
    """

    def __init__(self, name: str, root: Path, files: Mapping[str, str]) -> None:
        self.name = name
        self.location = f"remote://bucket/{name}"
        self._root = root
        self._lock = threading.Lock()
        self._changes = 0
        self._tags: dict[str, tuple[str, str]] = {}
        self.error: OSError | None = None
        self.staged: list[Path] = []
        self.released: list[Path] = []
        self.fetching = threading.Semaphore(0)
        self.before_file: Callable[[str], None] = lambda path: None
        self.write(files)

    @property
    def files(self) -> dict[str, str]:
        with self._lock:
            return {path: text for path, (text, _) in self._tags.items()}

    def write(self, files: Mapping[str, str], touch: bool = False) -> None:
        """Makes these the files; those that are what they were keep their identity, unless touched."""
        with self._lock:
            self._changes += 1
            tags = {}
            for path, text in files.items():
                old = self._tags.get(path)
                same = old is not None and old[0] == text and not touch
                tags[path] = old if same and old is not None else (text, f"etag-{self._changes}")
            self._tags = tags

    def fingerprint(self) -> Fingerprint:
        if self.error is not None:
            raise self.error
        with self._lock:
            return _fingerprint(self._tags)

    def read(self, path: str) -> bytes:
        if self.error is not None:
            raise self.error
        try:
            return self.files[path].encode()
        except KeyError:
            raise FileNotFoundError(path) from None

    def stage(self, progress: Progress, cancelled: Callable[[], bool]) -> RemoteStaged:
        with self._lock:
            tags = dict(self._tags)
            directory = self._root / f"{self.name}-{len(self.staged)}"
            self.staged.append(directory)
        total = sum(len(text) for text, _ in tags.values())
        done = 0
        try:
            directory.mkdir(parents=True)
            for path, (text, _) in tags.items():
                progress(done, total)
                self.fetching.release()
                self.before_file(path)
                if self.error is not None:
                    raise self.error
                if cancelled():
                    raise CancelledError("told to give up")
                (directory / path).parent.mkdir(parents=True, exist_ok=True)
                (directory / path).write_text(text)
                done += len(text)
            progress(done, total)
        except BaseException:
            shutil.rmtree(directory)
            self.released.append(directory)
            raise
        return RemoteStaged(self, directory, _fingerprint(tags))


def _fingerprint(tags: Mapping[str, tuple[str, str]]) -> Fingerprint:
    entries: set[tuple[str, int, int, int | str]] = set()
    for path, (text, tag) in tags.items():
        entries.add((path, len(text), 0, tag))
        if "/" in path:
            entries.add((path.rpartition("/")[0] + "/", 0, 0, 0))
    return tuple(sorted(entries, key=lambda entry: entry[0]))
