"""Waiting awake for a message that is expected before a sleeper would be up.

To wake a process costs the one that wakes it and the one that is woken tens of microseconds each where
processors halt when idle, as they do in virtual machines: more than many a model computes. A
receiver whose messages keep coming soon therefore polls for a while before it sleeps. After a poll in vain it
sleeps at once for an increasing number of waits; also after a delayed poll, because then another thread or
process wants the processor or the interpreter.

With a single client that waits for each response, other threads have little to do. A worker that waits for
its next request then polls longer, but yields to all others.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from conch.core.clock import Clock, monotonic_ns

MOST_NS = 300_000
"""How long to look."""

LATE_NS = 50_000
"""Two looks that are further apart were held up."""

LONGEST_REST = 1023
"""After so many waits without a look there is one again."""

ALONE_MOST_NS = 600_000
"""How long to look for a single client's next request: it comes through the server."""

ALONE_LATE_NS = 400_000
"""Who lets others go first is held up by what the client and the server do for that request, too."""

ALONE_LONGEST_REST = 63
"""After so many waits without a look for a single client's next request there is one again."""

ALONE_AFTER = 16
"""So many requests that look like a single client's have come before they are taken for that."""

LATER_COUNTS = 4
"""One that has come too late to be looked for makes up for so many of them."""

AT_ONCE_NS = 150_000
"""A request that comes sooner after an answer has waited for it, so that it is another client's."""


class Spinning:
    """Looks for something, while that is worth it; for one thread at a time.

    Args:
        look: Whether it is there; must not wait.
        clock: Monotonic time in nanoseconds.
        others_first: Lets others have the processor who want it, where looks are longer.
    """

    __slots__ = ("_alone", "_clock", "_look", "_others_first", "_rest", "_resting")

    def __init__(
        self,
        look: Callable[[], object],
        clock: Clock = monotonic_ns,
        others_first: Callable[[], object] = os.sched_yield,
    ) -> None:
        self._look = look
        self._clock = clock
        self._others_first = others_first
        self._alone = 0  # how much what has come looks like a single client's requests
        self._rest = 0
        self._resting = 0

    def wait(self) -> bool:
        """Looks for a while; returns whether it is there."""
        if self._resting:
            self._resting -= 1
            return False
        if self._alone >= ALONE_AFTER:
            return self._look_for(ALONE_MOST_NS, ALONE_LATE_NS, ALONE_LONGEST_REST, self._others_first)
        return self._look_for(MOST_NS, LATE_NS, LONGEST_REST, None)

    def came(self, requests: int, since_ns: int) -> None:
        """Says what has come: whether it is a single client that is waited for is told by that.

        Args:
            requests: How many requests have come together.
            since_ns: When they began to be waited for.
        """
        waited_ns = self._clock() - since_ns
        if requests != 1 or waited_ns < AT_ONCE_NS:
            self._alone = 0
        elif waited_ns > ALONE_MOST_NS:
            self._alone = max(self._alone - LATER_COUNTS, 0)
        elif self._alone < 2 * ALONE_AFTER:
            self._alone += 1
            if self._alone == ALONE_AFTER:
                self._rest = self._resting = 0  # what was looked for in vain before was something else

    def _look_for(
        self, most_ns: int, late_ns: int, longest_rest: int, others_first: Callable[[], object] | None
    ) -> bool:
        look, clock = self._look, self._clock
        now = clock()
        end = now + most_ns
        while not look():
            if others_first is not None:
                others_first()
            before, now = now, clock()
            if now > end or now - before > late_ns:
                self._resting = self._rest = min(2 * self._rest + 1, longest_rest)
                return False
        self._rest >>= 1
        return True
