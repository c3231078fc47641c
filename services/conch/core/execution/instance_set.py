"""The instances of a runner, by what they do.

    ===========  =========================================  ===========
    state        event                                      next state
    ===========  =========================================  ===========
    idle         `available` is false                       unavailable
    idle         a batch is taken                           busy
    busy         the batch is finished                      idle
    busy         `remove`                                   retiring
    retiring     the batch is finished                      removed
    unavailable  the instance is available again            idle
    idle         `remove`                                   removed
    unavailable  `remove`                                   removed
    ===========  =========================================  ===========

Requests that only an unavailable instance may run wait in the queue, where they can be cancelled and expire.

`RunningBatches` are the batches of the busy and the retiring ones.

Locks: the runner's; instances call `on_available` from any thread. Used by: `Runner`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from conch.core.backend import BackendInstance
from conch.core.scheduling.scheduler import Batch

log = logging.getLogger(__name__)


class RunningBatches(set[Batch]):
    """The batches that instances run, and how long earlier ones took.

    Attributes:
        past_ns: Time that instances have run the batches that are finished, in nanoseconds.
    """

    past_ns = 0

    @property
    def requests(self) -> int:
        """Number of requests in them."""
        return sum(len(batch.requests) - batch.fillers for batch in self)

    def busy_ns(self, now: int) -> int:
        """Time that instances have run batches until now, in nanoseconds."""
        return self.past_ns + sum(now - batch.compute_start_ns for batch in self)


class InstanceSet:
    """See the module.

    Args:
        instances: The instances, all idle.
        on_available: Called from any thread, without the lock, with an instance that is available again and
            the token that `restore` needs.

    Attributes:
        count: Number of instances that are not removed.
        idle: The idle instances; the last one runs next.
        by_number: Instances by the numbers that batches may name.
        retiring: Busy instances that are removed with their batch.
    """

    __slots__ = ("_next_number", "_on_available", "_unavailable", "by_number", "count", "idle", "retiring")

    def __init__(
        self, instances: Sequence[BackendInstance], on_available: Callable[[BackendInstance, object], None]
    ) -> None:
        self._on_available = on_available
        self._unavailable: dict[BackendInstance, object] = {}
        self.count = self._next_number = len(instances)
        self.idle = list(instances)
        self.by_number = dict(enumerate(instances))
        self.retiring: list[BackendInstance] = []

    @property
    def all_rest(self) -> bool:
        """Whether no instance runs a batch."""
        return len(self.idle) + len(self._unavailable) == self.count

    def give_back(self, instance: BackendInstance) -> bool:
        """Makes an instance idle after its batch; False if it is removed instead."""
        if self.retiring and instance in self.retiring:
            self.retiring.remove(instance)
            self.count -= 1
            return False
        self.idle.append(instance)
        return True

    def is_available(self, instance: BackendInstance) -> bool:
        """Whether an idle instance can take a batch; if not, it becomes unavailable."""
        if instance.blocks:
            return True
        token = object()
        try:
            if instance.available(partial(self._on_available, instance, token)):
                return True
        except Exception:
            log.exception("an instance can not say whether it is available")
            return True  # its batches complete with whatever error it raises
        self.idle.remove(instance)
        self._unavailable[instance] = token
        return False

    def restore(self, instance: BackendInstance, token: object) -> bool:
        """Makes an available instance idle; False if it was removed, or is restored already."""
        if self._unavailable.get(instance) is not token:
            return False
        del self._unavailable[instance]
        self.idle.append(instance)
        return True

    def add(self, instances: Sequence[BackendInstance]) -> None:
        """Adds new instances."""
        self.idle += instances
        self.count += len(instances)
        self.by_number |= enumerate(instances, self._next_number)
        self._next_number += len(instances)

    def remove(self, surplus: Iterable[tuple[Sequence[BackendInstance], int]]) -> list[BackendInstance]:
        """Removes some of the candidates, unavailable and idle ones first, later ones before earlier.

        Returns the removed instances; busy ones become retiring.
        """
        for instance in self.idle[:]:
            self.is_available(instance)
        removed: list[BackendInstance] = []
        for candidates, count in surplus:
            removed += sorted(reversed(candidates), key=self._rank)[:count]
        for instance in removed:
            if self._rank(instance) > 0:
                self.retiring.append(instance)
                continue
            self.count -= 1
            if self._unavailable.pop(instance, None) is None:
                self.idle.remove(instance)
        self.by_number = {number: one for number, one in self.by_number.items() if one not in removed}
        return removed

    def _rank(self, instance: BackendInstance) -> int:
        return -1 if instance in self._unavailable else instance not in self.idle
