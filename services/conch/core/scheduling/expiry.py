"""Expiry times of queued requests: a heap with lazy deletion. Used by the schedulers."""

from __future__ import annotations

import heapq

from conch.core.request import InferenceRequest

NEVER = 1 << 62
"""A monotonic time that never comes."""

_LEAST_SWEPT = 64


class _Entry:
    """A request and its time; the request is None once discarded."""

    __slots__ = ("request", "time_ns")

    def __init__(self, time_ns: int, request: InferenceRequest) -> None:
        self.time_ns = time_ns
        self.request: InferenceRequest | None = request

    def __lt__(self, other: _Entry) -> bool:
        return self.time_ns < other.time_ns


class Expiries:
    """Requests with a time at which they expire.

    Attributes:
        next_ns: Lower bound of all times; too early once a request was discarded.
    """

    __slots__ = ("_entries", "_heap", "next_ns")

    def __init__(self) -> None:
        self.next_ns = NEVER
        self._heap: list[_Entry] = []
        self._entries: dict[InferenceRequest, _Entry] = {}

    def add(self, request: InferenceRequest, time_ns: int) -> None:
        """Adds a request."""
        entry = self._entries[request] = _Entry(time_ns, request)
        heapq.heappush(self._heap, entry)
        self.next_ns = min(self.next_ns, time_ns)

    def discard(self, request: InferenceRequest) -> None:
        """Discards a request, if it is known."""
        entry = self._entries.pop(request, None)
        if entry is None:
            return
        # The entry stays in the heap, but must not keep the request's tensors alive.
        entry.request = None
        if len(self._heap) > 2 * len(self._entries) + _LEAST_SWEPT:
            self._heap = [entry for entry in self._heap if entry.request is not None]
            heapq.heapify(self._heap)

    def take(self, now_ns: int) -> list[InferenceRequest]:
        """Takes out the expired requests, earliest first."""
        taken: list[InferenceRequest] = []
        heap = self._heap
        while heap and (heap[0].request is None or heap[0].time_ns <= now_ns):
            request = heapq.heappop(heap).request
            if request is not None:
                del self._entries[request]
                taken.append(request)
        self.next_ns = heap[0].time_ns if heap else NEVER
        return taken
