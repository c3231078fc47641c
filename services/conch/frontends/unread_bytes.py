"""`UnreadBytes`: what the clients of all streams have yet to read, so that slow readers share a bound.

Each stream has a bound of its own, and a client may open thousands. Only what a stream has beyond
`LEAST_OF_ONE` counts, so streams whose clients keep up cost nothing. Any thread; one lock.
"""

from __future__ import annotations

import threading

MOST_OF_ALL = 1 << 30
LEAST_OF_ONE = 1 << 20


class UnreadBytes:
    """Counts the bytes of one front end's streams."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = 0

    def change(self, before: int, after: int) -> None:
        """Notes that a stream has other bytes than before."""
        if before > LEAST_OF_ONE or after > LEAST_OF_ONE:
            with self._lock:
                self._total += max(after, LEAST_OF_ONE) - max(before, LEAST_OF_ONE)

    def behind(self, unread: int, most: int) -> bool:
        """Whether a stream with so many bytes must wait for its reader; `most` is its own bound."""
        return unread > most or (unread > LEAST_OF_ONE and self._total > MOST_OF_ALL)
