"""Directories that are watched one by one, through watchdog's reader of the kernel's events.

Watchdog's recursive observers follow no links, need a thread for each root and do not tell when the kernel
refuses to watch a subdirectory. So what to watch is worked out elsewhere, and only the reader is watchdog's.
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

from conch_control.planner.watcher import Identity, WatchError

OnChange = Callable[[Identity, str], None]
"""Told of a directory and the name of its entry that has changed; empty for the directory itself."""

# Not IN_MODIFY, which comes with every write: what is being written is looked at until it has settled, and
# closing it is an event.
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
    """The directories that are watched; any thread may ask for more.

    Callbacks run on the reader's thread, and must neither block nor raise.

    Args:
        touched: Told of changes.
        overflowed: Called when events were lost.

    Raises:
        WatchError: There can be no more readers.
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
        """Watches a directory, unless it is watched already.

        Args:
            path: Its path, without links.

        Returns:
            Which directory it is; None if it is not there, or can't be read.

        Raises:
            WatchError: There can be no more of them.
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
        if descriptor < 0:  # may not be read
            return None
        with self._lock:
            self._watched[identity] = (descriptor, key)
        return identity

    def remove(self, identity: Identity) -> None:
        """Watches a directory no longer."""
        with self._lock:
            watched = self._watched.pop(identity, None)
        if watched is not None:
            self._reader.remove_callbacks([watched])

    def lost(self, identity: Identity, key: CallbackId) -> None:
        """Takes note that the kernel watches a directory no longer: it is gone."""
        with self._lock:
            watched = self._watched.get(identity)
            if watched is not None and watched[1] == key:
                del self._watched[identity]
        self.on_change(identity, "")

    def close(self, timeout_s: float) -> None:
        """Watches nothing any more."""
        self._reader.stop()
        self._reader.join(timeout_s)


@contextmanager
def _explained() -> Iterator[None]:
    """Has errors that no other directory would be spared say what to do."""
    try:
        yield
    except OSError as error:
        limits = {errno.ENOSPC: "fs.inotify.max_user_watches", errno.EMFILE: "fs.inotify.max_user_instances"}
        if error.errno in limits:
            raise WatchError(f"the limit {limits[error.errno]} of this machine is reached") from None
        if error.errno in _GONE:
            raise
        raise WatchError(str(error)) from None
