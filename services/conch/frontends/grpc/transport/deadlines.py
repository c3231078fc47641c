"""Deadlines of calls: ends those that are not answered in time.

Deadlines lie in buckets of `_BUCKET_NS`; there is one timer of the loop for each bucket that has any, so a
call costs two entries in dicts. Threads and locks: the loop's thread.
"""

from __future__ import annotations

from functools import partial

from conch.core.io_loop import IoLoop
from conch.frontends.grpc.transport.calls import OpenCall

_BUCKET_BITS = 24  # 17 ms; the client keeps its own time


class Deadlines:
    """The deadlines of one port's calls."""

    def __init__(self, loop: IoLoop) -> None:
        self._loop = loop
        self._buckets: dict[int, dict[OpenCall, None]] = {}

    def add(self, call: OpenCall) -> None:
        """Adds a call that has a deadline."""
        assert call.deadline_at_ns is not None
        bucket = (call.deadline_at_ns >> _BUCKET_BITS) + 1
        calls = self._buckets.get(bucket)
        if calls is None:
            calls = self._buckets[bucket] = {}
            self._loop.call_at(bucket << _BUCKET_BITS, partial(self._expire, bucket))
        calls[call] = None

    def discard(self, call: OpenCall) -> None:
        """Removes a call that has ended."""
        assert call.deadline_at_ns is not None
        calls = self._buckets.get((call.deadline_at_ns >> _BUCKET_BITS) + 1)
        if calls is not None:
            calls.pop(call, None)

    def _expire(self, bucket: int) -> None:
        for call in self._buckets.pop(bucket):
            call.connection.expire(call)
