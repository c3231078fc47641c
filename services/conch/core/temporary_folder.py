"""Temporary folders of processes that may be killed.

A killed process leaves its folders behind, but the kernel drops its locks: a folder without a lock is
abandoned, and the next process that makes one for the same purpose removes it.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

log = logging.getLogger(__name__)

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TemporaryFolder:
    """A private temporary folder; removed on release, or at exit, or by `remove_abandoned`.

    As a context manager it gives its path, and is released at the end.

    Args:
        prefix: The beginning of its name, which no other kind of folder has; abandoned ones are removed.
    """

    def __init__(self, prefix: str) -> None:
        remove_abandoned(prefix)
        self.path, self._lock = _make(prefix)
        self._remove = partial(_remove, os.fspath(self.path), os.getpid())
        atexit.register(self._remove)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Removes the folder."""
        atexit.unregister(self._remove)
        self._remove()
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def remove_abandoned(prefix: str) -> None:
    """Removes folders of this user's killed processes, as far as possible."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(prefix):
                with suppress(OSError):
                    _remove_if_abandoned(entry)


def _make(prefix: str) -> tuple[Path, int]:
    """Creates a locked folder; returns it with the lock's descriptor."""
    while True:
        directory = tempfile.mkdtemp(prefix=prefix)
        try:
            descriptor = os.open(directory, _OPEN)
        except FileNotFoundError:
            continue  # another process removed it before it was locked
        except OSError:
            os.rmdir(directory)
            raise
        with suppress(OSError):  # without locks it can't be taken for abandoned either
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        if os.fstat(descriptor).st_nlink:
            return Path(directory), descriptor
        os.close(descriptor)  # removed while it was being locked


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # not a process forked by a model
        shutil.rmtree(directory, ignore_errors=True)


def _remove_if_abandoned(entry: os.DirEntry[str]) -> None:
    if not entry.is_dir(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != os.geteuid():
        return
    descriptor = os.open(entry.path, _OPEN)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        log.info("removing '%s', which a process that was killed has left", entry.path)
        shutil.rmtree(entry.path, ignore_errors=True)
    finally:
        os.close(descriptor)
