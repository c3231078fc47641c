"""Downloads objects into the cache: in blocks, several in parallel, resuming partial downloads.

Runs on the connection's event loop; file operations run on its executor threads.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conch_stores.cache import Blob, ModelCache, Partial
from conch_stores.connection import Connection
from conch_stores.stores import Store, StoredObject

log = logging.getLogger(__name__)

_BLOCK = 2 << 20  # bytes of one read
_BLOCKS_AHEAD = 4  # of one file, in parallel
_FILES = 8  # in parallel
_BLOCKS = 16  # of all files, in parallel
_TRIES = 3  # of a block that is too short, and of a file with a wrong MD5
_LOOK_S = 0.1  # between looks at a file that another thread or server fetches


class TruncatedError(OSError):
    """An object is repeatedly too short, or its MD5 is another wrong one each time.

    It changes meanwhile, or a proxy cuts or changes it.
    """


@dataclass(frozen=True, slots=True)
class FetchItem:
    """An object to fetch."""

    item: StoredObject
    blob: Blob


@dataclass(slots=True)
class Checksums:
    """Trust in a store's checksums: `doubtful` once etags that look like an MD5 have proved not to be one."""

    doubtful: bool = False


class Fetch:
    """One download of several objects."""

    def __init__(
        self,
        connection: Connection[Any, Any],
        cache: ModelCache,
        files: Mapping[str, FetchItem],
        checksums: Checksums,
    ) -> None:
        self._connection = connection
        self._cache = cache
        self._files = files
        self._checksums = checksums
        self._done: dict[str, int] = dict.fromkeys(files, 0)
        self._complete = 0
        self.begun = False
        self.ended = threading.Event()

    @property
    def done(self) -> int:
        """Bytes present."""
        return sum(self._done.values())

    @property
    def complete(self) -> int:
        """Files present."""
        return self._complete

    async def run(self) -> None:
        """Downloads all files; partial data stays in any case. Raises OSError: one can't be fetched."""
        self.begun = True
        try:
            queue = deque(self._files.items())
            blocks = asyncio.Semaphore(_BLOCKS)

            async def work() -> None:
                while queue:
                    path, wanted = queue.popleft()
                    await self._file(path, wanted, blocks)
                    self._complete += 1

            tasks = [asyncio.create_task(work()) for _ in range(min(_FILES, len(queue)))]
            try:
                await asyncio.gather(*tasks)
            finally:
                await _give_up(tasks)
        finally:
            self.ended.set()

    async def _file(self, path: str, wanted: FetchItem, blocks: asyncio.Semaphore) -> None:
        while not await asyncio.to_thread(self._cache.has, wanted.blob):
            partial = await asyncio.to_thread(self._cache.partial, wanted.blob)
            if partial is None:
                await asyncio.sleep(_LOOK_S)  # another thread or server fetches it
                continue
            try:
                await self._content(path, wanted, partial, blocks)
            finally:
                partial.close()
            break
        self._done[path] = wanted.blob.size

    async def _content(
        self, path: str, wanted: FetchItem, partial: Partial, blocks: asyncio.Semaphore
    ) -> None:
        seen = ""
        for _ in range(_TRIES):
            if partial.size:
                log.info("going on with '%s' at %d bytes", wanted.item.path, partial.size)
            await self._rest(path, wanted.item, partial, blocks)
            expected = "" if self._checksums.doubtful else wanted.item.md5
            found = await asyncio.to_thread(partial.md5) if expected else ""
            if found == expected:
                await asyncio.to_thread(partial.sync)
                return
            # The same content twice is not a transfer error: the store's checksum is no MD5 of the content.
            if found == seen:
                log.warning(
                    "checksums of model repository '%s' are not those of the contents, and not checked",
                    self._connection.location,
                )
                self._checksums.doubtful = True
                await asyncio.to_thread(partial.sync)
                return
            log.warning("'%s' was not fetched well: its MD5 is wrong", wanted.item.path)
            seen = found
            await asyncio.to_thread(partial.restart)
        raise TruncatedError(f"'{wanted.item.path}' can't be fetched: its content is another one every time")

    async def _rest(self, path: str, item: StoredObject, partial: Partial, blocks: asyncio.Semaphore) -> None:
        """Downloads the rest of a file, some blocks ahead of the write position."""
        position = partial.size
        pending: deque[asyncio.Task[bytes]] = deque()
        self._done[path] = position
        try:
            while position < item.size or pending:
                while position < item.size and len(pending) < _BLOCKS_AHEAD:
                    end = min(position + _BLOCK, item.size)
                    pending.append(asyncio.create_task(self._block(item, position, end, blocks)))
                    position = end
                data = await pending[0]
                pending.popleft()
                await asyncio.to_thread(partial.append, data)
                self._done[path] = partial.size
        finally:
            await _give_up(pending)

    async def _block(self, item: StoredObject, start: int, end: int, blocks: asyncio.Semaphore) -> bytes:
        async def read(store: Store) -> bytes:
            return await store.read(item.path, start, end)

        async with blocks:
            for _ in range(_TRIES):
                data = await self._connection.retry(read, self._connection.timeouts.block_s)
                if len(data) == item.size > end - start:
                    data = data[start:end]  # the server ignores ranges
                if len(data) == end - start:
                    return data
        raise TruncatedError(
            f"model repository '{self._connection.location}': '{item.path}' ends early: {len(data)} of "
            f"{end - start} bytes from {start} on"
        )


async def _give_up(tasks: deque[asyncio.Task[bytes]] | list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
