"""Deadlines of calls: ends those that are not answered in time.

Deadlines lie in buckets of `_BUCKET_NS`; there is one timer of the loop for each bucket that has any, so a
call costs two entries in dicts. A bucket that its calls have left stays until it is due. Clients may choose
deadlines that never are: when buckets are twice as many as had calls the last time, empty ones are removed.
Threads and locks: the loop's thread.
"""

from __future__ import annotations

from functools import partial

from conch.frontends.grpc.transport.calls import OpenCall
from conch.ipc.loop import IoLoop, Timer

_BUCKET_BITS = 24  # 17 ms; the client keeps its own time
_FEW_BUCKETS = 1024


class Deadlines:
    """The deadlines of one port's calls."""

    def __init__(self, loop: IoLoop) -> None:
        self._loop = loop
        self._buckets: dict[int, dict[OpenCall, None]] = {}
        self._timers: dict[int, Timer] = {}
        self._most_buckets = _FEW_BUCKETS

    def add(self, call: OpenCall) -> None:
        """Adds a call that has a deadline."""
        assert call.deadline_at_ns is not None
        bucket = (call.deadline_at_ns >> _BUCKET_BITS) + 1
        calls = self._buckets.get(bucket)
        if calls is None:
            if len(self._buckets) >= self._most_buckets:
                self._remove_empty()
            calls = self._buckets[bucket] = {}
            self._timers[bucket] = self._loop.call_at(bucket << _BUCKET_BITS, partial(self._expire, bucket))
        calls[call] = None

    def discard(self, call: OpenCall) -> None:
        """Removes a call that has ended."""
        assert call.deadline_at_ns is not None
        calls = self._buckets.get((call.deadline_at_ns >> _BUCKET_BITS) + 1)
        if calls is not None:
            calls.pop(call, None)

    def _remove_empty(self) -> None:
        for bucket in [each for each, calls in self._buckets.items() if not calls]:
            del self._buckets[bucket]
            self._timers.pop(bucket).cancel()
        self._most_buckets = max(_FEW_BUCKETS, 2 * len(self._buckets))

    def _expire(self, bucket: int) -> None:
        del self._timers[bucket]
        for call in self._buckets.pop(bucket):
            call.connection.expire(call)
