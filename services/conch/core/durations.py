"""What all statistics are made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Duration:
    """A count of events and the time they took together, in nanoseconds."""

    count: int = 0
    ns: int = 0
