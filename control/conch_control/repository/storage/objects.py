"""Repositories in object stores: every directory there is a model, and fetched before it is served."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch_control.repository.layout import Fingerprint
from conch_control.repository.source import ModelSource, Progress
from conch_control.repository.storage.cache import ModelCache
from conch_control.repository.storage.connection import Connection
from conch_control.repository.storage.listing import Contents, by_model, contents_of
from conch_control.repository.storage.stager import StagedModel, Stager
from conch_control.repository.storage.stores import Store, StoredObject

log = logging.getLogger(__name__)

FRESH_S = 2.0
"""How long a listing of the whole repository says what there is of a model."""

READ_FRESH_S = 60.0
"""How long such a listing says what a model's config is: whoever loads it looks again."""

_READS = 2
"""How often a file is read again that is not what the listing says."""

_SMALL = 1 << 20
"""Most bytes of a file that is kept when it is read by itself, such as a config."""


class ObjectRepository:
    """A place with models in an object store; a `Repository`.

    Args:
        connection: The way to the store; it is this repository's to close.
        cache: Where models are fetched to; it is this repository's to close.
        clock: Time in seconds, for how old listings are.
    """

    def __init__(
        self, connection: Connection, cache: ModelCache, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connection = connection
        self._cache = cache
        self._clock = clock
        self._stager = Stager(connection, cache)

    @property
    def location(self) -> str:
        """The URL, as it was given."""
        return self._connection.location.text

    def check(self) -> None:
        """Checks that it can be read, and the cache be written.

        Raises:
            InvalidArgumentError: It is not there, is closed to us, or the credentials are wrong.
            UnavailableError: The store does not answer.
        """
        try:
            self._cache.open()
        except OSError as error:
            raise InvalidArgumentError(
                f"--model-cache-directory: '{self._cache.directory}' can't be used: {error.strerror or error}"
            ) from None
        try:
            found = self._list("")
        except (FileNotFoundError, PermissionError) as error:
            raise InvalidArgumentError(f"repository path is not a valid directory: {error}") from None
        except OSError as error:
            raise UnavailableError(str(error)) from None
        if not found and self._connection.location.prefix:
            raise InvalidArgumentError(f"repository path is not a valid directory: '{self.location}'")

    def models(self) -> Mapping[str, ModelSource]:
        """The models it has now, by one listing of all objects.

        Raises:
            OSError: The store can't say now.
        """
        models: dict[str, ModelSource] = {}
        objects_by_model = by_model(self._list(""))
        # From its end: one that takes long would else be of no use, and each model be listed once more.
        listed_at = self._clock()
        for name, objects in objects_by_model.items():
            if name.isprintable():
                models[name] = ObjectModel(self, name, Listed(listed_at, tuple(objects)))
            else:
                log.error("ignoring model directory %r in '%s': its name is not text", name, self.location)
        return models

    def close(self) -> None:
        """Ends what is under way; nothing may be served from what was staged."""
        self._connection.close()
        self._cache.close()

    def _list(self, prefix: str) -> list[StoredObject]:
        async def listed(store: Store) -> list[StoredObject]:
            return await store.list(prefix)

        return self._connection.call(listed)

    def _contents(self, name: str) -> Contents:
        return contents_of(name, self._list(f"{name}/"))

    def _fetch(self, item: StoredObject) -> bytes:
        async def fetched(store: Store) -> bytes:
            return await store.read(item.path, 0, item.size)

        return self._connection.call(fetched, self._connection.timeouts.block_s)


@dataclass(frozen=True, slots=True)
class Listed:
    """What a listing of the whole repository has said of a model.

    Attributes:
        at: When it ended, in seconds.
        objects: The model's objects.
    """

    at: float
    objects: tuple[StoredObject, ...]


class ObjectModel:
    """A model in an object store; a `ModelSource`.

    Args:
        repository: Where it is.
        name: Model name.
        listed: What is known of it, for as long as that is fresh.
    """

    def __init__(self, repository: ObjectRepository, name: str, listed: Listed) -> None:
        self._repository = repository
        self._listed = listed
        self.name = name

    @property
    def location(self) -> str:
        """URL of its directory."""
        return f"{self._repository.location}/{self.name}"

    def fingerprint(self) -> Fingerprint:
        """The state of the objects now, or at the listing that has just found the model.

        Raises:
            OSError: The store can't say now.
        """
        return self._contents().fingerprint

    def listed_fingerprint(self) -> Fingerprint:
        """The state of the objects at the listing that has found the model."""
        return contents_of(self.name, self._listed.objects).fingerprint

    def read(self, path: str) -> bytes:
        """The content of a small file; from the cache where it has not changed.

        Raises:
            FileNotFoundError: There is none.
            OSError: It can't be read now.
        """
        repository = self._repository
        seen: bytes | None = None
        for fresh_s in (READ_FRESH_S, *([0.0] * _READS)):
            item = self._contents(fresh_s).files.get(path)
            if item is None:
                raise FileNotFoundError(f"'{self.location}/{path}' does not exist")
            if item.size == 0:
                return b""
            repository._cache.open()
            blob = repository._stager.blob(item)
            content = repository._cache.find(blob) or repository._fetch(item)
            if len(content) == item.size:
                if item.md5 == hashlib.md5(content, usedforsecurity=False).hexdigest():
                    # It is surely of that state, and not of one that came after the listing.
                    if item.size <= _SMALL:
                        repository._cache.keep(blob, content)
                    return content
                if not item.md5 or content == seen:  # the store has no checksum, or one of another kind
                    return content
            seen = content
        raise OSError(f"'{self.location}/{path}' changes all the time, or is cut off")

    def stage(self, progress: Progress, cancelled: Callable[[], bool]) -> StagedModel:
        """Brings the model's files into a directory of the cache.

        Raises:
            OSError: They can't be had; what was fetched stays for the next try.
            CancelledError: It was told to give up.
        """
        repository = self._repository
        return repository._stager.stage(
            self.name, lambda: repository._contents(self.name), progress, cancelled
        )

    def _contents(self, fresh_s: float = FRESH_S) -> Contents:
        repository = self._repository
        if repository._clock() - self._listed.at < fresh_s:
            return contents_of(self.name, self._listed.objects)
        return repository._contents(self.name)
