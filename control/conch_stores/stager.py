"""Stages models from an object store: lists, fetches missing blobs, links them into a tree.

| step    | event                                         | next                                  |
|---------|-----------------------------------------------|---------------------------------------|
| list    | a tree of this state is in use                | share the tree, done                  |
| list    | otherwise                                     | link present blobs, fetch the rest    |
| fetch   | fails although the listing is unchanged       | error; partial data stays             |
| fetch   | done or failed, and the listing has changed   | drop changed blobs, list (5 times)    |
| fetch   | done, and the listing is unchanged            | link, share the tree, done            |

Owns: trees in use, with their user counts. Locks: `_lock` guards them.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError as FutureCancelledError
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conch.core.errors import CancelledError
from conch_control.repository.layout import Fingerprint
from conch_control.repository.source import Progress
from conch_stores.cache import Blob, ModelCache, Tree, is_disk_full
from conch_stores.connection import Connection
from conch_stores.fetch import Checksums, Fetch, FetchItem
from conch_stores.stores import Contents, StoreBusyError, StoredObject

log = logging.getLogger(__name__)

_STARTS = 5
"""Attempts to stage a model that changes meanwhile."""

_LOOK_S = 0.1
_LOG_S = 5.0
_END_S = 10.0


@dataclass(eq=False, slots=True)
class _InUse:
    """A tree with its user count."""

    tree: Tree
    users: int = 0


class StagedModel:
    """A model in the cache; a `Staged`."""

    def __init__(self, stager: Stager, key: tuple[str, Fingerprint], directory: Path) -> None:
        self._stager = stager
        self._key = key
        self._released = False
        self.directory = directory

    @property
    def fingerprint(self) -> Fingerprint:
        """State of the source in the directory."""
        return self._key[1]

    def release(self) -> None:
        """Ends the use of the directory; repeated calls do nothing."""
        if not self._released:
            self._released = True
            self._stager._release(self._key)


class Stager:
    """Stages the models of one repository."""

    def __init__(
        self, connection: Connection[Any, Any], cache: ModelCache, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connection = connection
        self._cache = cache
        self._clock = clock
        self._checksums = Checksums()
        self._lock = threading.Lock()  # guards the next attribute
        self._in_use: dict[tuple[str, Fingerprint], _InUse] = {}

    def blob(self, item: StoredObject) -> Blob:
        """Blob of an object in its current state."""
        key = repr((self._connection.location.text, item.entry(item.path)))
        return Blob(hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest(), item.size)

    def stage(
        self, name: str, look: Callable[[], Contents], progress: Progress, cancelled: Callable[[], bool]
    ) -> StagedModel:
        """Stages a model, or shares the tree in use; `look` lists its current content.

        Raises:
            OSError: The files can't be fetched; partial data stays for a retry.
            CancelledError: `cancelled` returned True.
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
            with ExitStack() as undo:
                undo.callback(tree.remove)
                try:
                    done = self._fill(name, tree, contents, look, progress, cancelled)
                except OSError as error:
                    raise (
                        self._cache.disk_full(error) if is_disk_full(error) and error.filename else error
                    ) from None
                if done:
                    undo.pop_all()
                    return self._share(key, tree)
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
        """Fills a tree; returns False if the model changed meanwhile."""
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
        except StoreBusyError:
            raise
        except OSError as error:
            if is_disk_full(error) or _same(contents, look(), missing):
                raise
            return False
        # Unchanged at the end means unchanged all the time: objects never return to an old state.
        if not _same(contents, look(), missing):
            self._forget(files)
            return False
        with suppress(FileNotFoundError):  # another server may have evicted a blob
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
            if fetch.begun:  # else it was cancelled before
                fetch.ended.wait(_END_S)

    def _forget(self, files: dict[str, FetchItem]) -> None:
        """Drops partial data of changed objects, which may mix both states."""
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
        if shared.tree is not tree:  # another thread was faster
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
    """True if the objects are unchanged."""
    return all(now.files.get(path) == before.files[path] for path in paths)
