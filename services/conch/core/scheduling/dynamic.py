"""The dynamic batcher: merges waiting requests into batches, as Triton's does.

Rules: a batch never exceeds the maximum size and never splits a request. Requests keep their order, so a
request that does not fit, or whose shapes differ, closes the batch before it. Without a queue delay, all
queued requests are sent when an instance asks. With one, the largest preferred size reached is sent at once,
and anything else when the oldest request has waited for the delay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from conch.core.compiled import mypyc_attr
from conch.core.request import InferenceRequest, RequestState
from conch.core.scheduling.queue import Expiries, Queue, bound_of, queue_full
from conch.core.scheduling.scheduler import IDLE, Batch, Decision, Scheduler, WaitUntil

# Looked up once: enum members are slow to access.
_NEW, _QUEUED, _RUNNING = RequestState.NEW, RequestState.QUEUED, RequestState.RUNNING

_LEAST_SWEPT = 64


@mypyc_attr(allow_interpreted_subclasses=True)
class DynamicBatcher(Scheduler):
    """Queue of a model with dynamic batching.

    The forming batch is kept between calls, so each request is examined once, however often instances ask.

    Args:
        max_batch_size: Largest number of rows in one execution; 0 runs requests alone.
        preferred_sizes: Sizes sent as soon as they are reached; empty for the maximum alone.
        max_queue_delay_ns: Longest wait of the oldest request for others, in nanoseconds.
        max_queue_size: Limit of queued requests; 0 for none.
        queue: The queue; None for first in, first out.

    Attributes:
        expiries: The queued requests with a deadline.
    """

    __slots__ = (
        "_best_count",
        "_best_size",
        "_bound",
        "_closed",
        "_delay_ns",
        "_expiries",
        "_forming",
        "_forming_size",
        "_largest_preferred",
        "_least_preferred",
        "_max",
        "_oldest_ns",
        "_preferred",
        "_queue",
        "_tracks",
        "eager",
        "expiries",
        "pending",
    )

    def __init__(
        self,
        max_batch_size: int,
        preferred_sizes: tuple[int, ...] = (),
        max_queue_delay_ns: int = 0,
        max_queue_size: int = 0,
        queue: Queue | None = None,
    ) -> None:
        self._expiries = self.expiries = Expiries()
        # Whether departures are tracked: from the first request with a deadline on.
        self._tracks = False
        self._bound = bound_of(max_queue_size)
        # Without batching every request is a full batch of its own.
        self._max = max(max_batch_size, 1)
        self._preferred = frozenset(preferred_sizes or (self._max,))
        self._largest_preferred = max(self._preferred)
        self._least_preferred = min(self._max, *self._preferred)
        self._delay_ns = max_queue_delay_ns
        self.eager = not max_queue_delay_ns
        self._queue: Queue = deque[InferenceRequest]() if queue is None else queue
        self.pending = 0
        self._forming: list[InferenceRequest] = []
        self._forming_size = 0
        self._oldest_ns = 0  # when the first request of the forming batch was queued
        self._closed = False
        self._best_count = 0
        self._best_size = 0

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
        """Time at which the forming batch is sent if no other request comes; None without queued requests."""
        if not self.pending:
            return None
        self._grow()
        due_ns = self._oldest_ns + self._delay_ns
        if self._best_count or self._closed or self._forming_size >= self._largest_preferred:
            return min(due_ns, now_ns)
        return due_ns

    def next_batch(self, now_ns: int) -> Decision:
        """The batch to run now, or the time at which the one being formed is due."""
        if not (self._delay_ns or self._forming):
            batch = self._whole_queue()
            if batch is not None:
                return batch
        due_ns = self.due_ns(now_ns)
        if due_ns is None:
            return IDLE
        if due_ns > now_ns:
            return WaitUntil(due_ns)
        if self._best_count and (not self._delay_ns or now_ns < self._oldest_ns + self._delay_ns):
            return self._take(self._best_count, self._best_size)
        return self._take(len(self._forming), self._forming_size)

    def cancel(self, request: InferenceRequest) -> tuple[InferenceRequest, ...]:
        """Takes a queued request out, also from the forming batch."""
        if request.state is not _QUEUED:
            return ()
        request.state = _NEW
        self.pending -= 1
        if self._closed or request in self._forming:
            # The forming batch never holds, and is not closed by, a cancelled request.
            self._reform()
        if self._tracks:
            self._departed((request,))
        self._sweep()
        return (request,)

    def expired(self, now_ns: int) -> list[InferenceRequest]:
        """Takes out the requests whose deadline has passed."""
        taken = self._expiries.take(now_ns)
        for request in taken:
            self.cancel(request)
        return taken

    def drain(self) -> list[InferenceRequest]:
        """Takes out everything queued."""
        waiting = [request for request in (*self._forming, *self._queue) if request.state is _QUEUED]
        self._drop_forming()
        self._queue.clear()
        for request in waiting:
            request.state = _NEW
        if self._tracks:
            self._departed(waiting)
        self.pending = 0
        return waiting

    def _departed(self, requests: Iterable[InferenceRequest]) -> None:
        """Forgets requests that have left the queue."""
        for request in requests:
            self._expiries.discard(request)

    def _sweep(self) -> None:
        """Drops the places of cancelled requests, which keep tensors alive, once they are the majority."""
        # Nothing else drops them while no instance asks for a batch.
        queue = self._queue
        if not self.pending:
            queue.clear()
        elif len(queue) > 2 * self.pending + _LEAST_SWEPT:
            waiting = [request for request in queue if request.state is _QUEUED]
            queue.clear()
            for request in waiting:
                queue.append(request)

    def _whole_queue(self) -> Batch | None:
        """Fast path for `_grow` and `_take`: all queued requests, if they are one batch; else None.

        Called without a forming batch and without a queue delay.
        """
        queue = self._queue
        pending = self.pending
        if pending == 1:
            # A single request needs no comparison.
            request = queue.popleft()
            while request.state is not _QUEUED:
                request = queue.popleft()
            request.state = _RUNNING
            self.pending = 0
            if queue:
                queue.clear()  # of cancelled requests
            if self._tracks:
                self._departed((request,))
            return Batch([request], request.batch_size)
        # Up to the least preferred size, no part is better than the whole. With as many places as requests,
        # none is cancelled.
        if pending > self._least_preferred or not pending or len(queue) != pending:
            return None
        requests = list(queue)
        key = requests[0].batch_key
        size = 0
        for request in requests:
            size += request.batch_size
            if request.batch_key != key:
                return None
        if size > self._least_preferred:
            return None
        for request in requests:
            request.state = _RUNNING
        queue.clear()
        self.pending = 0
        if self._tracks:
            self._departed(requests)
        return Batch(requests, size)

    def _grow(self) -> None:
        """Moves waiting requests into the forming batch until one does not fit."""
        if self._closed:
            return
        queue = self._queue
        forming = self._forming
        size = self._forming_size
        most, largest, preferred = self._max, self._largest_preferred, self._preferred
        while queue:
            request = queue[0]
            if request.state is not _QUEUED:
                queue.popleft()
                continue
            grown = size + request.batch_size
            if forming:
                if grown > largest and not self._best_count:
                    # No preferred size can be reached any more: remember the largest size below one.
                    self._best_count, self._best_size = len(forming), size
                if grown > most or request.batch_key != forming[0].batch_key:
                    self._closed = True
                    break
            else:
                self._oldest_ns = request.queued_ns
            forming.append(request)
            queue.popleft()
            size = grown
            if size in preferred:
                self._best_count, self._best_size = len(forming), size
        self._forming_size = size

    def _take(self, count: int, size: int) -> Batch:
        taken = self._forming[:count]
        rest = self._forming[count:]
        self._queue.extendleft(reversed(rest))
        self._drop_forming()
        for request in taken:
            request.state = _RUNNING
        self.pending -= count
        if not self.pending:
            self._queue.clear()  # of cancelled requests
        if self._tracks:
            self._departed(taken)
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
