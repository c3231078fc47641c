"""Locks between processes, on files: many may use what a file stands for, or one may change it.

The kernel releases `flock` locks when the last process that has the file open ends: a crash leaves none
behind. The exclusive holder may remove the file, so after a wait the path may name no file, or another one;
then it is opened again.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from conch.core.errors import UnavailableError
from conch.core.model_control import LoadCancelled

_POLL_S = 0.1


class FileLock:
    """A lock that is held until `close`.

    Args:
        path: The file; made where it is missing.
        descriptor: The file, open and locked.
        exclusive: Whether it is held for oneself.
    """

    def __init__(self, path: Path, descriptor: int, exclusive: bool) -> None:
        self._path = path
        self.descriptor = descriptor
        self.exclusive = exclusive
        self._closing = threading.Lock()
        self._open = True

    @classmethod
    def try_exclusive(cls, path: Path) -> FileLock | None:
        """Takes the lock exclusively if it is free."""
        return cls._try(path, True)

    @classmethod
    def wait(
        cls,
        path: Path,
        exclusive: Callable[[], bool],
        stopped: LoadCancelled,
        on_wait: Callable[[], None] = lambda: None,
    ) -> FileLock:
        """Takes it, once it can be had.

        Args:
            path: The file.
            exclusive: Says for each try whether it has to be for oneself. Where others share it, it is shared
                all the same: none of them is going to change anything, so there is nothing to wait for.
            stopped: Asked while others have it.
            on_wait: Called once, if others have it.

        Raises:
            UnavailableError: It is not wanted any more.
            OSError: The file can't be opened or made.
        """
        pause = threading.Event()
        waited = False
        while (lock := (cls._try(path, True) if exclusive() else None) or cls._try(path, False)) is None:
            if not waited:
                on_wait()
                waited = True
            # A blocking flock can't be called off, so it is asked for now and then.
            if stopped():
                raise UnavailableError("the load was stopped while another process made its environment")
            pause.wait(_POLL_S)
        return lock

    def share(self) -> bool:
        """Lets others use it too, from having had it for oneself; false if one has removed it on the way."""
        # The kernel gives the one lock up before it takes the other.
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)
        self.exclusive = False
        return self._is_current()

    def remove(self) -> None:
        """Removes the file and gives the lock up; for who has it for itself."""
        self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Gives it up; nothing happens the second time."""
        with self._closing:
            if self._open:
                self._open = False
                # Not unlocked: a process that was given the file goes on holding it.
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
            try:
                fcntl.flock(lock.descriptor, operation | fcntl.LOCK_NB)
                if lock._is_current():
                    return lock
            except BlockingIOError:
                lock.close()
                return None
            except BaseException:
                lock.close()
                raise
            lock.close()

    def _is_current(self) -> bool:
        """Whether the path still leads to the file that is locked."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        # What others have made can be used where nothing may be written.
        if path.exists():
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        raise
