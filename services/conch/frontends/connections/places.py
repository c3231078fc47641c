"""Places of a port's connections: where all are taken, idle clients give way, and health checks get in."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum, auto
from heapq import nsmallest
from typing import Final, Protocol

RESERVED_CONNECTIONS: Final = 8
"""Places above the limit of connections, for health checks."""
_SHARE = 64
"""Connections for each one that gives way."""


class Place(Enum):
    """A place of a connection."""

    FREE = auto()
    RESERVED = auto()
    """Only health checks are answered."""
    NONE = auto()


class Seated(Protocol):
    """A connection that has a place.

    Attributes:
        reserved: True in a reserved place.
    """

    reserved: bool

    @property
    def idle(self) -> bool:
        """True if nothing of its client is worked on or is under way."""

    @property
    def leaving(self) -> bool:
        """True once it is ending."""

    @property
    def used(self) -> bool:
        """True once its client has sent a request."""

    @property
    def heard_at(self) -> float:
        """Time at which its client was last heard, in the unit of its port."""

    def leave(self) -> None:
        """Ends it; its client has a moment to read why, until a second call."""


def find_place(connections: Collection[Seated], leaving: int, most: int) -> Place:
    """Finds a place for one more connection: of the idle ones those without a request give way first.

    Of these, and then of the others, the ones that were quiet longest: a client that only connects closes no
    connection of those that ask.

    It looks at all connections, so some give way at once where there may be many.

    Args:
        connections: The connections of the port.
        leaving: Number of those that are leaving.
        most: Limit of the others.
    """
    at_once = max(most // _SHARE, 1)
    if len(connections) - leaving < most and leaving <= RESERVED_CONNECTIONS + at_once:
        return Place.FREE
    for each in sorted((each for each in connections if each.leaving), key=_heard_at)[:-RESERVED_CONNECTIONS]:
        each.leave()
    staying = [each for each in connections if not each.leaving]
    reserved = [each for each in staying if each.reserved]
    if len(staying) - len(reserved) < most or _clear(
        (each for each in staying if not each.reserved), at_once
    ):
        return Place.FREE
    if len(reserved) < RESERVED_CONNECTIONS or _clear(reserved, 1):
        return Place.RESERVED
    return Place.NONE


def _clear(connections: Iterable[Seated], count: int) -> bool:
    """Has so many of these leave; False if none is idle."""
    quiet = nsmallest(
        count, (each for each in connections if each.idle), key=lambda each: (each.used, each.heard_at)
    )
    for each in quiet:
        each.leave()
    return bool(quiet)


def _heard_at(connection: Seated) -> float:
    return connection.heard_at
