"""Runners whose instances need resources that they share with instances of other models.

An instance takes a batch only while its resource grant is held (states: `scheduling.resource_scheduler`):

    ========  ============================================  =======================================
    grant     event                                         effect
    ========  ============================================  =======================================
    resting   a batch is due                                all idle instances ask until one holds
    waiting   granted: `on_granted`                         held; a thread of the model is woken
    waiting   nothing is due any more                       resting
    held      its batch runs and ends                       resting, or asks again if more is due
    held      nothing is due any more                       resting; others may be granted
    ========  ============================================  =======================================

Requests stay queued until a grant is held: there they can be cancelled, expire, and be joined by others. If
batches name their instance, only instances with a batch of their own ask.

Locks: the limiter is asked with the runner's lock held, but notifies other models only without it (see
`RateLimiter`). `_to_notify` keeps what is to be notified until the lock is released. Used by:
`model_version`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from conch.core.backend import BackendInstance
from conch.core.clock import Clock
from conch.core.execution.async_runner import AsyncRunner
from conch.core.execution.executor import Executor
from conch.core.execution.pending_batch import PendingBatch
from conch.core.execution.rate_limiter import RateLimiter
from conch.core.execution.response_order import ResponseOrder
from conch.core.execution.runner import Runner
from conch.core.scheduling.resource_scheduler import GrantState, ResourceGrant
from conch.core.scheduling.scheduler import IDLE, Batch, Decision, Scheduler, WaitUntil


class ResourceLimitedRunner(Runner):
    """See `Runner`.

    Args:
        name: Name of the model, for its threads.
        scheduler: The queue.
        instances: The model's instances, all idle.
        executor: Runs a batch on an instance.
        clock: Monotonic time in nanoseconds.
        limiter: Grants resources.
        grants: The grant of each instance that needs resources, registered with the limiter; read also for
            instances added later.
        named: Whether the scheduler's batches name their instance.
        order: Keeps responses in order; None if the model does not ask for it.
    """

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        instances: Sequence[BackendInstance],
        executor: Executor,
        clock: Clock,
        limiter: RateLimiter,
        grants: Mapping[BackendInstance, ResourceGrant],
        named: bool = False,
        order: ResponseOrder | None = None,
    ) -> None:
        super().__init__(name, scheduler, instances, executor, clock, order)
        self._limiter = limiter
        self._grants = grants
        self._named = named  # then each instance has its own due times
        self._asking: set[ResourceGrant] = set()  # waiting, or held and not used yet
        self._to_notify: list[ResourceGrant] = []
        self._chosen: BackendInstance | None = None
        self._next_batch = self._next_named if named else self._next_limited
        self._execute = self._execute_limited
        self._return = self._return_limited
        self._watch_grants(instances)

    def resize(
        self,
        added: Sequence[BackendInstance],
        surplus: Iterable[tuple[Sequence[BackendInstance], int]],
    ) -> list[BackendInstance]:
        """See `Runner.resize`."""
        self._watch_grants(added)
        removed = super().resize(added, surplus)
        with self._lock:
            grants = self._asking.intersection(self._grants[one] for one in removed if one in self._grants)
            self._asking -= grants
            self._to_notify += self._limiter.give_back(grants)
        self._notify_granted()
        return removed

    def _watch_grants(self, instances: Iterable[BackendInstance]) -> None:
        for instance in instances:
            if instance in self._grants:
                self._grants[instance].on_granted = self._on_granted

    def _on_granted(self) -> None:
        """Uses a waiting grant that is held now; called by the thread that freed the resources."""
        with self._lock:
            self._wake_if_due(self._clock())
        self._after_removal()

    def _run(self, instance: BackendInstance, batch: Batch, end: int | None) -> bool:
        try:
            return super()._run(instance, batch, end)
        finally:
            self._notify_granted()

    def _execute_limited(self, instance: BackendInstance, batch: Batch) -> None:
        self._before_batch()
        self._executor.run(instance, batch)

    def _before_batch(self) -> None:
        """Called before a batch runs, without the lock."""
        if self._to_notify:
            self._notify_granted()
        if self._asking:
            self._after_removal()  # this batch may be all that others were asking for

    def _return_limited(self, instance: BackendInstance) -> None:
        """Releases resources after a batch, and asks again if more is due."""
        self._return_or_retire(instance)
        grant = self._grants.get(instance)
        if grant is None:
            return
        again = instance in self._idle and self._has_use_for(instance)
        granted = self._limiter.release(grant, again)
        if again:
            self._asking.add(grant)
        self._to_notify += [other for other in granted if other is not grant]

    def _choose_return(self) -> None:
        """Nothing to choose: one way serves both cases."""

    def _has_use_for(self, instance: BackendInstance) -> bool:
        now = self._clock()
        return instance in self._due_now(now) if self._named else self._is_due(now)

    def _due_now(self, now: int) -> dict[BackendInstance, int]:
        """The numbers of idle instances whose own batch is due, the oldest one first."""
        dues = self._scheduler.instance_dues(now)
        numbers = sorted((number for number, due in dues.items() if due <= now), key=dues.__getitem__)
        return {self._by_number[number]: number for number in numbers}

    def _next_limited(self, now: int) -> Decision:
        due = self._scheduler.due_ns(now)
        if due is None:
            return IDLE
        if due > now:
            return WaitUntil(due)
        self._chosen = self._choose_instance(self._idle)
        return IDLE if self._chosen is None else self._scheduler.next_batch(now)

    def _next_named(self, now: int) -> Decision:
        due = self._due_now(now)
        self._chosen = self._choose_instance(due)
        if self._chosen is not None:
            return self._scheduler.next_batch_of(due[self._chosen], now)
        dues = self._scheduler.instance_dues(now).values()
        later = min((each for each in dues if each > now), default=None)
        return IDLE if later is None else WaitUntil(later)

    def _choose_instance(self, candidates: Iterable[BackendInstance]) -> BackendInstance | None:
        """An idle instance that may run now; if there is none, all of them wait."""
        resting: dict[ResourceGrant, BackendInstance] = {}
        for instance in candidates:
            grant = self._grants.get(instance)
            if grant is None or grant.state is GrantState.HELD:
                return instance
            if grant.state is GrantState.RESTING:
                resting[grant] = instance
        if not resting:
            return None
        granted = self._limiter.ask(resting)
        self._asking.update(grant for grant in resting if grant.state is not GrantState.RESTING)
        return None if granted is None else resting[granted]

    def _instance_for(self, batch: Batch) -> BackendInstance:
        chosen = self._chosen
        assert chosen is not None
        if chosen in self._grants:
            self._asking.discard(self._grants[chosen])
        # `super` takes the last idle one, unless the batch names one, which is the same then.
        self._idle.remove(chosen)
        self._idle.append(chosen)
        return super()._instance_for(batch)

    def _wake_if_due(self, now: int) -> None:
        # If all instances wait, a thread would find nothing to do: it is woken by `on_granted`.
        if self._claimed:
            return
        due: int | None = None
        if self._named:
            dues = self._scheduler.instance_dues(now).items()
            due = min((each for number, each in dues if self._may_run(self._by_number[number])), default=None)
        elif any(self._may_run(instance) for instance in self._idle):
            due = self._scheduler.due_ns(now)
        if due is not None and (due <= now or due < self._timed_ns):
            self._wake()

    def _may_run(self, instance: BackendInstance) -> bool:
        grant = self._grants.get(instance)
        return grant is None or grant.state is not GrantState.WAITING

    def _after_removal(self) -> None:
        """Gives back the grants of instances that have nothing to run any more."""
        with self._lock:
            now = self._clock()
            if self._named:
                needed = {self._grants[one] for one in self._due_now(now) if one in self._grants}
            else:
                needed = self._asking if self._is_due(now) else set()
            unneeded = self._asking - needed
            if unneeded:
                self._asking -= unneeded
                self._to_notify += self._limiter.give_back(unneeded)
                self._wake_if_due(now)  # a batch may be due later, and no thread waits for that
        self._notify_granted()

    def _notify_granted(self) -> None:
        with self._lock:
            granted, self._to_notify = self._to_notify, []
        if granted:
            self._limiter.notify(granted)


class AsyncResourceLimitedRunner(AsyncRunner, ResourceLimitedRunner):
    """See `AsyncRunner` and `ResourceLimitedRunner`: resources are held until the batch is finished."""

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        instances: Sequence[BackendInstance],
        executor: Executor,
        clock: Clock,
        limiter: RateLimiter,
        grants: Mapping[BackendInstance, ResourceGrant],
        named: bool = False,
        order: ResponseOrder | None = None,
    ) -> None:
        ResourceLimitedRunner.__init__(
            self, name, scheduler, instances, executor, clock, limiter, grants, named, order
        )
        self._init_async(self._next_batch)

    def _run(self, instance: BackendInstance, batch: Batch, end: int | None, may_wait: bool = False) -> bool:
        try:
            return super()._run(instance, batch, end, may_wait)
        finally:
            self._notify_granted()

    def _start(self, instance: BackendInstance, batch: Batch, awaitable: bool) -> PendingBatch:
        self._before_batch()
        return super()._start(instance, batch, awaitable)

    def _finish(self, pending: PendingBatch) -> None:
        try:
            super()._finish(pending)
        finally:
            self._notify_granted()

    def _add_finished(self, instance: BackendInstance) -> None:
        # `_find_unavailable` does not check it while it holds resources.
        if self._is_available(instance):
            self._idle.append(instance)

    def _may_be_unavailable(self, instance: BackendInstance) -> bool:
        # An instance that asks for resources would keep them, once granted, from available ones. It is
        # checked when its batch is finished.
        grant = self._grants.get(instance)
        return grant is None or grant.state is GrantState.RESTING

    def _due_now(self, now: int) -> dict[BackendInstance, int]:
        return {one: number for one, number in super()._due_now(now).items() if one in self._idle}
