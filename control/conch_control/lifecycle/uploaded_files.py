"""Temporary directories for uploaded model files, and removal of abandoned ones.

A killed process leaves its directories behind, but the kernel drops its locks: a directory without a lock
is abandoned, and the next server removes it at its start.
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


class UploadDirectory:
    """A private temporary directory; a `Staged`. Removed on release, or at exit, or by `remove_abandoned`.

    Attributes:
        directory: The directory.
        fingerprint: Fingerprint of its content.
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
    """Removes directories of this user's killed processes, as far as possible."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX):
                with suppress(OSError):
                    _remove_if_abandoned(entry)


def _make() -> tuple[Path, int]:
    """Creates a locked directory; returns it with the lock's descriptor."""
    while True:
        directory = tempfile.mkdtemp(prefix=_PREFIX)
        try:
            descriptor = os.open(directory, _OPEN)
        except FileNotFoundError:
            continue  # another starting server removed it before it was locked
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
        log.info("removing '%s', which a server that was killed has left", entry.path)
        shutil.rmtree(entry.path, ignore_errors=True)
    finally:
        os.close(descriptor)
