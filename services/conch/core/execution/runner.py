"""One life of a batch: drives a scheduler with threads, for one model version.

Theory of operation. An idle instance pulls its next batch, so a batch exists only once an instance can run
it. Until then its requests wait in the scheduler, which is pure: it decides what runs together, and the
runner calls it under a lock. The instances say which thread pulls:

- Those that block run a batch on the thread that starts it: a thread with the *claim* (a polling thread that
  has submitted requests), or one of the model's own threads.
- Those that do not block only start a batch there. Any thread that submits a request or receives an outcome
  starts the next one.

A batch is one object, from the scheduler's decision until its instance is idle again. States down, events
across; the runner's lock is held for each change:

    ========  ===============  ===============  =========================================
    state     `start` returns  `start` returns  the responses to a later outcome are sent
              the outcome      `PENDING`
    ========  ===============  ===============  =========================================
    TAKEN     RELEASED         STARTED          FINISHED
    STARTED                                     RELEASED
    FINISHED  RELEASED         RELEASED
    RELEASED
    ========  ===============  ===============  =========================================

`Runner._take` makes a batch TAKEN: its requests leave the queue, and the instance is busy. The thread that
has the outcome finishes the batch (`Executor.finish`). Each request has succeeded, failed, was cancelled,
runs again or stays open; it is counted so in the statistics, and then gets its response.
`Runner._release_batch` makes the batch RELEASED: the instance is idle, and rescheduled requests are queued.
Of two threads, the one that started the batch and the one that finished it, the later one releases it and
pulls the next batch.

The first outcome counts (`Batch.settled`), whatever the instance does after it. An outcome that comes while
its thread finishes another batch waits until that is done: chains of short batches do not grow the stack.

A thread that has taken a batch runs it and those that follow (`Runner._run_batches`), in these steps:

    1. The instance starts the batch, without the lock. All other steps hold it.
    2. If the batch is done, here or on another thread, it is RELEASED; otherwise it is STARTED.
    3. The next batch is taken. If time is up and one is due, it is left to the caller, which has the claim.
    4. If no batch follows and the runner closes, this may have been the last one.

A claim is the promise of a thread to run the next batches soon. While it exists, no other thread is woken for
a batch that is due; a thread that receives an outcome still pulls. The claim is one flag (`_claimed`) without
an owner: any thread may end it.

    ========  =====================================  =====================================================
    claim     event                                  effect
    ========  =====================================  =====================================================
    none      `submit`, no instance is idle          none; the next idle instance pulls
    none      `submit(may_claim=True)`, one is idle  claimed, and the caller gets True; only if the
                                                     instances run inline (`InstanceSet.allow_inline`)
    none      any other `submit`, one is idle        none; if the instances block, a thread of the model
                                                     is woken, otherwise the caller starts what is due
    claimed   `submit`                               claimed; no thread is woken
    claimed   `submit` within `bypassing_claims`,    as `release`
              instances that do not block
    any       `run_inline` or `run_batch_inline`     none, even if there is no batch to take
              begins
    any       the budget of `run_inline` is used up  claimed, and the caller gets True; only if an idle
              (that of `run_batch_inline` is 0)      instance has a batch that is due
    any       `release`                              none; if the instances block, a thread of the model
                                                     is woken, otherwise the caller starts what is due
    ========  =====================================  =====================================================

Guarantees: while an instance is idle and a batch is due, a claim exists or a thread that pulls is awake; an
instance has no more than `BackendInstance.most_batches`: not finished, or their `start` has not returned.
Assumes: a thread that has a claim runs or releases it soon.
Locks: one for each runner. Models, responders and other models' limits are called without it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

from conch.core.backend import BackendInstance, BatchOutcome
from conch.core.clock import Clock
from conch.core.errors import ResourceExhaustedError, UnavailableError
from conch.core.execution.batch_selector import selector_for
from conch.core.execution.closing import Closing
from conch.core.execution.executor import Executor
from conch.core.execution.expiry_thread import ExpiryThread
from conch.core.execution.instance_set import InstanceSet
from conch.core.execution.model_threads import ModelThreads
from conch.core.execution.resource_limits import ResourceLimits
from conch.core.execution.response_order import ResponseOrder
from conch.core.execution.runner_base import RunnerBase
from conch.core.request import InferenceRequest
from conch.core.scheduling.queue import NEVER
from conch.core.scheduling.scheduler import Batch, Scheduler, WaitUntil
from conch.core.servable import ClosedError
from conch.core.thread_state import RunnerThread

log = logging.getLogger(__name__)

FAST_NS = 500_000
"""Mean time of the batches of a fast version."""


class BatchState(Enum):
    """State of a batch; the module has the table of transitions."""

    TAKEN = "taken"
    STARTED = "started"
    FINISHED = "finished"
    RELEASED = "released"


_TAKEN, _STARTED, _FINISHED, _RELEASED = BatchState


_thread = RunnerThread()


@contextmanager
def bypassing_claims() -> Iterator[None]:
    """Lets requests submitted within start at once, without waiting for a claimant.

    The claimant may wait for the submitting model.
    """
    outer, _thread.bypasses = _thread.bypasses, True
    try:
        yield
    finally:
        _thread.bypasses = outer


class Runner(RunnerBase):
    """The instances of one model version and the queue they pull from.

    Args:
        name: Name of the model, for its threads.
        scheduler: The queue.
        instances: The model's instances, all idle; either all of them block or none.
        executor: Runs a batch on an instance.
        clock: Monotonic time in nanoseconds.
        named: True if batches name their instance.
        order: Keeps responses in the order of the requests; None if the model does not ask for it.
        limits: The resources of the instances; None if they need none.

    Attributes:
        instances: The instances: idle, running or retiring; resizes them.
        closing: State of the close.
        expiry: Fails requests that have waited for too long.
        threads: The model's own threads.
        selector: Chooses the instance of a batch; None if any idle one may run any batch.
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
        super().__init__(scheduler, clock)
        self.limits = limits
        self.tracker = executor.tracker  # requests completed by the model itself, possibly after their batch
        self._executor = executor
        self._order = order
        self._named = named
        self.instances = InstanceSet(self, instances, self.tracker, limits)
        self._idle = self.instances.idle
        self._blocks = self.instances.blocks
        self.selector = selector_for(scheduler, self.instances, named, limits)
        self.threads = ModelThreads(name, self)
        self.expiry = ExpiryThread(name, self, self.tracker)
        self.closing = Closing(self, self.instances, self.tracker, self.threads, self.expiry)
        self._expiries = scheduler.expiries
        self._later_ns = NEVER  # when a batch is due, if `_take` found none
        self._claimed = False
        self._mean_ns = 0  # of recent batches
        if limits is not None:
            limits.attach(self, instances)

    @property
    def pending(self) -> int:
        """Requests queued."""
        with self.lock:
            return self.scheduler.pending

    @property
    def live_sequences(self) -> int:
        """Number of live sequences."""
        return self.scheduler.live_sequences

    @property
    def fast(self) -> bool:
        """True if running inline takes little time: recent batches were short, or are only started."""
        return not self._blocks or 0 < self._mean_ns < FAST_NS

    def continues(self, request: InferenceRequest) -> bool:
        """True if a request belongs to a live sequence."""
        with self.lock:
            return self.scheduler.continues(request)

    def end_sequence(self, correlation_id: int | str) -> None:
        """Ends a live sequence without a further request, if there is one."""
        with self.lock:
            self.scheduler.end_sequence(correlation_id)
            self.wake_if_due(self.clock())  # its slot may let others run
            self.closing.check()
        self.settle_limits()

    def submit(self, request: InferenceRequest, may_claim: bool = False) -> bool:
        """Queues a request.

        With `may_claim`, True if the caller has a claim: it calls `run_inline` or `release` soon, and until
        then no thread is woken.

        Raises:
            ClosedError: The version is being replaced or unloaded; the request was not queued.
            ConchError: The queue does not take the request.
        """
        batch: Batch | None = None
        try:
            with self.lock:
                if self.closing.begun and not self.scheduler.continues(request):
                    raise ClosedError
                now = self.clock()
                self.scheduler.submit(request, now)
                if self._order is not None:
                    self._order.enter(request)  # a refused request gets no place
                if self._expiries.next_ns < self.expiry.wakes_ns:
                    self.expiry.wake()
                if self._claimed or not self._idle:
                    # Pulled by the claimant, or by the next instance that is idle. A thread that bypasses
                    # claims can't wait for a claimant: it ends the claim below.
                    if self._blocks or not self._claimed or not _thread.bypasses:
                        return False
                elif may_claim and self.instances.allow_inline:
                    self._claimed = True
                    return True
                elif self._blocks:
                    self.wake_if_due(now)
                    return False
                else:
                    batch = self._take(now, False)
                    if batch is None:
                        return False
        except (ResourceExhaustedError, UnavailableError) as error:
            self._executor.refuse(request, error, self.pending, self._mean_ns, self.instances.count)
            raise
        if batch is None:  # bypassing
            self.release()
        else:
            self._run_batches(batch, None)
        return False

    def cancel(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Takes a request out of the queue, with those that can't be served without it.

        Returns what the caller is to complete: nothing if the request runs or is complete.
        """
        with self.lock:
            cancelled = self.scheduler.cancel(request)
            if cancelled:
                self.wake_if_due(self.clock())  # the others may now form a batch
            self.closing.check()
        self.settle_limits()
        return cancelled

    def take_queued(self) -> list[InferenceRequest]:
        """Takes everything out of the queue, for a shutdown that can't wait; the caller completes it."""
        with self.lock:
            taken = self.scheduler.drain()
            self.closing.check()
        self.settle_limits()
        return taken

    def run_inline(self, budget_ns: int | None = None) -> bool:
        """Runs claimed batches on the calling thread until nothing is ready.

        After `budget_ns` no further batch starts. True if the caller has the claim again, because a batch is
        due then: it is to call this or `release` again soon.
        """
        with self.lock:
            self._claimed = False
            now = self.clock()
            batch = self._take(now, budget_ns is None)
        return batch is not None and self._run_batches(batch, None if budget_ns is None else now + budget_ns)

    def run_batch_inline(self) -> bool:
        """Runs one claimed batch, waking a thread for others; True if a batch is due then: claimed again."""
        with self.lock:
            self._claimed = False
            batch = self._take(self.clock(), True)
        return batch is not None and self._run_batches(batch, 0)

    def release(self) -> None:
        """Ends the claim; the model's threads or this one run what is due."""
        batch: Batch | None = None
        with self.lock:
            self._claimed = False
            now = self.clock()
            if self._blocks:
                self.wake_if_due(now)
            else:
                batch = self._take(now, False)  # cheaper than waking another thread for that
        if batch is not None:
            self._run_batches(batch, None)

    def wake_if_due(self, now: int) -> None:
        """Wakes a thread if a batch is or will be due and no claim exists; called with the lock held."""
        if self._idle and not self._claimed:
            due = self._due_ns(now)
            if due is not None and (due <= now or due < self.threads.timed_ns):
                self.threads.wake(self.instances.count)

    def needed(self, now: int) -> Sequence[BackendInstance]:
        """The idle instances for which a batch is due, with their resources or not; with the lock held."""
        return self._idle if self.selector is None else self.selector.needed(now)

    def settle_limits(self) -> None:
        """Settles the limits, after requests have left the queue without running; without the lock."""
        if self.limits is not None:
            self.limits.return_unused_grants()

    def check_drained(self) -> bool:
        """See `Closing.check`; for the parts, which know only a `RunnerBase`."""
        return self.closing.check()

    def run_thread(self, woken: threading.Condition) -> None:
        """Runs batches on one of the model's threads, until the runner is closed."""
        while (batch := self._pull(woken)) is not None:
            self._run_batches(batch, None)
            del batch  # or the batch lives for as long as the thread sleeps

    def _pull(self, woken: threading.Condition) -> Batch | None:
        """Waits for a batch; None once the runner is closed and has nothing to run."""
        with self.lock:
            while True:
                now = self.clock()
                batch = self._take(now, True, True)
                if batch is not None:
                    return batch
                if self.closing.begun and not (self.scheduler.pending or self.scheduler.live_sequences):
                    self.closing.check()
                    return None
                self.threads.sleep(woken, now, self._later_ns)

    def _take(self, now: int, wake: bool, sleeps: bool = False) -> Batch | None:
        """Takes the next batch and its instance; called with the lock held.

        With `wake`, a thread is woken for other idle instances that block: short batches run sooner one after
        the other. With `sleeps`, the caller sleeps until `_later_ns` if there is nothing to run.
        """
        if self._expiries.next_ns <= now and not self.expiry.take_expired(now):
            self.closing.check()  # the last sequence may have ended
        if not self._idle or not self.scheduler.pending:
            self._later_ns = NEVER
            return None
        if self.selector is not None:
            decision = self.selector.next_batch(now)
        else:
            decision = self.scheduler.next_batch(now)
            if type(decision) is Batch:
                decision.runs_on = self._idle.pop()
        if type(decision) is Batch:
            decision.state = _TAKEN
            decision.compute_start_ns = now
            self.instances.running.add(decision)
            if wake and self._blocks and self._idle:
                self.wake_if_due(now)
            return decision
        self._later_ns = NEVER
        if type(decision) is WaitUntil:
            self._later_ns = decision.time_ns
            if not sleeps and decision.time_ns < self.threads.timed_ns:
                self.threads.wake(self.instances.count)
        return None

    def _due_ns(self, now: int) -> int | None:
        """Time of the next batch, None for none; called with the lock held, while an instance is idle."""
        if self.selector is not None:
            return self.selector.due_ns(now)
        if self.scheduler.eager:
            return now if self.scheduler.pending else None
        return self.scheduler.due_ns(now)

    def _run_batches(self, batch: Batch | None, end_ns: int | None) -> bool:
        """Runs or starts a batch, then what else is ready; the module has the steps.

        After `end_ns` no other batch starts; True if one is due then, which is left to the caller
        with the claim.
        """
        claimed = False
        while batch is not None:
            if self.limits is not None:
                self.limits.return_unused_grants()
            # 1.
            ran = self._executor.start(batch, self._done)
            with self.lock:
                now = self.clock()
                # 2. A batch that another thread has finished is released here: this thread is the later one.
                if ran or batch.state is _FINISHED:
                    self._release_batch(batch, now)
                else:
                    batch.state = _STARTED
                # 3.
                if end_ns is not None and now >= end_ns and self._is_due(now):
                    self._claimed = claimed = True
                    batch = None
                else:
                    batch = self._take(now, end_ns is None)
                # 4.
                if batch is None and self.closing.begun:
                    self.closing.check()
        if self.limits is not None:
            self.limits.return_unused_grants()
        return claimed

    def _is_due(self, now: int) -> bool:
        due = self._due_ns(now) if self._idle else None
        return due is not None and due <= now

    def _done(self, batch: Batch, outcome: BatchOutcome) -> None:
        """Finishes a batch whose `start` has not returned the outcome: after one that the thread finishes."""
        if batch.settled:
            return
        batch.settled = True
        received = _thread.received
        if received is not None:
            received.append((self, batch, outcome))
            return
        received = _thread.received = deque(((self, batch, outcome),))
        try:
            _finish_all(received)
        finally:
            _thread.received = None

    def finish(self, batch: Batch, outcome: BatchOutcome) -> None:
        """Settles the requests of a batch, and starts what is due then."""
        self._executor.finish(batch, outcome)
        following: Batch | None = None
        with self.lock:
            if batch.state is _TAKEN:
                batch.state = _FINISHED  # its starter goes on when `start` has returned
            else:
                now = self.clock()
                self._release_batch(batch, now)
                following = self._take(now, False)
            if following is None and self.closing.begun:
                self.closing.check()
        if following is not None:
            self._run_batches(following, None)
        elif self.limits is not None:
            self.limits.return_unused_grants()

    def _release_batch(self, batch: Batch, now: int) -> None:
        """Makes the instance of a finished batch idle; called with the lock held."""
        batch.state = _RELEASED
        spent = batch.compute_end_ns - batch.compute_start_ns
        self._mean_ns = (7 * self._mean_ns + spent) // 8 if self._mean_ns else spent
        instances = self.instances
        instances.running.remove(batch)
        instances.past_ns += now - batch.compute_start_ns
        if self._named:  # the other schedulers do not look at batches that have run
            self.scheduler.complete(batch, now)
        instance = batch.runs_on
        if self.limits is None and not instances.retiring and not instances.several:
            self._idle.append(instance)
            return
        idle = instances.give_back(instance)
        if self.limits is not None:
            assert self.selector is not None, "limits come with a selector"
            self.limits.release_instance(instance, idle and self.selector.has_use_for(instance, now))


def _finish_all(received: deque[tuple[Runner, Batch, BatchOutcome]]) -> None:
    """Finishes batches one after the other, and those whose outcomes come meanwhile."""
    while received:
        runner, batch, outcome = received.popleft()
        try:
            runner.finish(batch, outcome)
        except Exception:  # boundary: a thread of an instance; the other outcomes must be finished
            log.exception("a batch that was done could not be finished")
