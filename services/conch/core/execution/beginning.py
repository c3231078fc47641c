"""A runner for instances that begin their batches and have them done elsewhere, as in another process.

Beginning a batch does not hold a thread up, so whoever submits a request begins its batch, whether or not it
was willing to lead, and then those for other idle instances. Where the outcome comes, the batch is finished
and the next one begun. The model's own threads see to what is due later, and to what nobody else can.

Who leads has time. While the model's batches are short, it receives the outcome itself: waking another
thread, which then competes with it for the interpreter, takes longer than the batch. It begins a batch, says
that there is more to lead, takes in meanwhile what else has arrived, and receives the outcome when it leads
again.

An instance that is not available is set aside until it says that it is: neither idle nor busy. What only it
may run waits in the queue, where it can be cancelled and expire.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from conch.core.backend import BackendInstance
from conch.core.clock import Clock
from conch.core.execution.begun import Begun, is_urgent, nested, now, soon
from conch.core.execution.execution import Executor
from conch.core.execution.ordering import ResponseOrder
from conch.core.execution.runner import Runner
from conch.core.request import InferenceRequest
from conch.core.scheduling.base import IDLE, Batch, Decision, Scheduler, WaitUntil

log = logging.getLogger(__name__)

_QUICK_NS = 500_000
"""Batches that the model computes in less are waited for by who leads."""

_HERE_NS = 2_000_000
"""As long as that, should one take longer than those before it."""


class BeginningRunner(Runner):
    """See `Runner`.

    Args:
        name: Name of the model, for its threads.
        scheduler: The queue.
        instances: The model's instances, all with `begins`.
        executor: Begins and finishes batches.
        clock: Monotonic time in nanoseconds.
        named: Whether the scheduler's batches name their instance.
        order: Keeps responses in order, for a model that asks for it.
    """

    # Whoever takes a batch goes on until there is none: nobody else need be woken for it.
    _wakes = False

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        instances: Sequence[BackendInstance],
        executor: Executor,
        clock: Clock,
        named: bool = False,
        order: ResponseOrder | None = None,
    ) -> None:
        super().__init__(name, scheduler, instances, executor, clock, order)
        self._rest = self._rest_or_retire
        self._prepare(self._next_of_named if named else self._next_batch)

    def _prepare(self, next_of_idle: Callable[[int], Decision]) -> None:
        """Lets only those instances take batches that are available.

        Args:
            next_of_idle: What one of the idle instances does next.
        """
        self._away: dict[BackendInstance, object] = {}
        self._computed_ns = 0  # the mean, as instances say
        self._led: Begun | None = None  # what who leads waits for
        self._next_of_idle = next_of_idle
        self._next_batch = self._next_available
        with self._lock:
            self._set_aside()

    @property
    def fast(self) -> bool:
        """Always: leading takes no longer than it takes to begin batches."""
        return True

    def submit(self, request: InferenceRequest, may_lead: bool = False) -> bool:
        """See `Runner.submit`; begins the batch if the caller does not want to."""
        promised = self._submit(request, True)
        if promised and not may_lead:
            self._begin_ready()
            return False
        if not promised and (self._promised or self._led is not None) and is_urgent():
            self.hand_over()
        return promised

    def lead(self, budget_ns: int | None = None) -> bool:
        """See `Runner.lead`; also True, with a budget, where the outcome of a batch is to be waited for."""
        while self._lead(budget_ns):
            if budget_ns is not None:
                return True
        return False

    def hand_over(self) -> None:
        """Keeps a promise at once: that is less than waking somebody else for it."""
        with self._lock:
            led, self._led = self._led, None
            if led is not None:
                led.led = False
        if led is not None and led.awaited is not None:
            led.awaited.leave()
        self._begin_ready()

    def _lead(self, budget_ns: int | None) -> bool:
        """Begins what is ready, or receives what was begun before; True if there is more to lead."""
        end = None if budget_ns is None else self._clock() + budget_ns
        led: Begun | None = None
        try:
            with self._lock:
                self._promised = False
                led, self._led = self._led, None
                work = self._take(False)
            # Other instances do not wait for the one that is waited for.
            more = work is not None and self._run(*work, end, led is None)
        except BaseException:
            if led is not None and led.awaited is not None:
                led.led = False
                led.awaited.leave()  # or nobody would ever receive it
            raise
        if led is None:
            return more
        if led.awaited is not None:
            nested(partial(led.awaited.wait, _HERE_NS))  # another model may wait for what it finishes
        with self._lock:
            led.led = self._promised = False
            work = self._take(False)
            if work is None:
                self._check_drained()
                return False
        return self._run(*work, end, True)

    def _begin_ready(self) -> None:
        """Begins what is ready, without waiting for anything."""
        with self._lock:
            self._promised = False
            work = self._take(False)
        if work is not None:
            self._run(*work, None)

    def _may_be_led(self, instances: Iterable[BackendInstance]) -> bool:
        return True

    def _run(self, instance: BackendInstance, batch: Batch, end: int | None, leads: bool = False) -> bool:
        """Begins a batch, then those for other idle instances.

        Args:
            instance: What the batch is for.
            batch: The batch.
            end: When to begin no other one; None for no such limit.
            leads: Whether the caller has time to wait for the outcome of one of them.

        Returns:
            Whether the caller is to lead again: to wait for that, or because time was up.
        """
        led = False
        while True:
            begun = self._begin(instance, batch, leads and not led and self._is_quick())
            led |= self._settles(begun)
            with self._lock:
                if end is not None and self._idle:
                    time_ns = self._clock()
                    if time_ns >= end and self._is_due(time_ns):
                        self._promised = True
                        return True
                work = self._take(False)
                if work is None:
                    if self._closing:
                        self._check_drained()
                    return led
                instance, batch = work

    def _settles(self, begun: Begun) -> bool:
        """Sees to a batch once `begin` has returned; whether its outcome is left for who leads to receive."""
        awaited = begun.awaited
        with self._lock:
            if not self._step(begun) and awaited is not None and self._led is None:
                self._led = begun
                begun.led = True
                return True
        if awaited is not None:
            awaited.leave()
        return False

    def _is_quick(self) -> bool:
        """Whether outcomes can be waited for on a polling thread, and are expected soon.

        Not those of decoupled models: to answer may mean to wait for a client that reads, and it is the
        polling threads that send to it.
        """
        return self._executor.may_be_led and 0 < self._computed_ns < _QUICK_NS

    def _begin(self, instance: BackendInstance, batch: Batch, here: bool) -> Begun:
        return now(partial(self._executor.begin, instance, batch, self._ran, here))

    def _ran(self, begun: Begun) -> None:
        soon(partial(self._finish, begun))

    def _finish(self, begun: Begun) -> None:
        """Answers the requests of a batch, and begins the next one for its instance."""
        batch = begun.batch
        assert batch is not None
        try:
            begun.finish()
        finally:
            spent = batch.compute_end_ns - batch.compute_start_ns
            # Written without the lock: a lost update does no harm to a rough mean.
            self._mean_ns = spent if not self._mean_ns else (7 * self._mean_ns + spent) // 8
            spent = max(batch.compute_output_start_ns - batch.compute_input_end_ns, 1)
            self._computed_ns = spent if not self._computed_ns else (7 * self._computed_ns + spent) // 8
            with self._lock:
                # Where `begin` has not returned yet, whoever called it goes on when it has.
                work = self._take(False) if self._step(begun) and not begun.led else None
                if work is None and self._closing:
                    self._check_drained()
        if work is not None:
            self._run(*work, None)

    def _step(self, begun: Begun) -> bool:
        """Lets an instance rest, with the lock held, if its batch is finished and `begin` has returned."""
        begun.steps -= 1
        if begun.steps:
            return False
        batch = begun.release()
        self._scheduler.complete(batch, self._clock())
        self._rest(begun.instance)
        self._executing -= len(batch.requests) - batch.fillers
        return True

    def _next_available(self, now_ns: int) -> Decision:
        self._set_aside()
        return self._next_of_idle(now_ns) if self._idle else IDLE

    def _next_of_named(self, now_ns: int) -> Decision:
        """The batch of that idle instance which has one due for the longest time."""
        while True:
            dues = self._dues_of_idle(now_ns)
            if not dues:
                return IDLE
            number = min(dues, key=dues.__getitem__)
            if dues[number] > now_ns:
                return WaitUntil(dues[number])
            decision = self._scheduler.next_batch_of(number, now_ns)
            if decision is not IDLE:
                return decision
            # Nothing was left of a batch all of whose requests have been answered meanwhile.

    def _dues_of_idle(self, now_ns: int) -> dict[int, int]:
        """When each idle instance has a batch, by number."""
        dues = self._scheduler.instance_dues(now_ns).items()
        return {number: due for number, due in dues if self._by_number.get(number) in self._idle}

    def _set_aside(self) -> None:
        """Looks which idle instances are available; called with the lock held."""
        for instance in [*self._idle]:
            if self._may_go(instance) and not self._is_available(instance):
                self._idle.remove(instance)

    def _may_go(self, instance: BackendInstance) -> bool:
        """Whether an idle instance may be set aside."""
        return True

    def _is_available(self, instance: BackendInstance) -> bool:
        """Whether an instance is available; if not, it is noted as being away."""
        absence = object()
        try:
            if instance.available(partial(self._again, instance, absence)):
                return True
        except Exception:
            log.exception("an instance of model '%s' can not say whether it is available", self._name)
            return True  # then it has to answer its batches somehow
        self._away[instance] = absence
        return False

    def _again(self, instance: BackendInstance, absence: object) -> None:
        """Puts an instance to the idle ones that has become available."""
        with self._lock:
            if self._away.get(instance) is not absence:
                return  # it has gone, or says so twice
            del self._away[instance]
            self._idle.append(instance)
            # Not begun here: who calls this may be in the middle of something.
            self._wake_if_due(self._clock())

    def _put(self, instances: Iterable[BackendInstance]) -> None:
        self._idle += [one for one in instances if self._is_available(one)]

    def _choose_rest(self) -> None:
        """Nothing to choose: one way does for both."""

    def _rank(self, instance: BackendInstance) -> int:
        return -1 if instance in self._away else super()._rank(instance)

    def _withdraw(self, instance: BackendInstance) -> None:
        if self._away.pop(instance, None) is None:
            super()._withdraw(instance)

    def _rests(self) -> int:
        return len(self._idle) + len(self._away)
