"""Files in S3, Google Cloud Storage and Azure Blob Storage, by the stores of model repositories."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from conch.core.errors import ConchError
from conch_control.control_options import StorageOptions
from conch_control.repository.repository_kinds import open_repository
from conch_hub.source import Listing, PullError, RemoteFile, link_or_copy
from conch_stores.objects import ObjectRepository
from conch_stores.stager import Stager
from conch_stores.stores import Contents, Store, StoredObject

SCHEMES = ("s3", "gs", "as")


class StoreSource:
    """A file or the files below a prefix; a `Source`.

    Args:
        url: The location as for model repositories; one that ends with ``.gguf`` is a file.
        scratch: A directory for what arrives, beside the unfinished version directory.
    """

    def __init__(self, url: str, scratch: Path) -> None:
        self._file = ""
        if url.endswith(".gguf"):
            url, _, self._file = url.rpartition("/")
        self._url = url
        self._scratch = scratch
        self._objects: dict[str, StoredObject] = {}

    def listing(self) -> Listing:
        """Lists the prefix."""
        with self._opened() as store:
            found = store.connection.call(_all)
        self._objects = {each.path: each for each in found if not each.path.endswith("/")}
        if self._file:
            self._objects = {path: each for path, each in self._objects.items() if path == self._file}
        if not self._objects:
            name = f"'{self._file}'" if self._file else "a file"
            raise PullError(f"'{self._url}' does not have {name}: is the location right?")
        return Listing(
            [RemoteFile(each.path, each.size, tag=str(each.entry(""))) for each in self._objects.values()]
        )

    def fetch(self, file: RemoteFile, target: Path, progress: Callable[[int], None]) -> None:
        """Fetches an object through a cache of its own, which verifies and resumes."""
        contents = Contents({target.name: self._objects[file.path]}, frozenset())
        with self._opened() as store:
            store.cache.open()
            staged = Stager(store.connection, store.cache).stage(
                "model", lambda: contents, lambda done, _: progress(done), lambda: False
            )
            try:
                link_or_copy(staged.directory / target.name, target)
            finally:
                staged.release()

    @contextmanager
    def _opened(self) -> Iterator[ObjectRepository]:
        """The store, for a block. Raises PullError: it fails, or its package is missing."""
        try:
            with closing(open_repository(self._url, StorageOptions(cache_directory=self._scratch))) as found:
                assert isinstance(found, ObjectRepository)
                yield found
        except ConchError as error:
            raise PullError(error.message) from None
        except OSError as error:
            raise PullError(f"{error}; the same command goes on with what has arrived") from None


async def _all(store: Store) -> list[StoredObject]:
    return await store.list("")
