"""Turns of connections that have more to do than one round of the loop allows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from conch.core.clock import Clock

_TURNS_NS = 2_000_000
"""Time in a round of the loop for connections that have had a turn."""


class TakesTurns(Protocol):
    """A connection that has more to do than one turn allows."""

    def take_turn(self) -> None:
        """Does some of it."""


class Turns:
    """Turns of connections, in order, some in each round of the loop: others are heard in between.

    Args:
        call_soon: Has the loop call something in its next round.
        clock: Monotonic time in nanoseconds.
    """

    def __init__(self, call_soon: Callable[[Callable[[], None]], object], clock: Clock) -> None:
        self._call_soon = call_soon
        self._clock = clock
        self._waiting: deque[TakesTurns] = deque()
        self._called = False  # `_take` is under way to the loop

    def queue(self, connection: TakesTurns) -> None:
        """Gives a connection a turn, behind those that wait for theirs."""
        self._waiting.append(connection)
        if not self._called:
            self._called = True
            self._call_soon(self._take)

    def _take(self) -> None:
        self._called = False
        waiting, end_ns = self._waiting, self._clock() + _TURNS_NS
        try:
            for _ in range(len(waiting)):
                waiting.popleft().take_turn()  # it may queue itself again
                if self._clock() > end_ns:
                    break
        finally:
            if waiting and not self._called:  # also after an error: the others have their turns
                self._called = True
                self._call_soon(self._take)
