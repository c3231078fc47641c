"""Waiting awake for a message that is expected before a sleeper would be up.

To wake a process costs the one that wakes it and the one that is woken tens of microseconds each where
processors halt when idle, as they do in virtual machines: more than many a model computes. So whoever has
been sent its next message soon, again and again, looks for it for a while before it sleeps. A look in vain is
followed by ever more waits without one, and so is a look that was held up, as then somebody else wants the
processor, or the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable

from conch.core.clock import Clock, monotonic_ns

MOST_NS = 300_000
"""How long to look."""

LATE_NS = 50_000
"""Two looks that are further apart were held up."""

LONGEST_REST = 1023
"""After so many waits without a look there is one again."""


class Spinning:
    """Looks for something, while that is worth it; for one thread at a time.

    Args:
        look: Whether it is there; must not wait.
        clock: Monotonic time in nanoseconds.
    """

    __slots__ = ("_clock", "_look", "_rest", "_resting")

    def __init__(self, look: Callable[[], object], clock: Clock = monotonic_ns) -> None:
        self._look = look
        self._clock = clock
        self._rest = 0
        self._resting = 0

    def wait(self) -> bool:
        """Looks for a while; returns whether it is there."""
        if self._resting:
            self._resting -= 1
            return False
        look, clock = self._look, self._clock
        now = clock()
        end = now + MOST_NS
        while not look():
            before, now = now, clock()
            if now > end or now - before > LATE_NS:
                self._resting = self._rest = min(2 * self._rest + 1, LONGEST_REST)
                return False
        self._rest >>= 1
        return True
