"""The default scheduler: one request per execution, first come, first served."""

from __future__ import annotations

from collections import deque

from conch.core.request import InferenceRequest, RequestState
from conch.core.scheduler.base import IDLE, Batch, Decision

# Members of an enumeration are slow to look up on the way of every request.
_NEW, _QUEUED, _RUNNING = RequestState.NEW, RequestState.QUEUED, RequestState.RUNNING


class DefaultScheduler:
    """Queue of a model without a scheduling choice; requests run alone, as clients sent them."""

    def __init__(self) -> None:
        self._queue: deque[InferenceRequest] = deque()
        self._pending = 0

    @property
    def pending(self) -> int:
        """Number of requests queued."""
        return self._pending

    def submit(self, request: InferenceRequest, now_ns: int) -> None:
        """Queues a request."""
        request.queued_ns = now_ns
        request.state = _QUEUED
        self._queue.append(request)
        self._pending += 1

    def due_ns(self, now_ns: int) -> int | None:
        """Now, as long as anything waits."""
        return now_ns if self._pending else None

    def next_batch(self, now_ns: int) -> Decision:
        """The oldest request, alone."""
        queue = self._queue
        while queue:
            request = queue.popleft()
            if request.state is _QUEUED:
                request.state = _RUNNING
                self._pending -= 1
                return Batch([request], request.batch_size)
        return IDLE

    def complete(self, batch: Batch, now_ns: int) -> None:
        """Nothing to do: executions do not affect the queue."""

    def cancel(self, request: InferenceRequest) -> bool:
        """Takes a queued request out; it stays in the deque as an empty place until it reaches the head."""
        if request.state is not _QUEUED:
            return False
        request.state = _NEW
        self._pending -= 1
        return True
