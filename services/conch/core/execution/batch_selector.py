"""Selects the next batch of a runner and the instance that runs it, where not any idle one may.

    =====================  =================  =======================================================
    instances              selector           selection
    =====================  =================  =======================================================
    block, need nothing    none               the scheduler's next batch, on the instance idle last
    may be unavailable     `BatchSelector`    only an instance that is available when it is selected
    need resources         `LimitedSelector`  only an instance that holds its grant
    named by the batches   `NamedSelector`    the batch that has been due longest, of those that may
    =====================  =================  =======================================================

Locks: all calls hold the runner's.
"""

from __future__ import annotations

from collections.abc import Sequence

from conch.core.backend import BackendInstance
from conch.core.execution.instance_set import InstanceSet
from conch.core.execution.resource_limits import ResourceLimits
from conch.core.scheduling.scheduler import IDLE, Batch, Decision, Scheduler, WaitUntil


def selector_for(
    scheduler: Scheduler, instances: InstanceSet, named: bool, limits: ResourceLimits | None
) -> BatchSelector | None:
    """The selector for instances; `named` tells whether batches name theirs."""
    if named:
        return NamedSelector(scheduler, instances, limits)
    if limits is not None:
        return LimitedSelector(scheduler, instances, limits)
    return None if instances.blocks else BatchSelector(scheduler, instances)


class BatchSelector:
    """Selects for instances that may be unavailable."""

    __slots__ = ("_idle", "_instances", "_scheduler")

    def __init__(self, scheduler: Scheduler, instances: InstanceSet) -> None:
        self._scheduler = scheduler
        self._instances = instances
        self._idle = instances.idle

    def next_batch(self, now_ns: int) -> Decision:
        """Decides for the idle instances; a batch has its instance, which is busy then.

        Called while an instance is idle and a request is queued.
        """
        for one in self._idle[::-1]:
            if self._instances.is_available(one):
                decision = self._scheduler.next_batch(now_ns)
                if type(decision) is Batch:
                    decision.runs_on = one
                    self._instances.take(one)
                return decision
        return IDLE

    def due_ns(self, now_ns: int) -> int | None:
        """Time at which an idle instance that waits for no resources has a batch; None for no such batch."""
        if not self._idle:
            return None
        if self._scheduler.eager:
            return now_ns if self._scheduler.pending else None
        return self._scheduler.due_ns(now_ns)

    def needed(self, now_ns: int) -> Sequence[BackendInstance]:
        """The idle instances for which a batch is due, whether they hold their resources or not."""
        due_ns = self._scheduler.due_ns(now_ns)
        return self._idle if due_ns is not None and due_ns <= now_ns else ()

    def has_use_for(self, instance: BackendInstance, now_ns: int) -> bool:
        """True if an instance that has become idle is available, and a batch that it may run is due."""
        return self._instances.is_available(instance) and instance in self.needed(now_ns)


class LimitedSelector(BatchSelector):
    """Selects for instances that may be unavailable and need resources."""

    __slots__ = ("_limits",)

    def __init__(self, scheduler: Scheduler, instances: InstanceSet, limits: ResourceLimits | None) -> None:
        super().__init__(scheduler, instances)
        self._limits = limits

    def next_batch(self, now_ns: int) -> Decision:
        """Decides as the scheduler does, once an instance holds its grant."""
        due_ns = self._scheduler.due_ns(now_ns)
        if due_ns is None:
            return IDLE
        if due_ns > now_ns:
            return WaitUntil(due_ns)
        instance = self._usable(self._idle[::-1])
        if instance is None:
            return IDLE
        return self._taken(self._scheduler.next_batch(now_ns), instance)

    def due_ns(self, now_ns: int) -> int | None:
        """As the scheduler says, unless all idle instances wait for grants."""
        limits = self._limits
        if not self._idle or (limits is not None and not any(map(limits.may_run, self._idle))):
            return None
        return self._scheduler.due_ns(now_ns)

    def _taken(self, decision: Decision, instance: BackendInstance) -> Decision:
        if type(decision) is Batch:
            decision.runs_on = instance
            self._instances.take(instance)
            if self._limits is not None:
                self._limits.take(instance)
        return decision

    def _usable(self, candidates: Sequence[BackendInstance]) -> BackendInstance | None:
        """The first of several idle instances that is available and holds what it needs."""
        available = self._instances.is_available
        limits = self._limits
        if limits is None:
            for one in candidates:
                if available(one):
                    return one
            return None
        # One that asks for resources would keep them, once granted, from available ones: it is checked when
        # its batch is finished.
        return limits.choose([one for one in candidates if limits.needs_grant(one) or available(one)])


class NamedSelector(LimitedSelector):
    """Selects for batches that name their instance, which may need resources too."""

    __slots__ = ()

    def next_batch(self, now_ns: int) -> Decision:
        """Decides for the instance whose batch has been due longest, of those that may run."""
        while True:
            dues = self._dues(now_ns)
            ready = sorted((one for one, (due, _) in dues.items() if due <= now_ns), key=dues.__getitem__)
            instance = self._usable(ready) if ready else None
            if instance is None:
                later = min((due for due, _ in dues.values() if due > now_ns), default=None)
                return IDLE if later is None else WaitUntil(later)
            decision = self._scheduler.next_batch_of(dues[instance][1], now_ns)
            if decision is not IDLE:
                return self._taken(decision, instance)
            # All requests of that batch were completed meanwhile.

    def due_ns(self, now_ns: int) -> int | None:
        """The earliest time of an instance that waits for no grant."""
        limits = self._limits
        dues = self._dues(now_ns).items()
        return min((due for one, (due, _) in dues if limits is None or limits.may_run(one)), default=None)

    def needed(self, now_ns: int) -> Sequence[BackendInstance]:
        """The idle instances whose own batch is due."""
        return [one for one, (due, _) in self._dues(now_ns).items() if due <= now_ns]

    def _dues(self, now_ns: int) -> dict[BackendInstance, tuple[int, int]]:
        """Time at which each idle instance has a batch, with the instance's number."""
        dues = self._scheduler.instance_dues(now_ns)
        pairs = [(self._instances.by_number.get(number), (due, number)) for number, due in dues.items()]
        return {one: due for one, due in pairs if one is not None and one in self._idle}
