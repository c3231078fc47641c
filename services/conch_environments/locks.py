"""File locks between processes: shared for users of a file, exclusive for the process that changes it.

The kernel releases a `flock` lock when the last process with the file open ends, so a crash leaves none. The
exclusive holder may remove the file, so each try opens the path anew and compares inodes.

Owns: a descriptor per lock. Threads and locks: any thread; `_closing` guards `close`.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from conch.core.errors import UnavailableError
from conch.core.model_control import LoadCancelled

_POLL_S = 0.1


class FileLock:
    """A lock that is held until `close`; `descriptor` is the open, locked file."""

    def __init__(self, path: Path, descriptor: int, exclusive: bool) -> None:
        self._path = path
        self.descriptor = descriptor
        self.exclusive = exclusive
        self._closing = threading.Lock()
        self._open = True

    @classmethod
    def try_exclusive(cls, path: Path) -> FileLock | None:
        """Locks exclusively; None if the lock is held."""
        return cls._try(path, True)

    @classmethod
    def wait(
        cls,
        path: Path,
        exclusive: Callable[[], bool],
        stopped: LoadCancelled,
        on_wait: Callable[[], None] = lambda: None,
    ) -> FileLock:
        """Waits for the lock.

        Args:
            path: Created if missing.
            exclusive: Evaluated for each try. A lock that others share is shared even so: none of them
                changes the file.
            stopped: Polled while others hold the lock.
            on_wait: Called once if others hold it.

        Raises:
            UnavailableError: The load was stopped.
            OSError: The file can't be opened or created.
        """
        pause = threading.Event()
        waited = False
        while (lock := (cls._try(path, True) if exclusive() else None) or cls._try(path, False)) is None:
            if not waited:
                on_wait()
                waited = True
            # A blocking flock can't be interrupted, so the lock is polled.
            if stopped():
                raise UnavailableError("the load was stopped while another process made its environment")
            pause.wait(_POLL_S)
        return lock

    def share(self) -> bool:
        """Turns an exclusive lock into a shared one; False if the file was removed meanwhile."""
        # The kernel releases the one lock before it takes the other.
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)
        self.exclusive = False
        return self._is_current()

    def remove(self) -> None:
        """Removes the file and releases the lock, which must be exclusive."""
        self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Releases the lock. May be called twice."""
        with self._closing:
            if self._open:
                self._open = False
                # Not unlocked: a process that inherited the file still holds the lock.
                os.close(self.descriptor)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @classmethod
    def _try(cls, path: Path, exclusive: bool) -> FileLock | None:
        operation = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        while True:
            lock = cls(path, _open(path), exclusive)
            with ExitStack() as undo:
                undo.callback(lock.close)
                try:
                    fcntl.flock(lock.descriptor, operation | fcntl.LOCK_NB)
                except BlockingIOError:
                    return None
                if lock._is_current():
                    undo.pop_all()
                    return lock

    def _is_current(self) -> bool:
        """True if the path still names the locked file."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        # A read-only cache can still be used.
        if path.exists():
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        raise
