"""Drives a scheduler with threads: the lock, the instances and the threads of one model version.

An idle instance pulls its next batch: on a thread with the claim, on one of the model's own, or, if its
batches are only started, on any thread that submits a request or receives an outcome. States of the claim:

    ========  ================================  ===========================================
    claim     event                             effect
    ========  ================================  ===========================================
    none      `submit(may_claim=True)`, idle    claimed; the caller gets True
    claimed   another `submit`                  queued; no thread is woken
    claimed   `run_inline` takes a batch        none
    none      its budget is used up, work left  claimed; the caller gets True again
    claimed   `release`                         none; the model's threads run what is due
    ========  ================================  ===========================================

A claimant may also receive the outcome of a batch that it has started:

    1. `submit` gives thread A the claim. A calls `run_inline`, which starts a batch that may be waited for,
       keeps it as the awaited one, and returns True: there is more to run.
    2. A takes in other events. Meanwhile thread B may call `release`: it takes the awaited batch and detaches
       the outcome, which then comes to another thread.
    3. Otherwise A calls `run_inline` again: it takes the awaited batch, starts what is due on other
       instances, waits for the outcome, and starts the next batch.

Guarantees: while an instance is idle and a batch is due, a claim exists or a thread of the model is awake;
an instance gets a batch when the one before is finished and its `start` has returned.
Assumes: each claim is run or released soon; the scheduler is only called under the lock.
Used by: `Model`, `InstancePool`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from functools import partial

from conch.core.backend import BackendInstance, Outcome
from conch.core.clock import Clock
from conch.core.errors import ResourceExhaustedError, UnavailableError
from conch.core.execution.batch_selector import BatchSelector
from conch.core.execution.completions import complete, complete_within
from conch.core.execution.executor import Executor
from conch.core.execution.expiry_thread import ExpiryThread
from conch.core.execution.inline_execution import FAST_NS, InlineExecution, bypasses_claims
from conch.core.execution.instance_set import InstanceSet, RunningBatches
from conch.core.execution.model_threads import ModelThreads
from conch.core.execution.resource_limits import ResourceLimits
from conch.core.execution.response_order import ResponseOrder
from conch.core.request import InferenceRequest
from conch.core.scheduling.queue import NEVER
from conch.core.scheduling.scheduler import IDLE, Batch, OutcomeReader, Scheduler, WaitUntil
from conch.core.servable import ClosedError
from conch.core.statistics_snapshot import Gauges

_WAIT_NS = 2_000_000  # of a claimant for an outcome


class Runner:
    """The instances of one model version and the queue they pull from.

    Args:
        name: Name of the model, for its threads.
        scheduler: The queue.
        instances: The model's instances, all idle; either all of them block or none.
        executor: Runs a batch on an instance.
        clock: Monotonic time in nanoseconds.
        named: Whether batches name their instance.
        order: Keeps responses in the order of the requests; None if the model does not ask for it.
        limits: The resources of the instances; None if they need none.
    """

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        instances: Sequence[BackendInstance],
        executor: Executor,
        clock: Clock,
        named: bool = False,
        order: ResponseOrder | None = None,
        limits: ResourceLimits | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._enqueue = scheduler.submit if order is None else order.around(scheduler.submit)
        self._executor = executor
        self._clock = clock
        self._limits = limits
        self._blocks = not instances or any(instance.blocks for instance in instances)
        self._lock = threading.Lock()
        self._instances = InstanceSet(instances, self._on_available)
        self._idle = self._instances.idle
        self._later_ns = NEVER  # when a batch is due, if `_take` found none
        self._selector = BatchSelector(scheduler, self._instances, named, limits, self._blocks)
        self._next_batch = self._selector.next_batch
        self._inline = InlineExecution(self._blocks, executor.allows_inline)
        self._inline.allowed = self._all_allow_inline()
        self._threads = ModelThreads(name, self._lock, self._run)
        self._drained = threading.Condition(self._lock)
        self._running, self._closing = RunningBatches(), False
        self._tracker = executor.tracker  # requests completed by the model itself, possibly after their batch
        self._tracker.on_none = self._on_none_open
        self._expiries = scheduler.expiries
        self._expiry = ExpiryThread(name, self, scheduler, self._lock, clock)
        if limits is not None:
            limits.watch(instances, self._on_granted)

    @property
    def pending(self) -> int:
        """Requests queued."""
        with self._lock:
            return self._scheduler.pending

    def gauges(self) -> Gauges:
        """What the version does now."""
        with self._lock:
            running = self._tracker.count + (0 if self._tracker.decoupled else self._running.requests)
            busy_ns = self._running.busy_ns(self._clock())
            return Gauges(self._scheduler.pending, running, busy_ns, self._instances.count)

    @property
    def held(self) -> int:
        """Number of live sequences."""
        return self._scheduler.held

    @property
    def fast(self) -> bool:
        """Whether running inline takes little time: recent batches were short, or are only started."""
        return not self._blocks or 0 < self._inline.mean_ns < FAST_NS

    @property
    def only_starts(self) -> bool:
        """Whether running inline only starts batches, and receives outcomes that come soon."""
        return not self._blocks

    def continues(self, request: InferenceRequest) -> bool:
        """Whether a request belongs to a live sequence."""
        with self._lock:
            return self._scheduler.continues(request)

    def end_sequence(self, correlation_id: int | str) -> None:
        """Ends a live sequence without a further request, if there is one."""
        with self._lock:
            self._scheduler.end(correlation_id)
            self.check(self._clock())  # its slot may let others run
        self.after_removal()

    def submit(self, request: InferenceRequest, may_claim: bool = False) -> bool:
        """Queues a request.

        With `may_claim`, True if the caller has a claim: it calls `run_inline` or `release` soon, and until
        then no thread is woken.

        Raises:
            ClosedError: The version is being replaced or unloaded; the request was not queued.
            ConchError: The queue does not take the request.
        """
        batch: Batch | None = None
        inline = self._inline
        try:
            with self._lock:
                if self._closing and not self._scheduler.continues(request):
                    raise ClosedError
                now = self._clock()
                self._enqueue(request, now)
                if self._expiries.next_ns < self._expiry.wakes_ns:
                    self._expiry.wake()
                if inline.claimed or not self._idle:
                    # Pulled by the claimant, or by the next instance that is idle.
                    if self._blocks or not (inline.claimed or inline.awaited) or not bypasses_claims():
                        return False
                elif may_claim and inline.allowed:
                    inline.claimed = True
                    return True
                elif self._blocks:
                    self._wake_if_due(now)
                    return False
                else:
                    batch = self._take(now, False)
                    if batch is None:
                        return False
        except (ResourceExhaustedError, UnavailableError) as error:
            self._executor.refuse(request, error, self.pending, inline.mean_ns, self._instances.count)
            raise
        if batch is None:
            self.release()
        else:
            self._drive(batch, None)
        return False

    def cancel(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Takes a request out of the queue, with those that can't be served without it.

        Returns what the caller is to complete: nothing if the request runs or is complete.
        """
        with self._lock:
            cancelled = self._scheduler.cancel(request)
            if cancelled:
                self._wake_if_due(self._clock())  # the others may now form a batch
            self._check_drained()
        self.after_removal()
        return cancelled

    def take_queued(self) -> list[InferenceRequest]:
        """Takes everything out of the queue, for a shutdown that can't wait; the caller completes it."""
        with self._lock:
            taken = self._scheduler.drain()
            self._check_drained()
        self.after_removal()
        return taken

    def run_inline(self, budget_ns: int | None = None) -> bool:
        """Runs claimed batches on the calling thread until nothing is ready.

        After `budget_ns` no further batch starts. True if work is left then, or if an outcome is to be
        received: the caller has the claim again.
        """
        while True:
            with self._lock:
                self._inline.claimed = False
                now = self._clock()
                batch = self._take(now, budget_ns is None)
                awaited = None if self._blocks else self._inline.take_awaited()
            if awaited is None and batch is None:
                return False
            end = None if budget_ns is None else now + budget_ns
            if awaited is not None:
                more = self._receive(awaited, batch, end)
            else:
                assert batch is not None
                more = self._drive(batch, end, True)
            if not more or budget_ns is not None:
                return more

    def run_batch_inline(self) -> bool:
        """Runs one claimed batch, waking a thread for what else is ready; True if claimed again."""
        with self._lock:
            self._inline.claimed = False
            batch = self._take(self._clock(), True)
        return batch is not None and self._drive(batch, 0)

    def release(self) -> None:
        """Releases a claim: the model's own threads run the batches, or this one starts them."""
        batch: Batch | None = None
        with self._lock:
            self._inline.claimed = False
            awaited = self._inline.take_awaited()
            if awaited is not None and awaited.wait is not None:
                awaited.wait.continues = False
            now = self._clock()
            if self._blocks:
                self._wake_if_due(now)
            else:
                batch = self._take(now, False)  # cheaper than waking another thread for that
        if awaited is not None and awaited.wait is not None and awaited.wait.reader is not None:
            awaited.wait.reader.detach()
        if batch is not None:
            self._drive(batch, None)

    def _receive(self, awaited: Batch, batch: Batch | None, end: int | None) -> bool:
        """Starts what is due on other instances, then receives an outcome; True as in `run_inline`."""
        wait = awaited.wait
        assert wait is not None and wait.reader is not None
        try:
            if batch is not None:
                self._drive(batch, end)
        except BaseException:
            wait.continues = False
            wait.reader.detach()  # or the outcome would never be received
            raise
        complete_within(partial(wait.reader.wait, awaited, _WAIT_NS))
        with self._lock:
            wait.continues = self._inline.claimed = False
            batch = self._take(self._clock(), False)
            if batch is None and self._closing:
                self._check_drained()
        return batch is not None and self._drive(batch, end, True)

    def _drive(self, batch: Batch | None, end: int | None, may_wait: bool = False) -> bool:
        """Runs or starts a batch, then what else is ready.

        After `end` no other batch starts. With `may_wait` the caller may receive the outcome of one batch.
        Returns whether the caller is to run inline again: for that outcome, or because time is up.
        """
        inline = self._inline
        waits = False
        while batch is not None:
            if self._limits is not None:
                self.after_removal()
            if may_wait and not waits and not self._blocks:
                batch.wait = inline.wait()
            complete = self._executor.start(batch, self._done)
            if complete:
                inline.record(batch)
            unread: OutcomeReader | None = None
            with self._lock:
                now = self._clock()
                if complete or batch.finished:
                    self._free(batch, now)
                batch.starting = False
                if batch.wait is not None:
                    unread = inline.started(batch)
                    waits = waits or inline.awaited is batch
                if end is not None and now >= end and self._selector.is_due(now):
                    inline.claimed = waits = True
                    batch = None
                else:
                    batch = self._take(now, end is None)
                if batch is None and self._closing:
                    self._check_drained()
            if unread is not None:
                unread.detach()
        if self._limits is not None:
            self.after_removal()
        return waits

    def _done(self, batch: Batch, outcome: Outcome) -> None:
        """Takes the outcome of a batch whose `start` has not returned it."""
        if not batch.settled:
            batch.settled = True
            complete(partial(self._complete, batch, outcome))

    def _complete(self, batch: Batch, outcome: Outcome) -> None:
        """Completes the requests of a batch, and starts the next one of its instance."""
        self._executor.finish(batch, outcome)
        self._inline.record(batch)
        following: Batch | None = None
        with self._lock:
            batch.finished = True
            if not batch.starting:  # else its starter goes on when it has returned
                now = self._clock()
                self._free(batch, now)
                if batch.wait is None or not batch.wait.continues:
                    following = self._take(now, False)
            if following is None and self._closing:
                self._check_drained()
        if following is not None or self._limits is not None:
            self._drive(following, None)

    def _take(self, now: int, wake: bool, sleeps: bool = False) -> Batch | None:
        """Takes the next batch and its instance; called with the lock held.

        With `wake`, a thread is woken for other idle instances that block: short batches run sooner one after
        the other. With `sleeps`, the caller sleeps until `_later_ns` if there is nothing to run.
        """
        if self._expiries.next_ns <= now and not self._expiry.look(now):
            self._check_drained()  # the last sequence may have ended
        decision = self._next_batch(now) if self._idle and self._scheduler.pending else IDLE
        if type(decision) is Batch:
            decision.compute_start_ns = now
            self._running.add(decision)
            if wake and self._blocks and self._idle:
                self._wake_if_due(now)
            return decision
        self._later_ns = NEVER
        if type(decision) is WaitUntil:
            self._later_ns = decision.time_ns
            if not sleeps and decision.time_ns < self._threads.timed_ns:
                self._threads.wake(self._instances.count)
        return None

    def _free(self, batch: Batch, now: int) -> None:
        """Makes the instance of a finished batch idle; called with the lock held."""
        instance = batch.runs_on
        self._running.remove(batch)
        self._running.past_ns += now - batch.compute_start_ns
        self._scheduler.complete(batch, now)
        if self._limits is None and not self._instances.retiring:
            self._idle.append(instance)
            return
        idle = self._instances.give_back(instance)
        if not idle:
            self._drained.notify_all()
        if self._limits is not None:
            again = idle and self._selector.has_use_for(instance, now)
            self._limits.release(instance, again)

    def after_removal(self) -> None:
        """Gives back the resources of instances that have nothing to run any more; without the lock."""
        limits = self._limits
        if limits is None:
            return
        with self._lock:
            now = self._clock()
            if self._selector.give_back_unneeded(now):
                self._wake_if_due(now)  # a batch may be due later, and no thread waits for that
            granted = limits.take_granted()
        limits.notify(granted)

    def _on_granted(self) -> None:
        """Uses a grant that is held now; called by the thread that freed the resources."""
        with self._lock:
            self._wake_if_due(self._clock())
        self.after_removal()

    def _on_available(self, instance: BackendInstance, token: object) -> None:
        """Makes an instance idle that is available again."""
        with self._lock:
            if self._instances.restore(instance, token):
                # A thread of the model starts batches: the calling thread may hold locks.
                self._wake_if_due(self._clock())

    def resize(
        self, added: Sequence[BackendInstance], surplus: Iterable[tuple[Sequence[BackendInstance], int]]
    ) -> list[BackendInstance]:
        """Adds and removes instances while requests run; no request is lost or waits for it.

        `surplus` has candidates and how many of them to remove; see `InstanceSet.remove`. Returns the removed
        instances; busy ones still run their batch, see `wait_gone`.
        """
        limits = self._limits
        if limits is not None:
            limits.watch(added, self._on_granted)
        with self._lock:
            removed = self._instances.remove(surplus)
            self._instances.add(added)
            self._inline.allowed = self._all_allow_inline()
            if limits is not None:
                limits.remove(removed)
            self._wake_if_due(self._clock())
        self.after_removal()
        return removed

    def wait_gone(self, instances: Sequence[BackendInstance]) -> None:
        """Waits until instances that `resize` removed run no batch."""
        with self._lock:
            self._drained.wait_for(lambda: not any(one in self._instances.retiring for one in instances))

    def _all_allow_inline(self) -> bool:
        """Whether batches may run inline; those that are only started always may."""
        allow = (instance.allows_inline for instance in self._instances.by_number.values())
        return not self._blocks or (self._executor.allows_inline and all(allow))

    def close(self, timeout_s: float | None = None) -> bool:
        """Refuses new requests, finishes the accepted ones, and ends the threads.

        Returns whether everything finished in time; if not, the threads end with their batches.
        """
        with self._lock:
            self._closing = True
            self._scheduler.begin_closing(self._clock())
            self._threads.wake_all()
            self._expiry.notify_over()
            done = self._drained.wait_for(self._is_drained, timeout_s)
        if done:
            self._threads.join()
            self._expiry.join()
        return done

    def expire(self, request: InferenceRequest) -> None:
        """Completes an expired request; see `ExpiringQueue`."""
        self._executor.expire(request, self._scheduler.expiry_text(request))

    def check(self, now_ns: int) -> bool:
        """See `ExpiringQueue.check`."""
        self._wake_if_due(now_ns)  # after an expiry, the others may now form a batch
        self._check_drained()
        return self._closing and self._is_drained()

    def _is_drained(self) -> bool:
        open_requests = self._scheduler.pending or self._expiry.incomplete or self._tracker.count
        return self._instances.all_rest and not (open_requests or self._scheduler.held)

    def _on_none_open(self) -> None:
        """Checks whether the runner is drained; called when no request is open."""
        # Without the lock: a close that starts now reads the number itself.
        if self._closing:
            with self._lock:
                self._check_drained()

    def _check_drained(self) -> None:
        """Lets `close` and the threads end if all is done; called with the lock held."""
        if self._closing and self._is_drained():
            self._drained.notify_all()
            self._threads.wake_all()
            self._expiry.notify_over()

    def _wake_if_due(self, now: int) -> None:
        """Wakes a thread if a batch is or will be due and no claim exists; called with the lock held."""
        if self._idle and not self._inline.claimed:
            due = self._selector.due_ns(now)
            if due is not None and (due <= now or due < self._threads.timed_ns):
                self._threads.wake(self._instances.count)

    def _run(self, woken: threading.Condition) -> None:
        while (batch := self._pull(woken)) is not None:
            self._drive(batch, None)
            del batch  # or the batch lives for as long as the thread sleeps

    def _pull(self, woken: threading.Condition) -> Batch | None:
        """Waits for a batch; None once the runner is closed and has nothing to run."""
        with self._lock:
            while True:
                now = self._clock()
                batch = self._take(now, True, True)
                if batch is not None:
                    return batch
                if self._closing and not (self._scheduler.pending or self._scheduler.held):
                    self._check_drained()
                    return None
                self._threads.sleep(woken, now, self._later_ns)
