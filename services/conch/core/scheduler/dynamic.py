"""The dynamic batcher: merges waiting requests into batches, as Triton's does.

Rules: a batch never exceeds the maximum size and never splits a request; requests keep their order, so a
request that does not fit, or whose shapes differ, closes the batch before it. Without a queue delay
whatever waits is sent as soon as an instance asks. With one, the largest preferred size that has been
reached is sent at once, and anything else when the oldest request has waited for the delay.
"""

from __future__ import annotations

from collections import deque

from conch.core.request import InferenceRequest, RequestState
from conch.core.scheduler.base import IDLE, Batch, Decision, WaitUntil

# Members of an enumeration are slow to look up on the way of every request.
_NEW, _QUEUED, _RUNNING = RequestState.NEW, RequestState.QUEUED, RequestState.RUNNING


class DynamicBatcher:
    """Queue of a model with dynamic batching.

    The batch being formed is kept between calls, so each request is examined once however often
    instances ask while a delay runs.

    Args:
        max_batch_size: Largest number of rows in one execution; 0 runs requests alone.
        preferred_sizes: Sizes sent as soon as they are reached; empty for the maximum alone.
        max_queue_delay_ns: How long the oldest request may wait for company, in nanoseconds.
    """

    def __init__(
        self, max_batch_size: int, preferred_sizes: tuple[int, ...] = (), max_queue_delay_ns: int = 0
    ) -> None:
        # Without batching every request is a full batch of its own.
        self._max = max(max_batch_size, 1)
        self._preferred = frozenset(preferred_sizes or (self._max,))
        self._largest_preferred = max(self._preferred)
        self._delay_ns = max_queue_delay_ns
        self._queue: deque[InferenceRequest] = deque()
        self._pending = 0
        self._forming: list[InferenceRequest] = []
        self._forming_size = 0
        self._closed = False
        self._best_count = 0
        self._best_size = 0

    @property
    def pending(self) -> int:
        """Number of requests queued, those of the batch being formed included."""
        return self._pending

    def submit(self, request: InferenceRequest, now_ns: int) -> None:
        """Queues a request."""
        request.queued_ns = now_ns
        request.state = _QUEUED
        self._queue.append(request)
        self._pending += 1

    def due_ns(self, now_ns: int) -> int | None:
        """When the batch being formed is sent, as things stand."""
        if not self._pending:
            return None
        self._grow()
        due_ns = self._forming[0].queued_ns + self._delay_ns
        if self._best_count or self._closed or self._forming_size >= self._largest_preferred:
            return min(due_ns, now_ns)
        return due_ns

    def next_batch(self, now_ns: int) -> Decision:
        """The batch to run now, or the time at which the one being formed is due."""
        if self._pending == 1 and not self._delay_ns and not self._forming:
            return self._take_only()
        due_ns = self.due_ns(now_ns)
        if due_ns is None:
            self._queue.clear()
            return IDLE
        if due_ns > now_ns:
            return WaitUntil(due_ns)
        if self._best_count and (not self._delay_ns or now_ns < self._forming[0].queued_ns + self._delay_ns):
            return self._take(self._best_count, self._best_size)
        return self._take(len(self._forming), self._forming_size)

    def complete(self, batch: Batch, now_ns: int) -> None:
        """Nothing to do: executions do not affect the queue."""

    def cancel(self, request: InferenceRequest) -> bool:
        """Takes a queued request out, also from the batch being formed."""
        if request.state is not _QUEUED:
            return False
        request.state = _NEW
        self._pending -= 1
        if self._closed or request in self._forming:
            # What is being formed never holds a cancelled request, and is not closed by one either.
            self._reform()
        return True

    def _grow(self) -> None:
        """Moves waiting requests into the batch being formed until one does not fit."""
        queue = self._queue
        forming = self._forming
        size = self._forming_size
        while queue and not self._closed:
            request = queue[0]
            if request.state is not _QUEUED:
                queue.popleft()
                continue
            grown = size + request.batch_size
            if forming:
                if grown > self._largest_preferred and not self._best_count:
                    # It can't reach a preferred size any more; remember where it was largest below one.
                    self._best_count, self._best_size = len(forming), size
                if grown > self._max or request.batch_key != forming[0].batch_key:
                    self._closed = True
                    break
            forming.append(request)
            queue.popleft()
            size = grown
            if size in self._preferred:
                self._best_count, self._best_size = len(forming), size
        self._forming_size = size

    def _take_only(self) -> Batch:
        """The one request that waits; nothing can join it, so nothing needs to be weighed."""
        request = self._queue.popleft()
        while request.state is not _QUEUED:
            request = self._queue.popleft()
        request.state = _RUNNING
        self._pending = 0
        return Batch([request], request.batch_size)

    def _take(self, count: int, size: int) -> Batch:
        taken = self._forming[:count]
        rest = self._forming[count:]
        self._queue.extendleft(reversed(rest))
        self._drop_forming()
        for request in taken:
            request.state = _RUNNING
        self._pending -= count
        return Batch(taken, size)

    def _reform(self) -> None:
        """Starts forming anew, without the requests that were cancelled."""
        self._queue.extendleft(request for request in reversed(self._forming) if request.state is _QUEUED)
        self._drop_forming()

    def _drop_forming(self) -> None:
        self._forming = []
        self._forming_size = 0
        self._closed = False
        self._best_count = self._best_size = 0
