"""The oldest strategy: an instance batches the first requests of its sequences dynamically.

Used by: `batcher`.
"""

from __future__ import annotations

from conch.core.request import InferenceRequest
from conch.core.scheduling.dynamic import DynamicBatcher
from conch.core.scheduling.scheduler import Decision
from conch.core.scheduling.sequence.table import Seats
from conch.core.spec import SequenceBatching


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
        """When the forming batch is to run."""
        return self._heads.due_ns(now_ns)

    def next_batch(self, now_ns: int) -> Decision:
        """The forming batch."""
        return self._heads.next_batch(now_ns)
