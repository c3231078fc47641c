"""Brings models from an object store into directories, and keeps them there while they are in use."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError as FutureCancelledError
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from conch.core.errors import CancelledError
from conch_control.repository.layout import Fingerprint
from conch_control.repository.source import Progress
from conch_control.repository.storage.cache import Blob, ModelCache, Tree
from conch_control.repository.storage.connection import Connection
from conch_control.repository.storage.fetch import Checksums, Fetch, FetchItem
from conch_control.repository.storage.listing import Contents
from conch_control.repository.storage.partial import is_full
from conch_control.repository.storage.stores import BusyError, StoredObject

log = logging.getLogger(__name__)

_STARTS = 5
"""How often a stage begins anew as objects change under it."""

_LOOK_S = 0.1
_LOG_S = 5.0
_END_S = 10.0


@dataclass(eq=False, slots=True)
class _InUse:
    """A tree, and how many have it."""

    tree: Tree
    users: int = 0


class StagedModel:
    """A model in the cache; a `Staged`.

    Args:
        stager: Whose it is.
        key: What the stager knows it by.
        directory: Where it is.
    """

    def __init__(self, stager: Stager, key: tuple[str, Fingerprint], directory: Path) -> None:
        self._stager = stager
        self._key = key
        self._released = False
        self.directory = directory

    @property
    def fingerprint(self) -> Fingerprint:
        """The state of the source that is in the directory."""
        return self._key[1]

    def release(self) -> None:
        """Says that nothing of the model is served from the directory any more; again, it does nothing."""
        if not self._released:
            self._released = True
            self._stager._release(self._key)


class Stager:
    """Stages the models of one repository.

    Args:
        connection: The way to its store.
        cache: Where they are put.
        clock: Time in seconds, for how often progress is logged.
    """

    def __init__(
        self, connection: Connection, cache: ModelCache, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connection = connection
        self._cache = cache
        self._clock = clock
        self._checksums = Checksums()
        self._lock = threading.Lock()  # guards the next
        self._in_use: dict[tuple[str, Fingerprint], _InUse] = {}

    def blob(self, item: StoredObject) -> Blob:
        """What an object in its present state is in the cache."""
        key = repr((self._connection.location.text, item.entry(item.path)))
        return Blob(hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest(), item.size)

    def stage(
        self, name: str, look: Callable[[], Contents], progress: Progress, cancelled: Callable[[], bool]
    ) -> StagedModel:
        """Has a model's directory filled, or finds the one that is.

        Args:
            name: The model.
            look: Lists what it consists of now.
            progress: Is told how far it is.
            cancelled: Asked now and then whether to give up.

        Raises:
            OSError: The files can't be had; what was fetched stays for the next try.
            CancelledError: It was told to give up.
        """
        for _ in range(_STARTS):
            contents = look()
            if not contents.files and not contents.directories:
                raise FileNotFoundError(
                    f"model repository '{self._connection.location}': there is no model '{name}'"
                )
            if contents.problem:
                raise OSError(
                    f"model repository '{self._connection.location}', model '{name}': {contents.problem}"
                )
            key = (name, contents.fingerprint)
            with self._lock:
                shared = self._in_use.get(key)
                if shared is not None:
                    shared.users += 1
                    return StagedModel(self, key, shared.tree.directory)
            tree = self._cache.tree(name)
            try:
                done = self._fill(name, tree, contents, look, progress, cancelled)
            except OSError as error:
                tree.remove()
                raise self._cache.no_room(error) if is_full(error) and error.filename else error from None
            except BaseException:
                tree.remove()
                raise
            if done:
                return self._share(key, tree)
            tree.remove()
            log.info("model '%s' changed while it was fetched; beginning anew", name)
        raise OSError(
            f"model repository '{self._connection.location}': model '{name}' changes faster than it can be "
            f"fetched"
        )

    def _fill(
        self,
        name: str,
        tree: Tree,
        contents: Contents,
        look: Callable[[], Contents],
        progress: Progress,
        cancelled: Callable[[], bool],
    ) -> bool:
        """Fills a tree; says whether it holds what was asked for, which may have changed meanwhile."""
        blobs = {path: self.blob(item) for path, item in contents.files.items()}
        missing = tree.begin(contents.directories, blobs)
        total = sum(blobs[path].size for path in missing)
        if not missing:
            progress(total, total)
            return True
        log.info("model '%s': fetching %d files, %d bytes", name, len(missing), total)
        files = {path: FetchItem(contents.files[path], blobs[path]) for path in missing}
        fetch = Fetch(self._connection, self._cache, files, self._checksums)
        try:
            self._wait(name, fetch, len(files), total, progress, cancelled)
        except BusyError:
            raise
        except OSError as error:
            if is_full(error) or _same(contents, look(), missing):
                raise
            return False
        # What was asked for is what there was all the time: objects never go back to an old state.
        if not _same(contents, look(), missing):
            self._forget(files)
            return False
        with suppress(FileNotFoundError):  # another server with less room may have evicted it
            tree.finish({path: blobs[path] for path in missing})
            progress(total, total)
            return True
        return False

    def _wait(
        self,
        name: str,
        fetch: Fetch,
        files: int,
        total: int,
        progress: Progress,
        cancelled: Callable[[], bool],
    ) -> None:
        future = self._connection.start(fetch.run)
        told = -1
        logged = self._clock()
        try:
            while not (fetch.ended.wait(_LOOK_S) or future.done()):
                if cancelled():
                    raise CancelledError(f"staging of model '{name}' was cancelled")
                done = fetch.done
                if done != told:
                    told = done
                    progress(done, total)
                if self._clock() - logged >= _LOG_S:
                    logged = self._clock()
                    log.info(
                        "model '%s': %d of %d bytes, %d of %d files", name, done, total, fetch.complete, files
                    )
            future.result()
        except FutureCancelledError:
            raise OSError(f"model repository '{self._connection.location}' has been closed") from None
        finally:
            future.cancel()
            if fetch.begun:  # else it was given up before
                fetch.ended.wait(_END_S)

    def _forget(self, files: dict[str, FetchItem]) -> None:
        """Drops what was fetched of objects that have changed meanwhile: it may be of either state."""
        for wanted in files.values():
            with suppress(OSError):
                partial = self._cache.partial(wanted.blob)
                if partial is not None:
                    try:
                        partial.drop()
                    finally:
                        partial.close()

    def _share(self, key: tuple[str, Fingerprint], tree: Tree) -> StagedModel:
        with self._lock:
            shared = self._in_use.setdefault(key, _InUse(tree))
            shared.users += 1
        if shared.tree is not tree:  # somebody else was faster
            tree.remove()
        return StagedModel(self, key, shared.tree.directory)

    def _release(self, key: tuple[str, Fingerprint]) -> None:
        with self._lock:
            shared = self._in_use[key]
            shared.users -= 1
            if shared.users:
                return
            del self._in_use[key]
        shared.tree.remove()


def _same(before: Contents, now: Contents, paths: list[str]) -> bool:
    """Whether some objects are what they were."""
    return all(now.files.get(path) == before.files[path] for path in paths)
