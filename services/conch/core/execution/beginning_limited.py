"""A runner for instances that begin their batches and need resources that they share with those of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from conch.core.backend import BackendInstance
from conch.core.clock import Clock
from conch.core.execution.beginning import BeginningRunner
from conch.core.execution.begun import Begun
from conch.core.execution.execution import Executor
from conch.core.execution.limited import LimitedRunner
from conch.core.execution.limiter import RateLimiter
from conch.core.execution.ordering import ResponseOrder
from conch.core.scheduling.base import Batch, Scheduler
from conch.core.scheduling.rate import Claim, ClaimState


class LimitedBeginningRunner(BeginningRunner, LimitedRunner):
    """See `BeginningRunner` and `LimitedRunner`: an instance holds its resources until its batch is done.

    Args:
        name: Name of the model, for its threads.
        scheduler: The queue.
        instances: The model's instances, all with `begins`.
        executor: Begins and finishes batches.
        clock: Monotonic time in nanoseconds.
        limiter: Grants claims.
        claims: The claim of each instance that has one.
        named: Whether the scheduler's batches name their instance.
        order: Keeps responses in order, for a model that asks for it.
    """

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        instances: Sequence[BackendInstance],
        executor: Executor,
        clock: Clock,
        limiter: RateLimiter,
        claims: Mapping[BackendInstance, Claim],
        named: bool = False,
        order: ResponseOrder | None = None,
    ) -> None:
        LimitedRunner.__init__(
            self, name, scheduler, instances, executor, clock, limiter, claims, named, order
        )
        self._prepare(self._next_batch)

    def _run(self, instance: BackendInstance, batch: Batch, end: int | None, leads: bool = False) -> bool:
        try:
            return super()._run(instance, batch, end, leads)
        finally:
            self._tell()

    def _begin(self, instance: BackendInstance, batch: Batch, here: bool) -> Begun:
        self._settle_before()
        return super()._begin(instance, batch, here)

    def _finish(self, begun: Begun) -> None:
        try:
            super()._finish(begun)
        finally:
            self._tell()

    def _keep(self, instance: BackendInstance) -> None:
        # Not asked by `_set_aside` while it has resources.
        if self._is_available(instance):
            self._idle.append(instance)

    def _may_go(self, instance: BackendInstance) -> bool:
        # One that asks for resources would keep them, once granted, from those who are there. It is looked
        # at again when its batch is done.
        claim = self._claims.get(instance)
        return claim is None or claim.state is ClaimState.RESTING

    def _due_now(self, now: int) -> dict[BackendInstance, int]:
        return {one: number for one, number in super()._due_now(now).items() if one in self._idle}
