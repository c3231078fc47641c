"""The default scheduler: one request per batch, first in, first out."""

from __future__ import annotations

from collections import deque

from conch.core.request import InferenceRequest, RequestState
from conch.core.scheduling.queue import Expiries, bound_of, queue_full
from conch.core.scheduling.scheduler import IDLE, Batch, Decision, Scheduler

# Looked up once: enum members are slow to access.
_NEW, _QUEUED, _RUNNING = RequestState.NEW, RequestState.QUEUED, RequestState.RUNNING

_LEAST_SWEPT = 64


class DefaultScheduler(Scheduler):
    """Queue of a model without batching; a `max_queue_size` of 0 is no limit."""

    __slots__ = (
        "_bound",
        "_expiries",
        "_queue",
        "_tracks",
        "eager",
        "expiries",
        "pending",
    )

    def __init__(self, max_queue_size: int = 0) -> None:
        self._expiries = self.expiries = Expiries()
        self.eager = True
        self._tracks = False  # until the first request with a deadline
        self._bound = bound_of(max_queue_size)
        self._queue: deque[InferenceRequest] = deque()
        self.pending = 0

    def submit(self, request: InferenceRequest, now_ns: int) -> None:
        """Queues a request. Raises ResourceExhaustedError: the queue is full."""
        pending = self.pending
        if pending >= self._bound:
            raise queue_full(request, self._bound)
        request.queued_ns = now_ns
        request.state = _QUEUED
        self._queue.append(request)
        self.pending = pending + 1
        if request.deadline_ns is not None:
            self._tracks = True
            self._expiries.add(request, request.deadline_ns)

    def due_ns(self, now_ns: int) -> int | None:
        """Now, if any request is queued."""
        return now_ns if self.pending else None

    def next_batch(self, now_ns: int) -> Decision:
        """The oldest request, alone."""
        queue = self._queue
        while queue:
            request = queue.popleft()
            if request.state is _QUEUED:
                request.state = _RUNNING
                self.pending -= 1
                if not self.pending:
                    queue.clear()  # of cancelled requests
                if self._tracks:
                    self._expiries.discard(request)
                return Batch([request], request.batch_size)
        return IDLE

    def cancel(self, request: InferenceRequest) -> tuple[InferenceRequest, ...]:
        """Takes a queued request out; its empty place stays until it is at the head, or most are empty."""
        if request.state is not _QUEUED:
            return ()
        request.state = _NEW
        self.pending -= 1
        if self._tracks:
            self._expiries.discard(request)
        if not self.pending:
            self._queue.clear()
        elif len(self._queue) > 2 * self.pending + _LEAST_SWEPT:
            self._queue = deque(request for request in self._queue if request.state is _QUEUED)
        return (request,)

    def expired(self, now_ns: int) -> list[InferenceRequest]:
        """Takes out the requests whose deadline has passed."""
        taken = self._expiries.take(now_ns)
        for request in taken:
            self.cancel(request)
        return taken

    def drain(self) -> list[InferenceRequest]:
        """Takes out everything queued."""
        return [request for request in tuple(self._queue) if self.cancel(request)]
