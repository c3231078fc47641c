"""Timeouts of client connections: incomplete requests, idle connections, unread responses.

Threads and locks: event loop only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple

_EVERY_WHILE_STOPPING_S = 0.1


class WaitsFor(Enum):
    """Event that a connection waits for; each kind has its timeout."""

    REQUEST = auto()
    """The next request."""
    REST = auto()
    """The rest of a request."""
    READER = auto()
    """The client to read a response."""
    CLOSE = auto()
    """The client to close its side."""
    SERVER = auto()
    """The server, which executes a request; no timeout."""


class ConnectionSnapshot(NamedTuple):
    """Progress of a connection at one moment.

    Attributes:
        waits: Event that the connection waits for.
        requests: Number of requests that have begun on it.
        received: Number of received bytes.
        unsent: Number of bytes that wait for the client to read them.
    """

    waits: WaitsFor
    requests: int
    received: int
    unsent: int


@dataclass(frozen=True, slots=True)
class ClientTimeouts:
    """Timeouts in seconds.

    Attributes:
        stalled_s: Period in which at least `least_bytes` of an incomplete request must arrive.
        least_bytes: Minimum progress per period.
        idle_s: Timeout of idle connections and of unread responses.
        crowded_s: Upper bound of both while connections are near their limit.
        stopping_s: Replaces `stalled_s` during shutdown.
        every_s: Interval between checks.
    """

    stalled_s: float = 60.0
    least_bytes: int = 4096
    idle_s: float = 300.0
    crowded_s: float = 10.0
    stopping_s: float = 1.0
    every_s: float = 5.0

    def while_crowded(self) -> ClientTimeouts:
        """Returns the timeouts near the limit of connections."""
        return replace(
            self, stalled_s=min(self.stalled_s, self.crowded_s), idle_s=min(self.idle_s, self.crowded_s)
        )

    def while_stopping(self) -> ClientTimeouts:
        """Returns the timeouts during shutdown."""
        return replace(self, stalled_s=self.stopping_s, every_s=min(self.every_s, _EVERY_WHILE_STOPPING_S))


class ProgressCheck:
    """Compares periodic snapshots of a connection; requests themselves have no timer.

    Attributes:
        since_s: Monotonic time of the first snapshot since its last progress; infinite before any.
    """

    __slots__ = ("_seen", "since_s")

    def __init__(self) -> None:
        self._seen: ConnectionSnapshot | None = None
        self.since_s = float("inf")

    def timed_out(self, snapshot: ConnectionSnapshot, timeouts: ClientTimeouts, now: float) -> bool:
        """True if the client has made too little progress for too long.

        Args:
            snapshot: The connection's progress now.
            timeouts: Limits by kind of event.
            now: Monotonic seconds.
        """
        last = self._seen
        if (
            last is None
            or snapshot.waits is WaitsFor.SERVER
            or snapshot._replace(received=last.received) != last
        ):
            self._seen, self.since_s = snapshot, now
            return False
        if snapshot.waits is WaitsFor.REST:
            if now - self.since_s < timeouts.stalled_s:
                return False
            if snapshot.received - last.received < timeouts.least_bytes:
                return True
            self._seen, self.since_s = snapshot, now
            return False
        return now - self.since_s >= (
            timeouts.stalled_s if snapshot.waits is WaitsFor.CLOSE else timeouts.idle_s
        )
