"""Batchers for padded inputs: the longer the rows, the fewer of them make a batch."""

from __future__ import annotations

from conch.core.batch_key import PaddedKey
from conch.core.request import RequestState
from conch.core.scheduling.dynamic import DynamicBatcher
from conch.core.scheduling.priority import PriorityBatcher
from conch.core.scheduling.scheduler import Batch

_QUEUED = RequestState.QUEUED


class BudgetBatcher(DynamicBatcher):
    """A dynamic batcher whose batches have a largest size of their own, told by their requests' keys.

    All requests of a batch have one key, so its largest size is known with its first request. A batch of that
    size is full like one of the maximum size, and does not wait for a preferred size it can't reach.
    """

    _limits: tuple[int, int] | None = None

    def _whole(self) -> Batch | None:
        # How many fit together has to be asked of their key.
        return super()._whole() if self._pending == 1 else None

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
