"""When something is to be done about sequences: requests that may not wait longer, and idle sequences."""

from __future__ import annotations

from collections import OrderedDict

from conch.core.request import InferenceRequest
from conch.core.scheduling.expiry import NEVER, Expiries
from conch.core.scheduling.sequence.table import LiveSequence

_LEAST_PAUSE_NS = 1_000_000
"""How long to wait at least before looking again for idle sequences where there are none."""


class SequenceTimers:
    """The times of one model's sequences.

    While any sequence lives, `next_ns` is no later than the time at which one could have become idle: so
    nothing needs to be told when one does, and who waits for that time looks about once in `max_idle_ns`.

    Args:
        max_idle_ns: How long a sequence may be without a request, in nanoseconds.

    Attributes:
        next_ns: Nothing is to be done before this time; it may be too early.
    """

    def __init__(self, max_idle_ns: int) -> None:
        self.next_ns = NEVER
        self._max_idle_ns = max_idle_ns
        self._waiting = Expiries()
        # By the time since when they have been idle, which ascends.
        self._idle: OrderedDict[LiveSequence, int] = OrderedDict()

    def began(self, now_ns: int) -> None:
        """Says that a sequence has begun."""
        end_ns = now_ns + self._max_idle_ns
        self.next_ns = min(self.next_ns, end_ns)

    def rest(self, sequence: LiveSequence, now_ns: int) -> None:
        """Says that a sequence has nothing queued or running any more."""
        self._idle[sequence] = now_ns

    def wake(self, sequence: LiveSequence) -> None:
        """Says that a sequence is not idle any more."""
        self._idle.pop(sequence, None)

    def watch(self, request: InferenceRequest, time_ns: int) -> None:
        """Adds a request that waits until a certain time."""
        self._waiting.add(request, time_ns)
        self.next_ns = min(self.next_ns, time_ns)

    def unwatch(self, request: InferenceRequest) -> None:
        """Forgets a request, if it is known."""
        self._waiting.discard(request)

    def take_requests(self, now_ns: int) -> list[InferenceRequest]:
        """Takes out the requests whose time has come."""
        return self._waiting.take(now_ns)

    def take_idle(self, now_ns: int) -> list[LiveSequence]:
        """Takes out the sequences that have been idle for too long."""
        taken: list[LiveSequence] = []
        while self._idle:
            sequence, since_ns = next(iter(self._idle.items()))
            if since_ns + self._max_idle_ns > now_ns:
                break
            del self._idle[sequence]
            taken.append(sequence)
        return taken

    def reset(self, now_ns: int, live: int) -> None:
        """Works out the next time, after everything due has been taken.

        Args:
            now_ns: The time.
            live: How many sequences there are.
        """
        next_ns = self._waiting.next_ns
        if self._idle:
            next_ns = min(next_ns, next(iter(self._idle.values())) + self._max_idle_ns)
        elif live:
            next_ns = min(next_ns, now_ns + max(self._max_idle_ns, _LEAST_PAUSE_NS))
        self.next_ns = next_ns
