"""A runner whose instances need resources that they share with those of other models.

An instance takes a batch only while its claim is granted. While nothing is due it claims nothing; once
something is, all idle instances ask until one is granted, and the others wait in the limiter. What is
granted later wakes a thread of the model's own. Whoever takes the last request out of the queue, to run it
or not, gives back what nobody needs any more. Where batches name their instance, only those instances ask
that have something due of their own. Requests stay in the queue until a claim is granted: there they can be
cancelled, their deadlines are kept, and others can still join them.

The limiter is asked with the runner's lock held, but tells other models only without it (see `RateLimiter`).
What is still to be told is noted, and told by the thread that noted it as soon as it has let go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from conch.core.backend import BackendInstance
from conch.core.clock import Clock
from conch.core.execution.execution import Executor
from conch.core.execution.limiter import RateLimiter
from conch.core.execution.ordering import ResponseOrder
from conch.core.execution.runner import Runner
from conch.core.scheduling.base import IDLE, Batch, Decision, Scheduler, WaitUntil
from conch.core.scheduling.rate import Claim, ClaimState


class LimitedRunner(Runner):
    """See `Runner`.

    Args:
        name: Name of the model, for its threads.
        scheduler: The queue.
        instances: The model's instances, all idle.
        executor: Runs a batch on an instance.
        clock: Monotonic time in nanoseconds.
        limiter: Grants claims.
        claims: The claim of each instance that has one, known to the limiter; looked at also for instances
            that come later.
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
        super().__init__(name, scheduler, instances, executor, clock, order)
        self._limiter = limiter
        self._claims = claims
        self._named = named  # then what is due is a matter of each instance
        self._asking: set[Claim] = set()  # waiting, or granted and not used yet
        self._untold: list[Claim] = []
        self._chosen: BackendInstance | None = None
        self._next_batch = self._next_named if named else self._next_limited
        self._execute = self._execute_limited
        self._rest = self._rest_limited
        self._attend(instances)

    def resize(
        self,
        added: Sequence[BackendInstance],
        surplus: Iterable[tuple[Sequence[BackendInstance], int]],
    ) -> list[BackendInstance]:
        """See `Runner.resize`."""
        self._attend(added)
        going = super().resize(added, surplus)
        with self._lock:
            claims = self._asking.intersection(self._claims[one] for one in going if one in self._claims)
            self._asking -= claims
            self._untold += self._limiter.give_back(claims)
        self._tell()
        return going

    def _attend(self, instances: Iterable[BackendInstance]) -> None:
        for instance in instances:
            if instance in self._claims:
                self._claims[instance].on_granted = self._granted

    def _granted(self) -> None:
        """A claim that waited has been granted; called by whoever gave the resources back."""
        with self._lock:
            self._wake_if_due(self._clock())
        self._settle()

    def _run(self, instance: BackendInstance, batch: Batch, end: int | None) -> bool:
        try:
            return super()._run(instance, batch, end)
        finally:
            self._tell()

    def _execute_limited(self, instance: BackendInstance, batch: Batch) -> None:
        self._settle_before()
        self._executor.run(instance, batch)

    def _settle_before(self) -> None:
        """Called before a batch runs, with no lock held."""
        if self._untold:
            self._tell()
        if self._asking:
            self._settle()  # this batch may have been all that others were asking for

    def _rest_limited(self, instance: BackendInstance) -> None:
        """Gives resources back when a batch is done, asking for them again where there is more to do."""
        self._rest_or_retire(instance)
        claim = self._claims.get(instance)
        if claim is None:
            return
        again = instance in self._idle and self._has_use_for(instance)
        granted = self._limiter.release(claim, again)
        if again:
            self._asking.add(claim)
        self._untold += [other for other in granted if other is not claim]

    def _choose_rest(self) -> None:
        """Nothing to choose: one way does for both."""

    def _has_use_for(self, instance: BackendInstance) -> bool:
        now = self._clock()
        return instance in self._due_now(now) if self._named else self._is_due(now)

    def _due_now(self, now: int) -> dict[BackendInstance, int]:
        """The numbers of those idle instances that have a batch of their own due, the oldest one first."""
        dues = self._scheduler.instance_dues(now)
        numbers = sorted((number for number, due in dues.items() if due <= now), key=dues.__getitem__)
        return {self._by_number[number]: number for number in numbers}

    def _next_limited(self, now: int) -> Decision:
        due = self._scheduler.due_ns(now)
        if due is None:
            return IDLE
        if due > now:
            return WaitUntil(due)
        self._chosen = self._instance_of(self._idle)
        return IDLE if self._chosen is None else self._scheduler.next_batch(now)

    def _next_named(self, now: int) -> Decision:
        due = self._due_now(now)
        self._chosen = self._instance_of(due)
        if self._chosen is not None:
            return self._scheduler.next_batch_of(due[self._chosen], now)
        dues = self._scheduler.instance_dues(now).values()
        later = min((each for each in dues if each > now), default=None)
        return IDLE if later is None else WaitUntil(later)

    def _instance_of(self, candidates: Iterable[BackendInstance]) -> BackendInstance | None:
        """One of the idle instances that may run now; if there is none, all of them wait."""
        resting: dict[Claim, BackendInstance] = {}
        for instance in candidates:
            claim = self._claims.get(instance)
            if claim is None or claim.state is ClaimState.HELD:
                return instance
            if claim.state is ClaimState.RESTING:
                resting[claim] = instance
        if not resting:
            return None
        granted = self._limiter.ask(resting)
        self._asking.update(claim for claim in resting if claim.state is not ClaimState.RESTING)
        return None if granted is None else resting[granted]

    def _instance_for(self, batch: Batch) -> BackendInstance:
        chosen = self._chosen
        assert chosen is not None
        if chosen in self._claims:
            self._asking.discard(self._claims[chosen])
        # The last one is taken, unless the batch names the same one.
        self._idle.remove(chosen)
        self._idle.append(chosen)
        return super()._instance_for(batch)

    def _wake_if_due(self, now: int) -> None:
        # A thread would find nothing to do where all instances wait: it is woken when one is granted.
        if self._promised:
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
        claim = self._claims.get(instance)
        return claim is None or claim.state is not ClaimState.WAITING

    def _settle(self) -> None:
        """Gives back what was asked for by instances that have nothing to run any more."""
        with self._lock:
            now = self._clock()
            if self._named:
                needed = {self._claims[one] for one in self._due_now(now) if one in self._claims}
            else:
                needed = self._asking if self._is_due(now) else set()
            unneeded = self._asking - needed
            if unneeded:
                self._asking -= unneeded
                self._untold += self._limiter.give_back(unneeded)
                self._wake_if_due(now)  # what is not due any more may be later, and nobody waits for that
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            untold, self._untold = self._untold, []
        if untold:
            self._limiter.tell(untold)
