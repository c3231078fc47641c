"""A clock that tests set."""

from __future__ import annotations


class Clock:
    """A clock that stands still unless it is moved.

    Attributes:
        now: What it shows.
    """

    def __init__(self, now: int = 0) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now
