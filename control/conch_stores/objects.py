"""Model repositories in object stores; models are fetched into the cache before they are served."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch_control.repository.layout import Fingerprint
from conch_control.repository.source import ModelSource, Progress
from conch_stores.cache import ModelCache
from conch_stores.connection import Connection
from conch_stores.locations import Location
from conch_stores.stager import StagedModel, Stager
from conch_stores.stores import Contents, Store, StoredObject, by_model, contents_of

log = logging.getLogger(__name__)

FRESH_S = 2.0
"""Age up to which a listing of the repository tells a model's state, in seconds."""

READ_FRESH_S = 60.0
"""The same for reading configs; a load lists the model again."""

_READS = 2
"""Retries of a read that differs from the listing."""

_SMALL = 1 << 20
"""Largest single file kept in the cache after a read, such as a config."""


class ObjectRepository:
    """A prefix of an object store with models; a `Repository`. Closes its connection and cache.

    Attributes:
        data_only: See `DataOnly`.
    """

    def __init__(
        self,
        connection: Connection[Location, Store],
        cache: ModelCache,
        clock: Callable[[], float] = time.monotonic,
        data_only: str = "",
    ) -> None:
        self.connection = connection
        self.cache = cache
        self.data_only = data_only
        self._clock = clock
        self._stager = Stager(connection, cache)

    @property
    def location(self) -> str:
        """The URL as given."""
        return self.connection.location.text

    def check(self) -> None:
        """Checks read access to the store and write access to the cache.

        Raises:
            InvalidArgumentError: It is missing, access is denied, or the credentials are wrong.
            UnavailableError: The store does not answer.
        """
        try:
            self.cache.open()
        except OSError as error:
            raise InvalidArgumentError(
                f"--model-cache-directory: '{self.cache.directory}' can't be used: {error.strerror or error}"
            ) from None
        try:
            found = self._list("")
        except (FileNotFoundError, PermissionError) as error:
            raise InvalidArgumentError(f"repository path is not a valid directory: {error}") from None
        except OSError as error:
            raise UnavailableError(str(error)) from None
        if not found and self.connection.location.prefix:
            raise InvalidArgumentError(f"repository path is not a valid directory: '{self.location}'")

    def models(self) -> Mapping[str, ModelSource]:
        """Lists the models with one listing of all objects. Raises OSError: the store does not answer."""
        models: dict[str, ModelSource] = {}
        objects_by_model = by_model(self._list(""))
        # Age counts from the end; otherwise slow listings would be stale at once.
        listed_at = self._clock()
        for name, objects in objects_by_model.items():
            if name.isprintable():
                models[name] = ObjectModel(self, name, Listed(listed_at, tuple(objects)))
            else:
                log.error("ignoring model directory %r in '%s': its name is not text", name, self.location)
        return models

    def close(self) -> None:
        """Cancels transfers and closes the cache."""
        self.connection.close()
        self.cache.close()

    def _list(self, prefix: str) -> list[StoredObject]:
        async def listed(store: Store) -> list[StoredObject]:
            return await store.list(prefix)

        return self.connection.call(listed)

    def _contents(self, name: str) -> Contents:
        return contents_of(name, self._list(f"{name}/"))

    def _fetch(self, item: StoredObject) -> bytes:
        async def fetched(store: Store) -> bytes:
            return await store.read(item.path, 0, item.size)

        return self.connection.call(fetched, self.connection.timeouts.block_s)


@dataclass(frozen=True, slots=True)
class Listed:
    """A model's part of a listing; `at` is the end of the listing in seconds."""

    at: float
    objects: tuple[StoredObject, ...]


class ObjectModel:
    """A model in an object store; a `ModelSource`."""

    def __init__(self, repository: ObjectRepository, name: str, listed: Listed) -> None:
        self._repository = repository
        self._listed = listed
        self.name = name

    @property
    def data_only(self) -> str:
        """See `DataOnly`."""
        return self._repository.data_only

    @property
    def checked_backends(self) -> Collection[str]:
        """None."""
        return ()

    @property
    def location(self) -> str:
        """URL of its directory."""
        return f"{self._repository.location}/{self.name}"

    def fingerprint(self) -> Fingerprint:
        """Current state of the objects, or that of a fresh listing.

        Raises:
            OSError: The store does not answer.
        """
        return self._contents().fingerprint

    def listed_fingerprint(self) -> Fingerprint:
        """State of the objects at the listing."""
        return contents_of(self.name, self._listed.objects).fingerprint

    def read(self, path: str) -> bytes:
        """Content of a small file, from the cache if unchanged.

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
            repository.cache.open()
            blob = repository._stager.blob(item)
            content = repository.cache.find(blob) or repository._fetch(item)
            if len(content) == item.size:
                if item.md5 == hashlib.md5(content, usedforsecurity=False).hexdigest():
                    # The checksum proves that the content matches the listing.
                    if item.size <= _SMALL:
                        repository.cache.keep(blob, content)
                    return content
                if not item.md5 or content == seen:  # no checksum, or of another kind
                    return content
            seen = content
        raise OSError(f"'{self.location}/{path}' changes all the time, or is cut off")

    def stage(self, progress: Progress, cancelled: Callable[[], bool]) -> StagedModel:
        """Fetches the model's files into the cache.

        Raises:
            OSError: They can't be fetched; partial data stays for a retry.
            CancelledError: `cancelled` returned True.
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
