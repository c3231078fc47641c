"""Watches single directories with watchdog's inotify reader.

Only the reader is used: watchdog's recursive observers follow no links, need a thread per root and hide
errors for subdirectories. `watcher` decides what to watch.

Threads: one reader, `conch-watch`; callbacks run on it and must not block or raise. Locks: one for the table
of watches.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from watchdog.observers.inotify_c import (
    CallbackId,
    InotifyConstants,
    InotifyEvent,
    InotifyFD,
    Mask,
    WatchDescriptor,
)

from conch_control.planner.watch_paths import Identity, WatchError

OnChange = Callable[[Identity, str], None]
"""Called with a directory and the name of the changed entry; empty for the directory itself."""

# No IN_MODIFY, which comes with every write: settling polls files being written, and closing is an event.
_MASK = Mask(
    InotifyConstants.IN_CREATE
    | InotifyConstants.IN_DELETE
    | InotifyConstants.IN_MOVE
    | InotifyConstants.IN_CLOSE_WRITE
    | InotifyConstants.IN_ATTRIB
    | InotifyConstants.IN_DELETE_SELF
    | InotifyConstants.IN_MOVE_SELF
    | InotifyConstants.IN_ONLYDIR
    | InotifyConstants.IN_EXCL_UNLINK
)
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES})


@dataclass(slots=True)
class _Watch:
    """A `watchdog.observers.inotify_c.WatchCallback`."""

    identity: Identity
    key: CallbackId
    owner: Directories

    def on_event(self, event: InotifyEvent) -> None:
        self.owner.on_change(self.identity, os.fsdecode(event.name))

    def on_watch_deleted(self, wd: WatchDescriptor) -> None:
        self.owner.lost(self.identity, self.key)

    def on_queue_overflow(self) -> None:
        self.owner.on_overflow()


@dataclass
class Directories:
    """The watched directories; thread-safe.

    Raises:
        WatchError: The kernel allows no more readers.
    """

    on_change: OnChange
    on_overflow: Callable[[], None]
    _reader: InotifyFD = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _watched: dict[Identity, tuple[WatchDescriptor, CallbackId]] = field(default_factory=dict, init=False)
    _ids: Iterator[int] = field(default_factory=count, init=False)

    def __post_init__(self) -> None:
        with _explained():
            self._reader = InotifyFD()
        self._reader.name = "conch-watch"
        self._reader.start()

    def add(self, path: str) -> Identity | None:
        """Watches a directory, by its path without links; None if it is missing or unreadable.

        Raises:
            WatchError: The kernel allows no more watches.
        """
        try:
            status = os.stat(path)
        except OSError:
            return None
        identity = (status.st_dev, status.st_ino)
        with self._lock:
            if identity in self._watched:
                return identity
        key = CallbackId(next(self._ids))
        watch = _Watch(identity, key, self)
        try:
            with _explained():
                descriptor = self._reader.add_callback(os.fsencode(path), _MASK, watch, key)
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise
        if descriptor < 0:  # unreadable
            return None
        with self._lock:
            self._watched[identity] = (descriptor, key)
        return identity

    def remove(self, identity: Identity) -> None:
        """Stops watching a directory."""
        with self._lock:
            watched = self._watched.pop(identity, None)
        if watched is not None:
            self._reader.remove_callbacks([watched])

    def lost(self, identity: Identity, key: CallbackId) -> None:
        """Forgets a directory that was deleted."""
        with self._lock:
            watched = self._watched.get(identity)
            if watched is not None and watched[1] == key:
                del self._watched[identity]
        self.on_change(identity, "")

    def close(self, timeout_s: float) -> None:
        """Stops the reader."""
        self._reader.stop()
        self._reader.join(timeout_s)


@contextmanager
def _explained() -> Iterator[None]:
    """Turns errors about kernel limits into WatchError."""
    try:
        yield
    except OSError as error:
        limits = {errno.ENOSPC: "fs.inotify.max_user_watches", errno.EMFILE: "fs.inotify.max_user_instances"}
        if error.errno in limits:
            raise WatchError(f"the limit {limits[error.errno]} of this machine is reached") from None
        if error.errno in _GONE:
            raise
        raise WatchError(str(error)) from None
