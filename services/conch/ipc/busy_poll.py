"""Busy-polls briefly before a thread sleeps, to avoid wake-up latency.

A wake-up costs both sides tens of microseconds where idle processors halt, as in virtual machines. A receiver
whose messages arrive soon polls first. After a poll in vain it skips polling for an increasing number of
waits.

After a poll that was held up it does so for longer: another thread wants the processor or the interpreter.
There polling costs milliseconds, as a thread that sleeps goes before busy ones when its message comes, and
one that polls has to wait for its turn.

With a single client, a worker polls longer for the next request, but yields to all other threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from conch.core.clock import Clock, monotonic_ns

MOST_NS = 300_000
"""Longest poll."""

LATE_NS = 50_000
"""A poll whose checks are further apart was held up."""

LONGEST_REST = 1023
"""Most waits in a row that skip polling after polls in vain."""

LONGEST_REST_HELD_UP = 4095
"""As `LONGEST_REST`, after polls that were held up."""

ALONE_MOST_NS = 600_000
"""Longest poll for a single client's next request, which comes through the server."""

ALONE_LATE_NS = 400_000
"""As `LATE_NS`; includes the work of client and server, to which this poll yields."""

ALONE_LONGEST_REST = 63
"""As `LONGEST_REST`, for a single client."""

ALONE_AFTER = 16
"""Requests in a row that look like a single client's before they count as such."""

LATER_COUNTS = 4
"""A request later than the longest poll cancels so many of them."""

AT_ONCE_NS = 150_000
"""A request sooner than this after a response was queued meanwhile: it is another client's."""


class BusyPoll:
    """Polls while that pays; for one thread at a time. `look` must not block."""

    __slots__ = ("_alone", "_clock", "_look", "_rest", "_resting", "_yield_cpu")

    def __init__(
        self,
        look: Callable[[], object],
        clock: Clock = monotonic_ns,
        yield_cpu: Callable[[], object] = os.sched_yield,
    ) -> None:
        self._look = look
        self._clock = clock
        self._yield_cpu = yield_cpu
        self._alone = 0  # score of requests that look like a single client's
        self._rest = 0
        self._resting = 0

    def wait(self) -> bool:
        """Polls for a while; True if `look` has succeeded."""
        if self._resting:
            self._resting -= 1
            return False
        if self._alone >= ALONE_AFTER:
            return self._look_for(ALONE_MOST_NS, ALONE_LATE_NS, ALONE_LONGEST_REST, self._yield_cpu)
        return self._look_for(MOST_NS, LATE_NS, LONGEST_REST, None)

    def record_arrival(self, requests: int, since_ns: int) -> None:
        """Updates the score of a single client: `requests` came together, waited for since `since_ns`."""
        waited_ns = self._clock() - since_ns
        if requests != 1 or waited_ns < AT_ONCE_NS:
            self._alone = 0
        elif waited_ns > ALONE_MOST_NS:
            self._alone = max(self._alone - LATER_COUNTS, 0)
        elif self._alone < 2 * ALONE_AFTER:
            self._alone += 1
            if self._alone == ALONE_AFTER:
                self._rest = self._resting = 0  # polls in vain were for something else

    def _look_for(
        self, most_ns: int, late_ns: int, longest_rest: int, yield_cpu: Callable[[], object] | None
    ) -> bool:
        look, clock = self._look, self._clock
        now = clock()
        end = now + most_ns
        while not look():
            if yield_cpu is not None:
                yield_cpu()
            before, now = now, clock()
            if now - before > late_ns:
                self._resting = self._rest = min(8 * self._rest + 7, LONGEST_REST_HELD_UP)
                return False
            if now > end:
                self._resting = self._rest = min(2 * self._rest + 1, longest_rest)
                return False
        self._rest >>= 1
        return True
