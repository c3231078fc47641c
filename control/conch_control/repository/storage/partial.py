"""A content that is being fetched."""

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
"""Writes some bytes to a descriptor at an offset and says how many; `os.pwrite`."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Room(Protocol):
    """What a cache offers to who writes into it."""

    def free(self, size: int) -> bool:
        """Removes what nobody uses, for so many bytes; says whether there was any."""

    def no_room(self, error: OSError) -> OSError:
        """What to say when the disk is full."""

    def locked(self) -> AbstractContextManager[None]:
        """Keeps others from counting, linking and evicting."""


def is_full(error: OSError) -> bool:
    """Whether an error says that there is no room on the disk."""
    return error.errno in _FULL


class Partial:
    """The first bytes of a content, and the right to add to them.

    Args:
        cache: The cache; knows what to do where there is no room.
        path: The file.
        descriptor: The file, locked.
        write: Writes to it.
    """

    def __init__(self, cache: Room, path: Path, descriptor: int, write: Write) -> None:
        self._cache = cache
        self._path = path
        self._lock = threading.Lock()  # it may be closed while another thread still writes
        self._descriptor: int | None = descriptor
        self._write = write
        self.size = os.fstat(descriptor).st_size

    def append(self, data: bytes) -> None:
        """Adds some bytes.

        Raises:
            OSError: They can't be written; those before are still good.
        """
        with self._lock:
            while data:
                try:
                    written = self._write(self._open(), data, self.size)
                except OSError as error:
                    if not is_full(error):
                        raise
                    if not self._cache.free(len(data)):
                        raise self._cache.no_room(error) from None
                    continue
                self.size += written
                data = data[written:]

    def restart(self) -> None:
        """Forgets the bytes.

        Raises:
            FileNotFoundError: Somebody else has taken them for good.
        """
        with self._lock, self._cache.locked():
            self._unlink()
            fresh = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(fresh, fcntl.LOCK_EX)
            os.close(self._open())
            self._descriptor = fresh
            self.size = 0

    def drop(self) -> None:
        """Removes it.

        Raises:
            FileNotFoundError: Somebody else has taken it for good.
        """
        with self._lock, self._cache.locked():
            self._unlink()

    def md5(self) -> str:
        """MD5 of the bytes, in hexadecimal."""
        digest = hashlib.md5(usedforsecurity=False)
        with self._lock:
            offset = 0
            while data := os.pread(self._open(), 1 << 20, offset):
                digest.update(data)
                offset += len(data)
        return digest.hexdigest()

    def sync(self) -> None:
        """Has the bytes written to the disk, so that a loss of power does not leave others in their place."""
        with self._lock:
            try:
                os.fsync(self._open())
            except OSError as error:
                raise self._cache.no_room(error) if is_full(error) else error from None

    def close(self) -> None:
        """Gives it up for others to go on."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)

    def _unlink(self) -> None:
        # It is never cut off: it may be a blob by now, and linked to a model.
        if os.stat(self._path).st_ino != os.fstat(self._open()).st_ino:
            raise FileNotFoundError(errno.ENOENT, "what was fetched is gone", str(self._path))
        self._path.unlink()

    def _open(self) -> int:
        if self._descriptor is None:
            raise OSError(errno.EBADF, "it has been closed")
        return self._descriptor
