"""A runner for instances that run batches asynchronously, such as workers in other processes.

Starting a batch does not block, so the submitting thread starts it at once, with or without a claim, and then
the batches of other idle instances. The thread on which an outcome comes finishes the batch and starts the
next. The model's own threads serve what is due later.

A thread that runs inline may also wait. While batches are short, it receives the outcome itself: waking
another thread, which then competes for the interpreter, takes longer than the batch.

An instance is idle, busy or unavailable (its worker restarts). Requests that only an unavailable instance may
run wait in the queue, where they can be cancelled and expire:

    ===========  =========================================  ===========
    state        event                                      next state
    ===========  =========================================  ===========
    idle         `available` is false                       unavailable
    idle         a batch is taken                           busy
    busy         both steps of `PendingBatch` are complete  idle
    unavailable  `on_available` is called                   idle
    any          `resize` removes it                        removed
    ===========  =========================================  ===========

Waiting inline, for a batch whose `has_waiter` is true:

    1. `submit` gives thread A a claim. A calls `run_inline`, which starts the batch as awaitable, keeps it in
       `_awaited` and returns True: there is more to run.
    2. A takes in other events. Meanwhile thread B may call `release`: it takes `_awaited` and detaches the
       outcome, which then comes to another thread.
    3. Otherwise A calls `run_inline` again: it takes `_awaited`, starts what is due on other instances, waits
       for the outcome, and starts the next batch.

Guarantees: `_awaited` is taken under the lock, so exactly one thread waits for an outcome or detaches it.
Used by: `resource_runner`, `model_version`, `bls_server`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from conch.core.backend import BackendInstance
from conch.core.clock import Clock
from conch.core.execution.executor import Executor
from conch.core.execution.pending_batch import (
    PendingBatch,
    bypasses_claims,
    defer,
    run_deferring,
    run_nested,
)
from conch.core.execution.response_order import ResponseOrder
from conch.core.execution.runner import Runner
from conch.core.request import InferenceRequest
from conch.core.scheduling.scheduler import IDLE, Batch, Decision, Scheduler, WaitUntil

log = logging.getLogger(__name__)

_QUICK_NS = 500_000
"""Mean compute time below which a thread that runs inline waits for outcomes."""

_WAIT_NS = 2_000_000
"""How long it waits for one of them."""


class AsyncRunner(Runner):
    """See `Runner`.

    Args:
        name: Name of the model, for its threads.
        scheduler: The queue.
        instances: The model's instances, all with `starts_async`.
        executor: Starts and finishes batches.
        clock: Monotonic time in nanoseconds.
        named: Whether the scheduler's batches name their instance.
        order: Keeps responses in order; None if the model does not ask for it.
    """

    # The thread that takes a batch goes on until none is left: no other one is needed.
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
        self._return = self._return_or_retire
        self._init_async(self._next_of_named if named else self._next_batch)

    def _init_async(self, next_of_idle: Callable[[int], Decision]) -> None:
        """Lets only available instances take batches; `next_of_idle` decides for the idle ones."""
        self._unavailable: dict[BackendInstance, object] = {}
        self._computed_ns = 0  # mean compute time reported by the instances
        self._awaited: PendingBatch | None = None  # waited for by the thread that runs inline
        self._next_of_idle = next_of_idle
        self._next_batch = self._next_available
        with self._lock:
            self._find_unavailable()

    @property
    def fast(self) -> bool:
        """Always: running inline only starts batches."""
        return True

    def submit(self, request: InferenceRequest, may_claim: bool = False) -> bool:
        """See `Runner.submit`; starts the batch unless the caller claims it."""
        claimed = self._submit(request, True)
        if claimed and not may_claim:
            self._start_ready()
            return False
        if not claimed and (self._claimed or self._awaited is not None) and bypasses_claims():
            self.release()
        return claimed

    def run_inline(self, budget_ns: int | None = None) -> bool:
        """See `Runner.run_inline`; with a budget, also True if an outcome is to be waited for."""
        while self._run_inline(budget_ns):
            if budget_ns is not None:
                return True
        return False

    def release(self) -> None:
        """Releases a claim by starting its batches: cheaper than waking another thread for that."""
        with self._lock:
            awaited, self._awaited = self._awaited, None
            if awaited is not None:
                awaited.has_waiter = False
        if awaited is not None and awaited.awaited is not None:
            awaited.awaited.detach()
        self._start_ready()

    def _run_inline(self, budget_ns: int | None) -> bool:
        """Starts what is ready, or receives an awaited outcome; True if there is more to run."""
        end = None if budget_ns is None else self._clock() + budget_ns
        awaited: PendingBatch | None = None
        try:
            with self._lock:
                self._claimed = False
                awaited, self._awaited = self._awaited, None
                work = self._take(False)
            # Other instances do not wait for the awaited one.
            more = work is not None and self._run(*work, end, awaited is None)
        except BaseException:
            if awaited is not None and awaited.awaited is not None:
                awaited.has_waiter = False
                awaited.awaited.detach()  # or the outcome would never be received
            raise
        if awaited is None:
            return more
        if awaited.awaited is not None:
            run_nested(partial(awaited.awaited.wait, _WAIT_NS))  # another model may wait for what it finishes
        with self._lock:
            awaited.has_waiter = self._claimed = False
            work = self._take(False)
            if work is None:
                self._check_drained()
                return False
        return self._run(*work, end, True)

    def _start_ready(self) -> None:
        """Starts what is ready, without waiting."""
        with self._lock:
            self._claimed = False
            work = self._take(False)
        if work is not None:
            self._run(*work, None)

    def _all_allow_inline(self, instances: Iterable[BackendInstance]) -> bool:
        return True

    def _run(self, instance: BackendInstance, batch: Batch, end: int | None, may_wait: bool = False) -> bool:
        """Starts a batch, then those of other idle instances.

        Args:
            instance: The instance of the batch.
            batch: The batch.
            end: When to start no other batch; None for no limit.
            may_wait: Whether the caller may wait for the outcome of one of them.

        Returns:
            Whether the caller is to run inline again: for that outcome, or because time is up.
        """
        waits = False
        while True:
            pending = self._start(instance, batch, may_wait and not waits and self._is_quick())
            waits |= self._after_start(pending)
            with self._lock:
                if end is not None and self._idle:
                    time_ns = self._clock()
                    if time_ns >= end and self._is_due(time_ns):
                        self._claimed = True
                        return True
                work = self._take(False)
                if work is None:
                    if self._closing:
                        self._check_drained()
                    return waits
                instance, batch = work

    def _after_start(self, pending: PendingBatch) -> bool:
        """Handles a batch once `start` has returned; True if its outcome is left to wait for."""
        awaited = pending.awaited
        with self._lock:
            if not self._complete_step(pending) and awaited is not None and self._awaited is None:
                self._awaited = pending
                pending.has_waiter = True
                return True
        if awaited is not None:
            awaited.detach()
        return False

    def _is_quick(self) -> bool:
        """Whether outcomes may be waited for on a polling thread, and come soon.

        Not those of decoupled models: sending may block until a client reads, and polling threads send.
        """
        return self._executor.allows_inline and 0 < self._computed_ns < _QUICK_NS

    def _start(self, instance: BackendInstance, batch: Batch, awaitable: bool) -> PendingBatch:
        return run_deferring(partial(self._executor.start, instance, batch, self._on_complete, awaitable))

    def _on_complete(self, pending: PendingBatch) -> None:
        defer(partial(self._finish, pending))

    def _finish(self, pending: PendingBatch) -> None:
        """Completes the requests of a batch, and starts the next one of its instance."""
        batch = pending.batch
        assert batch is not None
        try:
            pending.finish()
        finally:
            spent = batch.compute_end_ns - batch.compute_start_ns
            # Without the lock: a lost update does no harm to a rough mean.
            self._mean_ns = spent if not self._mean_ns else (7 * self._mean_ns + spent) // 8
            spent = max(batch.compute_output_start_ns - batch.compute_input_end_ns, 1)
            self._computed_ns = spent if not self._computed_ns else (7 * self._computed_ns + spent) // 8
            with self._lock:
                # If `start` has not returned yet, its caller goes on when it has.
                work = self._take(False) if self._complete_step(pending) and not pending.has_waiter else None
                if work is None and self._closing:
                    self._check_drained()
        if work is not None:
            self._run(*work, None)

    def _complete_step(self, pending: PendingBatch) -> bool:
        """Counts a step of a batch, under the lock; after the last one the instance is free: True."""
        pending.steps -= 1
        if pending.steps:
            return False
        batch = pending.release()
        self._scheduler.complete(batch, self._clock())
        self._return(pending.instance)
        self._executing -= len(batch.requests) - batch.fillers
        return True

    def _next_available(self, now_ns: int) -> Decision:
        self._find_unavailable()
        return self._next_of_idle(now_ns) if self._idle else IDLE

    def _next_of_named(self, now_ns: int) -> Decision:
        """The batch of the idle instance whose batch has been due for the longest time."""
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
            # All requests of that batch were completed meanwhile.

    def _dues_of_idle(self, now_ns: int) -> dict[int, int]:
        """When each idle instance has a batch, by number."""
        dues = self._scheduler.instance_dues(now_ns).items()
        return {number: due for number, due in dues if self._by_number.get(number) in self._idle}

    def _find_unavailable(self) -> None:
        """Moves unavailable instances out of the idle ones; called with the lock held."""
        for instance in [*self._idle]:
            if self._may_be_unavailable(instance) and not self._is_available(instance):
                self._idle.remove(instance)

    def _may_be_unavailable(self, instance: BackendInstance) -> bool:
        """Whether an idle instance may become unavailable."""
        return True

    def _is_available(self, instance: BackendInstance) -> bool:
        """Whether an instance is available; if not, notes that it is not."""
        absence = object()
        try:
            if instance.available(partial(self._on_available, instance, absence)):
                return True
        except Exception:
            log.exception("an instance of model '%s' can not say whether it is available", self._name)
            return True  # its batches complete with whatever error it raises
        self._unavailable[instance] = absence
        return False

    def _on_available(self, instance: BackendInstance, absence: object) -> None:
        """Makes an instance idle that is available again."""
        with self._lock:
            if self._unavailable.get(instance) is not absence:
                return  # removed, or notified twice
            del self._unavailable[instance]
            self._idle.append(instance)
            # A thread of the model starts batches: the calling thread may hold locks.
            self._wake_if_due(self._clock())

    def _add_new(self, instances: Iterable[BackendInstance]) -> None:
        self._idle += [one for one in instances if self._is_available(one)]

    def _choose_return(self) -> None:
        """Nothing to choose: one way serves both cases."""

    def _rank(self, instance: BackendInstance) -> int:
        return -1 if instance in self._unavailable else super()._rank(instance)

    def _remove_idle(self, instance: BackendInstance) -> None:
        if self._unavailable.pop(instance, None) is None:
            super()._remove_idle(instance)

    def _count_idle(self) -> int:
        return len(self._idle) + len(self._unavailable)
