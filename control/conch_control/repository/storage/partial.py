"""A partial download in the cache, locked by the thread that writes it.

Used by: `cache`, `fetch`, `stager`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

Write = Callable[[int, bytes, int], int]
"""Writes bytes to a descriptor at an offset; returns the count, as `os.pwrite`."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Room(Protocol):
    """The part of the cache that a partial download needs."""

    def free(self, size: int) -> bool:
        """Evicts blobs; returns True if anything was evicted."""

    def disk_full(self, error: OSError) -> OSError:
        """The error for a full disk."""

    def locked(self) -> AbstractContextManager[None]:
        """Locks the cache."""


def is_disk_full(error: OSError) -> bool:
    """True if an error says that the disk is full."""
    return error.errno in _FULL


class Partial:
    """The first bytes of a blob, and the right to append."""

    def __init__(self, cache: Room, path: Path, descriptor: int, write: Write) -> None:
        self._cache = cache
        self._path = path
        self._lock = threading.Lock()  # `close` may run while another thread writes
        self._descriptor: int | None = descriptor
        self._write = write
        self.size = os.fstat(descriptor).st_size

    def append(self, data: bytes) -> None:
        """Appends bytes; evicts blobs if the disk is full.

        Raises:
            OSError: They can't be written; the earlier bytes stay valid.
        """
        with self._lock:
            while data:
                try:
                    written = self._write(self._open(), data, self.size)
                except OSError as error:
                    if not is_disk_full(error):
                        raise
                    if not self._cache.free(len(data)):
                        raise self._cache.disk_full(error) from None
                    continue
                self.size += written
                data = data[written:]

    def restart(self) -> None:
        """Drops all bytes. Raises FileNotFoundError: another server has completed it."""
        with self._lock, self._cache.locked():
            self._unlink()
            fresh = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(fresh, fcntl.LOCK_EX)
            os.close(self._open())
            self._descriptor = fresh
            self.size = 0

    def drop(self) -> None:
        """Removes the file. Raises FileNotFoundError: another server has completed it."""
        with self._lock, self._cache.locked():
            self._unlink()

    def md5(self) -> str:
        """MD5 in hexadecimal."""
        digest = hashlib.md5(usedforsecurity=False)
        with self._lock:
            offset = 0
            while data := os.pread(self._open(), 1 << 20, offset):
                digest.update(data)
                offset += len(data)
        return digest.hexdigest()

    def sync(self) -> None:
        """Flushes to disk, so that a power loss leaves no wrong bytes."""
        with self._lock:
            try:
                os.fsync(self._open())
            except OSError as error:
                raise self._cache.disk_full(error) if is_disk_full(error) else error from None

    def close(self) -> None:
        """Unlocks the file for others."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)

    def _unlink(self) -> None:
        # Never truncated: it may be a blob already, linked to a model.
        if os.stat(self._path).st_ino != os.fstat(self._open()).st_ino:
            raise FileNotFoundError(errno.ENOENT, "what was fetched is gone", str(self._path))
        self._path.unlink()

    def _open(self) -> int:
        if self._descriptor is None:
            raise OSError(errno.EBADF, "it has been closed")
        return self._descriptor
