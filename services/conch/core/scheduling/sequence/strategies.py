"""Strategies by which an instance batches its sequences.

Direct: a live sequence owns one row of the batches. Oldest: the first requests of the sequences are batched
dynamically.
"""

from __future__ import annotations

import heapq
from math import ceil

from conch.core.request import InferenceRequest
from conch.core.scheduling.dynamic import DynamicBatcher
from conch.core.scheduling.queue import NEVER
from conch.core.scheduling.scheduler import Batch, Decision
from conch.core.scheduling.sequence.controls import Controls, FillerRequest, empty_inputs
from conch.core.scheduling.sequence.table import LiveSequence, Seats
from conch.core.spec import SequenceBatching


class DirectSeats(Seats):
    """The rows of one instance.

    A batch has the ready requests of all rows, or, if their shapes differ, those that fit the oldest. Fillers
    take the other rows before the last one.

    Args:
        number: The instance's number.
        max_batch_size: Rows of a batch; 0 and 1 both mean one.
        settings: The model's settings.
        controls: Its control inputs.
    """

    def __init__(
        self, number: int, max_batch_size: int, settings: SequenceBatching, controls: Controls
    ) -> None:
        rows = max(max_batch_size, 1)
        super().__init__(number, rows)
        self._controls = controls
        self._free_rows = list(range(rows))  # a heap: low rows keep batches short
        self._ready: dict[int, InferenceRequest] = {}
        self._oldest_ns = NEVER
        self._delay_ns = settings.max_queue_delay_ns if settings.min_slot_utilization else 0
        self._enough = ceil(settings.min_slot_utilization * rows - 1e-6)

    def take(self, sequence: LiveSequence) -> None:
        """Gives the first free row to a sequence."""
        super().take(sequence)
        sequence.slot = heapq.heappop(self._free_rows)

    def leave(self, sequence: LiveSequence) -> None:
        """Frees the row of a sequence with nothing ready."""
        super().leave(sequence)
        heapq.heappush(self._free_rows, sequence.slot)

    def ready(self, request: InferenceRequest) -> None:
        """Makes the first request of a sequence ready."""
        sequence = request.sequence
        assert isinstance(sequence, LiveSequence)
        self._ready[sequence.slot] = request
        self._oldest_ns = min(self._oldest_ns, request.queued_ns)

    def withdraw(self, request: InferenceRequest) -> None:
        """Takes a ready request back."""
        sequence = request.sequence
        assert isinstance(sequence, LiveSequence)
        del self._ready[sequence.slot]
        if request.queued_ns == self._oldest_ns:
            self._find_oldest()

    def due_ns(self, now_ns: int) -> int | None:
        """At once if enough rows are ready, else when the oldest request has waited for the delay."""
        ready = self._ready
        if not ready:
            return None
        if not self._delay_ns or len(ready) >= self._enough:
            return self._oldest_ns
        return self._oldest_ns + self._delay_ns

    def next_batch(self, now_ns: int) -> Batch:
        """The ready requests, by row; `fill` adds fillers once inputs are known."""
        ready = self._ready
        if len(ready) == 1:
            requests = list(ready.values())
            ready.clear()
            self._oldest_ns = NEVER
            return Batch(requests, 1)
        key = min(ready.values(), key=_queued_ns).batch_key
        rows = [row for row in sorted(ready) if ready[row].batch_key == key]
        requests = [ready.pop(row) for row in rows]
        self._find_oldest()
        return Batch(requests, len(requests))

    def fill(self, batch: Batch) -> None:
        """Adds fillers in the rows between the requests."""
        requests = batch.requests
        last = requests[-1].sequence
        assert isinstance(last, LiveSequence)
        missing = last.slot + 1 - len(requests)
        if not missing:
            return
        like = requests[-1]
        inputs = empty_inputs(like.inputs, self._controls)
        rows: list[InferenceRequest] = []
        for request in requests:
            sequence = request.sequence
            assert isinstance(sequence, LiveSequence)
            while len(rows) < sequence.slot:
                # A dict for each: the executor may put reshaped tensors into it.
                rows.append(FillerRequest(like, dict(inputs)))
            rows.append(request)
        batch.requests = rows
        batch.size = len(rows)
        batch.fillers = missing

    def _find_oldest(self) -> None:
        self._oldest_ns = min(map(_queued_ns, self._ready.values()), default=NEVER)


def _queued_ns(request: InferenceRequest) -> int:
    return request.queued_ns


class OldestSeats(Seats):
    """The candidates of one instance, whose ready requests queue in a dynamic batcher.

    They are queued in the order in which they became ready, so a sequence with many requests goes behind the
    others after each of them. An instance runs one batch at a time, so responses keep that order.

    Args:
        number: The instance's number.
        max_batch_size: Limit of requests in a batch; 0 and 1 both mean one.
        settings: The model's settings.
    """

    def __init__(self, number: int, max_batch_size: int, settings: SequenceBatching) -> None:
        super().__init__(number, settings.max_candidates)
        self._heads = DynamicBatcher(max_batch_size, settings.preferred_sizes, settings.max_queue_delay_ns)

    def ready(self, request: InferenceRequest) -> None:
        """Makes the first request of a sequence ready."""
        # Its queue time counts from when it came, not from when it is ready.
        self._heads.submit(request, request.queued_ns)

    def withdraw(self, request: InferenceRequest) -> None:
        """Takes a ready request back."""
        self._heads.cancel(request)

    def due_ns(self, now_ns: int) -> int | None:
        """Time at which the forming batch is to run; None with nothing ready."""
        return self._heads.due_ns(now_ns)

    def next_batch(self, now_ns: int) -> Decision:
        """The forming batch."""
        return self._heads.next_batch(now_ns)
