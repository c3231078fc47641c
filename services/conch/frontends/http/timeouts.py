"""How long a listener waits for its clients: for the rest of a request, for the next one, and to be read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple

_EVERY_WHILE_STOPPING_S = 0.1


class WaitsFor(Enum):
    """What a connection waits for."""

    REQUEST = auto()
    """For the client to begin a request."""
    REST = auto()
    """For the rest of a request of the client's."""
    READER = auto()
    """For the client to read what it is sent."""
    CLOSE = auto()
    """For the client to take notice that the connection is closed."""
    SERVER = auto()
    """For nothing of the client's: a request of it is worked on."""


class ConnectionSnapshot(NamedTuple):
    """What a connection looks like at one moment.

    Attributes:
        waits: What for.
        requests: How many requests have begun on it.
        received: How many bytes have come.
        unsent: How many bytes wait for the client to read them.
    """

    waits: WaitsFor
    requests: int
    received: int
    unsent: int


@dataclass(frozen=True, slots=True)
class ClientTimeouts:
    """How long clients may take.

    Attributes:
        stalled_s: In each such time as much of a request has to come as `least_bytes`, or it is given up.
        least_bytes: See there; less if it is complete then.
        idle_s: A connection that nobody has used for as long is closed, and one that nobody has read from.
        crowded_s: Takes the place of both times where there are nearly as many connections as there may be.
        stopping_s: Takes the place of `stalled_s` when the listener closes.
        every_s: How often connections are looked at.
    """

    stalled_s: float = 60.0
    least_bytes: int = 4096
    idle_s: float = 300.0
    crowded_s: float = 10.0
    stopping_s: float = 1.0
    every_s: float = 5.0

    def while_crowded(self) -> ClientTimeouts:
        """What is left where there are nearly as many connections as there may be."""
        return replace(
            self, stalled_s=min(self.stalled_s, self.crowded_s), idle_s=min(self.idle_s, self.crowded_s)
        )

    def while_stopping(self) -> ClientTimeouts:
        """What is left when the listener closes."""
        return replace(self, stalled_s=self.stopping_s, every_s=min(self.every_s, _EVERY_WHILE_STOPPING_S))


class ProgressCheck:
    """What one connection has got done, by looking at it now and then: requests themselves cost nothing."""

    __slots__ = ("_seen", "_since")

    def __init__(self) -> None:
        self._seen: ConnectionSnapshot | None = None
        self._since = 0.0

    def timed_out(self, snapshot: ConnectionSnapshot, timeouts: ClientTimeouts, now: float) -> bool:
        """Whether the client has taken too long.

        Args:
            snapshot: What the connection looks like now.
            timeouts: How long it may take.
            now: Monotonic seconds.
        """
        last = self._seen
        if (
            last is None
            or snapshot.waits is WaitsFor.SERVER
            or snapshot._replace(received=last.received) != last
        ):
            self._seen, self._since = snapshot, now
            return False
        if snapshot.waits is WaitsFor.REST:
            if now - self._since < timeouts.stalled_s:
                return False
            if snapshot.received - last.received < timeouts.least_bytes:
                return True
            self._seen, self._since = snapshot, now
            return False
        return now - self._since >= (
            timeouts.stalled_s if snapshot.waits is WaitsFor.CLOSE else timeouts.idle_s
        )
