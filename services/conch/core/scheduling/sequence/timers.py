"""Expiry times of queued requests and idle sequences. Used by: `batcher`."""

from __future__ import annotations

from collections import OrderedDict

from conch.core.request import InferenceRequest
from conch.core.scheduling.expiry import NEVER, Expiries
from conch.core.scheduling.sequence.table import LiveSequence

_LEAST_PAUSE_NS = 1_000_000
"""Least pause between checks for idle sequences while there are none."""


class SequenceTimers:
    """The times of one model's sequences.

    While any sequence lives, `next_ns` is no later than the time at which one could become idle for too long.
    So sequences that become idle wake no thread, which checks about once in `max_idle_ns`.

    Args:
        max_idle_ns: How long a sequence may be idle, in nanoseconds.

    Attributes:
        next_ns: Lower bound of all times.
    """

    def __init__(self, max_idle_ns: int) -> None:
        self.next_ns = NEVER
        self._max_idle_ns = max_idle_ns
        self._waiting = Expiries()
        # With the time at which they became idle, ascending.
        self._idle: OrderedDict[LiveSequence, int] = OrderedDict()

    def began(self, now_ns: int) -> None:
        """Notes that a sequence has started."""
        end_ns = now_ns + self._max_idle_ns
        self.next_ns = min(self.next_ns, end_ns)

    def rest(self, sequence: LiveSequence, now_ns: int) -> None:
        """Notes that a sequence is idle."""
        self._idle[sequence] = now_ns

    def wake(self, sequence: LiveSequence) -> None:
        """Notes that a sequence is not idle."""
        self._idle.pop(sequence, None)

    def watch(self, request: InferenceRequest, time_ns: int) -> None:
        """Adds a request that expires at a time."""
        self._waiting.add(request, time_ns)
        self.next_ns = min(self.next_ns, time_ns)

    def unwatch(self, request: InferenceRequest) -> None:
        """Discards a request, if it is known."""
        self._waiting.discard(request)

    def take_requests(self, now_ns: int) -> list[InferenceRequest]:
        """Takes out expired requests."""
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
        """Computes `next_ns`, after all due requests and sequences were taken, with `live` sequences."""
        next_ns = self._waiting.next_ns
        if self._idle:
            next_ns = min(next_ns, next(iter(self._idle.values())) + self._max_idle_ns)
        elif live:
            next_ns = min(next_ns, now_ns + max(self._max_idle_ns, _LEAST_PAUSE_NS))
        self.next_ns = next_ns
