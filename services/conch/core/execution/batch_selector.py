"""Selects the next batch of a runner, and the instance that runs it.

    =====================  =======================================================
    instances              selection
    =====================  =======================================================
    block, need nothing    the scheduler's next batch, on the instance idle last
    may be unavailable     only an instance that is available when it is selected
    need resources         only an instance that holds its grant
    named by the batches   the batch that has been due longest, of those that may
    =====================  =======================================================

Owns: the instances by state. Locks: all calls hold the runner's. Used by: `Runner`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from conch.core.backend import BackendInstance
from conch.core.execution.instance_set import InstanceSet
from conch.core.execution.resource_limits import ResourceLimits
from conch.core.scheduling.scheduler import IDLE, Batch, Decision, Scheduler, WaitUntil


class BatchSelector:
    """See the module.

    Args:
        scheduler: The queue.
        instances: The instances.
        named: Whether batches name their instance.
        limits: The resources of the instances; None if they need none.
        always_available: Whether no instance is ever unavailable.

    Attributes:
        next_batch: Decides for the idle instances at a monotonic time; a batch has its instance, which is
            busy then. Called while an instance is idle and a request is queued.
    """

    __slots__ = ("_eager", "_idle", "_instances", "_limits", "_named", "_scheduler", "next_batch")

    def __init__(
        self,
        scheduler: Scheduler,
        instances: InstanceSet,
        named: bool,
        limits: ResourceLimits | None,
        always_available: bool,
    ) -> None:
        self._scheduler = scheduler
        self._instances = instances
        self._idle = instances.idle
        self._named = named
        self._limits = limits
        self._eager = scheduler.eager and not named and limits is None
        self.next_batch: Callable[[int], Decision] = self._next_of_any
        if named:
            self.next_batch = self._next_of_named
        elif limits is not None:
            self.next_batch = self._next_of_limited
        elif not always_available:
            self.next_batch = self._next_of_available

    def _next_of_any(self, now_ns: int) -> Decision:
        """As `next_batch`, if every idle instance may run it."""
        decision = self._scheduler.next_batch(now_ns)
        if type(decision) is Batch:
            decision.runs_on = self._idle.pop()
        return decision

    def _next_of_available(self, now_ns: int) -> Decision:
        """As `next_batch`, for instances that may be unavailable."""
        for one in self._idle[::-1]:
            if self._instances.is_available(one):
                decision = self._scheduler.next_batch(now_ns)
                if type(decision) is Batch:
                    decision.runs_on = one
                    self._idle.remove(one)
                return decision
        return IDLE

    def _next_of_limited(self, now_ns: int) -> Decision:
        """As `next_batch`, for instances that may be unavailable and need resources."""
        due_ns = self._scheduler.due_ns(now_ns)
        if due_ns is None:
            return IDLE
        if due_ns > now_ns:
            return WaitUntil(due_ns)
        instance = self._usable(self._idle[::-1])
        if instance is None:
            return IDLE
        return self._taken(self._scheduler.next_batch(now_ns), instance)

    def _next_of_named(self, now_ns: int) -> Decision:
        """As `next_batch`, if batches name their instance."""
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

    def _taken(self, decision: Decision, instance: BackendInstance) -> Decision:
        if type(decision) is Batch:
            decision.runs_on = instance
            self._idle.remove(instance)
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
        return limits.choose([one for one in candidates if limits.asks(one) or available(one)])

    def _dues(self, now_ns: int) -> dict[BackendInstance, tuple[int, int]]:
        """When each idle instance has a batch, and its number, if batches name their instance."""
        dues = self._scheduler.instance_dues(now_ns)
        pairs = [(self._instances.by_number.get(number), (due, number)) for number, due in dues.items()]
        return {one: due for one, due in pairs if one is not None and one in self._idle}

    def has_use_for(self, instance: BackendInstance, now_ns: int) -> bool:
        """Whether an instance that has become idle is available, and may run a batch that is due."""
        return self._instances.is_available(instance) and instance in self._needed(now_ns)

    def due_ns(self, now_ns: int) -> int | None:
        """When an idle instance that waits for no resources has a batch; None for never."""
        if self._eager:
            return now_ns if self._idle and self._scheduler.pending else None
        limits = self._limits
        if self._named:
            dues = self._dues(now_ns).items()
            return min((due for one, (due, _) in dues if limits is None or limits.may_run(one)), default=None)
        if not self._idle or (limits is not None and not any(map(limits.may_run, self._idle))):
            return None
        return self._scheduler.due_ns(now_ns)

    def is_due(self, now_ns: int) -> bool:
        """Whether an idle instance that waits for no resources has a batch now."""
        due = self.due_ns(now_ns)
        return due is not None and due <= now_ns

    def give_back_unneeded(self, now_ns: int) -> bool:
        """Gives back resources of instances that have nothing to run any more; whether there were any."""
        return self._limits is not None and self._limits.give_back(self._needed(now_ns))

    def _needed(self, now_ns: int) -> Sequence[BackendInstance]:
        """The idle instances for which a batch is due, whether they hold their resources or not."""
        if self._named:
            return [one for one, (due, _) in self._dues(now_ns).items() if due <= now_ns]
        due_ns = self._scheduler.due_ns(now_ns)
        return self._idle if due_ns is not None and due_ns <= now_ns else ()
