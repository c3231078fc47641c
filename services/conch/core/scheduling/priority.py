"""Dynamic batchers with priority levels and queue policies, and with an element budget for padded inputs."""

from __future__ import annotations

from collections.abc import Iterable

from conch.core.batch_key import PaddedKey
from conch.core.request import InferenceRequest, RequestState
from conch.core.scheduling.dynamic import DynamicBatcher
from conch.core.scheduling.queue import PriorityQueue, queue_full
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import QueuePolicy


class PriorityBatcher(DynamicBatcher):
    """A dynamic batcher whose requests wait in a `PriorityQueue`.

    A class of its own, so that models without policies, the most, pay nothing for them.

    Args:
        max_batch_size: Largest number of rows in one execution; 0 runs requests alone.
        preferred_sizes: Sizes sent as soon as they are reached; empty for the maximum alone.
        max_queue_delay_ns: Longest wait of the oldest request for others, in nanoseconds.
        max_queue_size: Limit of queued requests on all levels; 0 for none.
        policies: The policy of each level, highest first.
        default_level: Level of requests without one, counted from 1.
    """

    def __init__(
        self,
        max_batch_size: int,
        preferred_sizes: tuple[int, ...] = (),
        max_queue_delay_ns: int = 0,
        max_queue_size: int = 0,
        policies: tuple[QueuePolicy, ...] = (QueuePolicy(),),
        default_level: int = 1,
    ) -> None:
        self._levels = PriorityQueue(policies, default_level)
        super().__init__(max_batch_size, preferred_sizes, max_queue_delay_ns, max_queue_size, self._levels)
        self._tracks = True

    def submit(self, request: InferenceRequest, now_ns: int) -> None:
        """Queues a request on its level.

        Raises:
            UnavailableError: Its level is full.
            ResourceExhaustedError: The whole queue is full.
        """
        levels = self._levels
        policy = levels.admit(request)
        if self.pending >= self._bound:
            levels.leave(request)
            raise queue_full(request, self._bound)
        timeout_ns = policy.timeout_for(request.timeout_us)
        ends = [] if request.deadline_ns is None else [request.deadline_ns]
        if timeout_ns:
            ends.append(now_ns + timeout_ns)
        if self._forming:
            # The last request examined: the head, if that closed the batch.
            last = levels[0] if len(levels) else self._forming[-1]
            if levels.precedes(request, last):
                self._reform()
        request.queued_ns = now_ns
        request.state = RequestState.QUEUED
        levels.append(request)
        self.pending += 1
        if ends:
            self._expiries.add(request, min(ends))

    def expired(self, now_ns: int) -> list[InferenceRequest]:
        """Takes out expired requests, and moves back those that their policy delays."""
        taken: list[InferenceRequest] = []
        for request in self._expiries.take(now_ns):
            deadline_ns = request.deadline_ns
            if self._levels.delays(request) and (deadline_ns is None or now_ns < deadline_ns):
                self._reform()
                self._levels.delay(request)
                if deadline_ns is not None:
                    self._expiries.add(request, deadline_ns)
            else:
                self.cancel(request)
                taken.append(request)
        return taken

    def _grow(self) -> None:
        super()._grow()
        # Any of them may be the oldest.
        self._oldest_ns = min(request.queued_ns for request in self._forming)

    def _departed(self, requests: Iterable[InferenceRequest]) -> None:
        super()._departed(requests)
        for request in requests:
            self._levels.leave(request)

    def _sweep(self) -> None:
        """Nothing to do: a `PriorityQueue` has no empty places."""


_QUEUED = RequestState.QUEUED


class BudgetBatcher(DynamicBatcher):
    """A dynamic batcher whose largest batch size depends on the requests' batch key.

    All requests of a batch have the same key, so the first one determines the size. A batch of that size is
    full, and does not wait for a larger preferred size.
    """

    _limits: tuple[int, int] | None = None

    def _whole_queue(self) -> Batch | None:
        # The key limits how many fit.
        return super()._whole_queue() if self.pending == 1 else None

    def _grow(self) -> None:
        if self._limits is None:
            self._limits = (self._max, self._largest_preferred)
        queue = self._queue
        if not self._forming:
            while queue and queue[0].state is not _QUEUED:
                queue.popleft()
        head = self._forming[0] if self._forming else queue[0]
        key = head.batch_key
        assert isinstance(key, PaddedKey), "given by the validation of a model with a budget"
        most, preferred = self._limits
        self._max = min(most, key.most_rows)
        self._largest_preferred = min(preferred, self._max)
        super()._grow()


class BudgetPriorityBatcher(BudgetBatcher, PriorityBatcher):
    """The same with priority levels and queue policies."""
