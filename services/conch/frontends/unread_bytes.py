"""Counts of bytes that clients of streams have yet to read, so that slow readers share a bound.

Each stream has a `Backlog` with a bound of its own, and a client may open thousands of streams. Only what a
stream has beyond `LEAST_OF_ONE` counts in the `UnreadBytes` of its front end, so streams whose clients keep
up cost nothing.

Threads and locks: a backlog is guarded by its stream's lock; the total has one of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

MOST_OF_ALL = 1 << 30
LEAST_OF_ONE = 1 << 20


class UnreadBytes:
    """Counts the bytes of one front end's streams.

    Attributes:
        total: Bytes of all streams, each without its first `LEAST_OF_ONE`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.total = 0

    def add(self, count: int) -> None:
        """Adds to the total."""
        with self._lock:
            self.total += count


class Backlog:
    """Bytes of one stream that its client has yet to read, and calls that wait until it has.

    Args:
        unread: The total of the front end.
        most_bytes: The stream's own bound.

    Attributes:
        size: The bytes; changed by `resize`.
    """

    __slots__ = ("_closed", "_deferred", "_most_bytes", "_unread", "size")

    def __init__(self, unread: UnreadBytes, most_bytes: int) -> None:
        self._unread = unread
        self._most_bytes = most_bytes
        self._deferred: list[Callable[[], object]] = []
        self._closed = False
        self.size = 0

    @property
    def backpressure(self) -> bool:
        """True if this stream, or all together, have too many unread bytes; also without the lock."""
        return self.exceeds(self._most_bytes)

    def exceeds(self, most_bytes: int) -> bool:
        """True if the stream has more unread bytes than `most_bytes`, or all together have too many."""
        size = self.size
        return size > most_bytes or (size > LEAST_OF_ONE and self._unread.total > MOST_OF_ALL)

    def resize(self, size: int) -> None:
        """Sets the bytes."""
        before, self.size = self.size, size
        if before > LEAST_OF_ONE or size > LEAST_OF_ONE:
            self._unread.add(max(size, LEAST_OF_ONE) - max(before, LEAST_OF_ONE))

    def defer_until_writable(self, work: Callable[[], object]) -> bool:
        """Keeps a call for `take_ready` if there is too much; returns False if it need not wait."""
        if self._closed or not self.backpressure:
            return False
        self._deferred.append(work)
        return True

    def take_ready(self) -> list[Callable[[], object]]:
        """Takes the calls that need not wait any more, to be made without the lock.

        They wait for their own client's progress: what other streams free does not end a wait.
        """
        if not self._deferred or self.backpressure:
            return []
        return self._take()

    def close(self) -> list[Callable[[], object]]:
        """Takes all calls, as `take_ready` does; later ones do not wait. The bytes still count."""
        self._closed = True
        return self._take()

    def _take(self) -> list[Callable[[], object]]:
        ready, self._deferred = self._deferred, []
        return ready
