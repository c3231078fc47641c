"""Repositories in emulated object stores, for tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.emulators import Bucket, Emulator
from tests.support.faulty_proxy import FaultyProxy, faulty_proxy
from tests.support.waiting import PATIENCE_S

from conch_control.control_options import StorageOptions
from conch_control.repository.repository_kinds import open_repository
from conch_control.repository.source import ModelSource
from conch_stores.objects import ObjectRepository
from conch_stores.stager import StagedModel

_numbers = itertools.count()


@dataclass
class Place:
    """A place in a store of its own, behind a proxy.

    Attributes:
        emulator: The store.
        bucket: Its bucket, which has nothing else.
        proxy: Proxy before the store.
        cache: A directory for a cache.
        prefix: The repository's path in the bucket.
    """

    emulator: Emulator
    bucket: Bucket
    proxy: FaultyProxy
    cache: Path
    prefix: str = "models"

    @property
    def location(self) -> str:
        """The repository's URL."""
        return self.emulator.location(self.bucket.name, self.prefix, self.proxy.port)

    def put(self, path: str, content: bytes = b"x") -> None:
        """Uploads an object of the repository."""
        self.bucket.put(f"{self.prefix}/{path}", content)

    def delete(self, path: str) -> None:
        """Removes an object of the repository."""
        self.bucket.delete(f"{self.prefix}/{path}")

    @contextmanager
    def opened(self, timeout_s: float = PATIENCE_S, cache_bytes: int = 0) -> Iterator[ObjectRepository]:
        """The repository."""
        options = StorageOptions(self.cache, cache_bytes, timeout_s)
        repository = open_repository(self.location, options)
        assert isinstance(repository, ObjectRepository)
        with closing(repository):
            yield repository

    def fetched(self, path: str) -> list[str]:
        """Ranges of an object that were asked for."""
        wanted = f"{self.prefix}/{path}"
        # Some clients write slashes in names as %2F.
        return [
            seen.range
            for seen in self.proxy.seen
            if seen.method == "GET"
            and seen.path.replace("%2F", "/").partition("?")[0].endswith(wanted)
            and (seen.range or "alt=media" in seen.path)
        ]

    def blobs(self) -> dict[str, int]:
        """Contents in the cache with their sizes."""
        return {path.name: path.stat().st_size for path in (self.cache / "blobs").iterdir()}


@contextmanager
def place_in(emulator: Emulator, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A place of its own in a store."""
    bucket = emulator.bucket(f"bucket-{next(_numbers)}")
    with faulty_proxy(emulator.port) as proxy:
        for name, value in emulator.environment(proxy.port).items():
            monkeypatch.setenv(name, value)
        yield Place(emulator, bucket, proxy, directory / "cache")


@dataclass
class Told:
    """Takes progress."""

    steps: list[tuple[int, int]] = field(default_factory=list)

    def __call__(self, done: int, total: int) -> None:
        self.steps.append((done, total))


def stage(source: ModelSource, told: Told | None = None) -> StagedModel:
    """Stages a model to the end."""
    staged = source.stage(told or Told(), lambda: False)
    assert isinstance(staged, StagedModel)
    return staged


def tree_of(directory: Path) -> dict[str, bytes]:
    """The files in a directory."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }
