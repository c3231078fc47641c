"""Temporary directories for models whose files came with a load request, and the end of those left behind.

A process that is killed can't remove what it has made. Its locks end with it, though: a directory that nobody
holds the lock of is nobody's, and the next server that starts removes it.
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

from conch_control.repository.layout import Fingerprint

log = logging.getLogger(__name__)

_PREFIX = "conch-model-"
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Folder:
    """A temporary directory that nobody else may look into; a `Staged`.

    It is removed when it is released, or else when the process ends, or else by `remove_abandoned`.

    Args:
        fingerprint: What is put into it.

    Attributes:
        directory: The directory.
        fingerprint: What is in it.
    """

    def __init__(self, fingerprint: Fingerprint) -> None:
        self.directory, self._lock = _make()
        self.fingerprint = fingerprint
        self._remove = partial(_remove, os.fspath(self.directory), os.getpid())
        atexit.register(self._remove)

    def release(self) -> None:
        """Removes the directory."""
        atexit.unregister(self._remove)
        self._remove()
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def remove_abandoned() -> None:
    """Removes what processes of this user have left that were killed; what can't be removed stays."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX):
                with suppress(OSError):
                    _remove_if_abandoned(entry)


def _make() -> tuple[Path, int]:
    """A new directory, and a descriptor that holds its lock."""
    while True:
        directory = tempfile.mkdtemp(prefix=_PREFIX)
        try:
            descriptor = os.open(directory, _OPEN)
        except FileNotFoundError:
            continue  # somebody who starts has found it before it was locked
        except OSError:
            os.rmdir(directory)
            raise
        with suppress(OSError):  # where there are no locks, nobody can take it for abandoned either
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        if os.fstat(descriptor).st_nlink:
            return Path(directory), descriptor
        os.close(descriptor)  # found while it was being locked


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # and not a process that a model has forked, at its end
        shutil.rmtree(directory, ignore_errors=True)


def _remove_if_abandoned(entry: os.DirEntry[str]) -> None:
    if not entry.is_dir(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != os.geteuid():
        return
    descriptor = os.open(entry.path, _OPEN)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        log.info("removing '%s', which a server that was killed has left", entry.path)
        shutil.rmtree(entry.path, ignore_errors=True)
    finally:
        os.close(descriptor)
