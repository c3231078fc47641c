"""Batchers for padded inputs: the longer the rows, the fewer rows in a batch. Used by: `model_version`."""

from __future__ import annotations

from conch.core.batch_key import PaddedKey
from conch.core.request import RequestState
from conch.core.scheduling.dynamic import DynamicBatcher
from conch.core.scheduling.priority import PriorityBatcher
from conch.core.scheduling.scheduler import Batch

_QUEUED = RequestState.QUEUED


class BudgetBatcher(DynamicBatcher):
    """A dynamic batcher whose largest batch size depends on the requests' batch key.

    All requests of a batch have the same key, so the first one determines the size. A batch of that size is
    full, and does not wait for a larger preferred size.
    """

    _limits: tuple[int, int] | None = None

    def _whole(self) -> Batch | None:
        # The key limits how many fit.
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
