"""Drives a scheduler with threads: the lock, the idle instances and the threads of one model version.

An idle instance pulls its next batch on a submitting thread that claimed it (inline execution), or on one of
the model's own threads, which are started on demand, at most one for each instance.

    ========  ================================  ===========================================
    claim     event                             effect
    ========  ================================  ===========================================
    none      `submit(may_claim=True)`, idle    claimed; the caller gets True
    claimed   another `submit`                  queued; no thread is woken
    claimed   `run_inline` takes a batch        none
    none      its budget is used up, work left  claimed; the caller gets True again
    claimed   `release`                         none; a thread of the model is woken
    ========  ================================  ===========================================

While all instances are busy, none of these threads looks at the queue. The expiry thread, started with the
first request that has a time limit, completes expired requests. It sleeps until the earliest time known when
it fell asleep, so that most later requests do not wake it.

Guarantees: while an instance is idle and a batch is due, a claim exists or a thread of the model is awake.
Assumes: each claim is run or released soon; the scheduler is only called under the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from conch.core.backend import BackendInstance
from conch.core.clock import Clock
from conch.core.errors import ResourceExhaustedError, UnavailableError
from conch.core.execution.executor import Executor
from conch.core.execution.response_order import ResponseOrder
from conch.core.request import InferenceRequest
from conch.core.scheduling.queue import NEVER
from conch.core.scheduling.scheduler import Batch, Decision, Scheduler, WaitUntil
from conch.core.servable import ClosedError

_FAST_NS = 500_000  # mean batch time of a `fast` model
_LONGEST_WAIT_S = 3600.0  # timeouts of a config may exceed the platform's limit for waits


class Runner:
    """The instances of one model version and the queue they pull from.

    Args:
        name: Name of the model, for its threads.
        scheduler: The queue.
        instances: The model's instances, all idle.
        executor: Runs a batch on an instance.
        clock: Monotonic time in nanoseconds.
        order: Keeps responses in the order of the requests; None if the model does not ask for it.
    """

    __slots__ = (
        "_allows_inline", "_by_number", "_claimed", "_clock", "_closing", "_count", "_drained", "_enqueue",
        "_execute", "_executing", "_executor", "_expired", "_expirer", "_expirer_wakes_ns",
        "_expirer_woken", "_expiries", "_expiring", "_idle", "_lock", "_mean_ns", "_name", "_next_batch",
        "_next_number", "_retiring", "_return", "_scheduler", "_sleeping", "_threads", "_timed_ns",
        "_tracker",
    )  # fmt: skip

    _wakes: ClassVar[bool] = True
    """Whether a thread that takes a batch may wake another one."""

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        instances: Sequence[BackendInstance],
        executor: Executor,
        clock: Clock,
        order: ResponseOrder | None = None,
    ) -> None:
        self._name = name
        self._scheduler = scheduler
        self._enqueue = scheduler.submit if order is None else order.around(scheduler.submit)
        self._executor = executor
        self._clock = clock
        self._count = len(instances)
        self._idle = list(instances)
        self._by_number = dict(enumerate(instances))  # for batches that name their instance
        self._next_number = len(instances)
        self._retiring: list[BackendInstance] = []
        # Steps of a batch, which subclasses and a resize replace.
        self._next_batch: Callable[[int], Decision] = scheduler.next_batch
        self._execute = executor.run
        self._return: Callable[[BackendInstance], None] = self._idle.append
        self._lock = threading.Lock()
        self._sleeping: list[threading.Condition] = []
        self._drained = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []
        self._timed_ns = NEVER  # when the thread wakes that waits for a delayed batch
        self._claimed = False
        self._closing = False
        self._allows_inline = self._all_allow_inline(instances)
        self._executing = 0
        self._tracker = executor.tracker  # requests completed by the model itself, possibly after their batch
        self._tracker.on_none = self._on_none_open
        self._mean_ns = 0
        self._expiries = scheduler.expiries
        self._expirer: threading.Thread | None = None
        self._expirer_woken = threading.Condition(self._lock)
        self._expirer_wakes_ns = NEVER
        # Taken out of the queue, and how many of them are not complete yet.
        self._expired: list[InferenceRequest] = []
        self._expiring = 0

    @property
    def pending(self) -> int:
        """Requests queued."""
        with self._lock:
            return self._scheduler.pending

    @property
    def running(self) -> int:
        """Requests that run, or that the model completes after `execute` has returned."""
        with self._lock:
            # Those of a decoupled model are open from the start of execution to the last response.
            return self._tracker.count + (0 if self._tracker.decoupled else self._executing)

    @property
    def fast(self) -> bool:
        """Whether recent batches were short; False before the first one."""
        return 0 < self._mean_ns < _FAST_NS

    def submit(self, request: InferenceRequest, may_claim: bool = False) -> bool:
        """Queues a request.

        With `may_claim`, True if the caller has a claim: it calls `run_inline` or `release` soon, and until
        then no thread is woken.

        Raises:
            ClosedError: The version is being replaced or unloaded; the request was not queued.
            ConchError: The queue does not take the request.
        """
        try:
            with self._lock:
                if self._closing and not self._scheduler.continues(request):
                    raise ClosedError
                now = self._clock()
                self._enqueue(request, now)
                if self._expiries.next_ns < self._expirer_wakes_ns:
                    self._wake_expirer()
                if self._claimed or not self._idle:
                    return False  # pulled by the claimant, or by the next instance that is idle
                if may_claim and self._allows_inline:
                    self._claimed = True
                    return True
                self._wake_if_due(now)
        except (ResourceExhaustedError, UnavailableError) as error:
            self._executor.refuse(request, error, self.pending, self._mean_ns, self._count)
            raise
        return False

    _submit = submit  # for a subclass: `super()` would take a tenth of the time of the whole call

    def run_inline(self, budget_ns: int | None = None) -> bool:
        """Runs claimed batches on the calling thread until nothing is ready.

        After `budget_ns` no further batch starts. True if work is left then: the caller has the claim again.
        """
        with self._lock:
            self._claimed = False
            work = self._take(budget_ns is None)
            if work is None:
                return False
            instance, batch = work
            end = None if budget_ns is None else self._clock() + budget_ns
        return self._run(instance, batch, end)

    def run_batch_inline(self) -> bool:
        """Runs one claimed batch, waking a thread for what else is ready; True if claimed again."""
        with self._lock:
            self._claimed = False
            work = self._take(True)
        return work is not None and self._run(*work, 0)

    def release(self) -> None:
        """Releases a claim: the model's own threads run the batches."""
        with self._lock:
            self._claimed = False
            self._wake_if_due(self._clock())

    def _run(self, instance: BackendInstance, batch: Batch, end: int | None) -> bool:
        """Runs a batch, then what else is ready; True if time is up and the caller has the claim again."""
        while True:
            self._execute(instance, batch)
            spent = batch.compute_end_ns - batch.compute_start_ns
            # Without the lock: a lost update does no harm to a rough mean.
            self._mean_ns = spent if not self._mean_ns else (7 * self._mean_ns + spent) // 8
            with self._lock:
                now = self._clock()
                self._scheduler.complete(batch, now)
                self._return(instance)
                self._executing -= len(batch.requests) - batch.fillers
                if end is not None and now >= end and self._is_due(now):
                    self._claimed = True
                    return True
                work = self._take(end is None)
                if work is None:
                    self._check_drained()
                    return False
                instance, batch = work

    def _take(self, wake: bool) -> tuple[BackendInstance, Batch] | None:
        """Takes an idle instance and its next batch; called with the lock held.

        `wake` wakes a thread for other idle instances; short batches run sooner one after the other.
        """
        if not self._idle:
            return None
        now = self._clock()
        if self._expiries.next_ns <= now:
            self._expire(now)
        decision = self._next_batch(now)
        if type(decision) is Batch:
            instance = self._instance_for(decision)
            if wake and self._wakes:
                self._wake_if_due(now)
            return instance, decision
        if type(decision) is WaitUntil and decision.time_ns < self._timed_ns:
            self._wake()
        return None

    def _instance_for(self, batch: Batch) -> BackendInstance:
        """Takes the idle instance of a batch."""
        self._executing += len(batch.requests) - batch.fillers
        if batch.instance is None:
            return self._idle.pop()
        instance = self._by_number[batch.instance]
        self._idle.remove(instance)
        return instance

    def cancel(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Takes a request out of the queue, with those that can't be served without it.

        Returns what the caller is to complete: nothing if the request runs or is complete.
        """
        with self._lock:
            cancelled = self._scheduler.cancel(request)
            if cancelled:
                self._wake_if_due(self._clock())  # the others may now form a batch
            self._check_drained()
        self._after_removal()
        return cancelled

    @property
    def held(self) -> int:
        """Number of live sequences."""
        return self._scheduler.held

    def continues(self, request: InferenceRequest) -> bool:
        """Whether a request belongs to a live sequence."""
        with self._lock:
            return self._scheduler.continues(request)

    def close(self, timeout_s: float | None = None) -> bool:
        """Refuses new requests, finishes the accepted ones, and ends the threads.

        Returns whether everything finished in time; if not, the threads end with their batches.
        """
        with self._lock:
            self._closing = True
            self._scheduler.begin_closing(self._clock())
            self._wake_all()
            self._expirer_woken.notify()
            done = self._drained.wait_for(self._is_drained, timeout_s)
        if done:
            for thread in (*self._threads, *([] if self._expirer is None else [self._expirer])):
                if thread is not threading.current_thread():
                    thread.join()
        return done

    def take_queued(self) -> list[InferenceRequest]:
        """Takes everything out of the queue, for a shutdown that can't wait; the caller completes it."""
        with self._lock:
            taken = self._scheduler.drain()
            self._check_drained()
        self._after_removal()
        return taken

    def resize(
        self,
        added: Sequence[BackendInstance],
        surplus: Iterable[tuple[Sequence[BackendInstance], int]],
    ) -> list[BackendInstance]:
        """Adds and removes instances while requests run; no request is lost or waits for it.

        `surplus` has candidates and how many of them to remove: idle ones first, later ones before earlier.
        Returns the removed instances; busy ones still run their batch, see `wait_gone`.
        """
        with self._lock:
            going: list[BackendInstance] = []
            for candidates, count in surplus:
                going += sorted(reversed(candidates), key=self._rank)[:count]
            for instance in going:
                if self._rank(instance) > 0:
                    self._retiring.append(instance)
                else:
                    self._remove_idle(instance)
                    self._count -= 1
            self._add_new(added)
            self._count += len(added)
            self._by_number = {number: one for number, one in self._by_number.items() if one not in going}
            self._by_number |= enumerate(added, self._next_number)
            self._next_number += len(added)
            self._allows_inline = self._all_allow_inline(self._by_number.values())
            self._choose_return()
            self._wake_if_due(self._clock())
            return going

    def wait_gone(self, instances: Sequence[BackendInstance]) -> None:
        """Waits until instances that `resize` removed run no batch."""
        with self._lock:
            self._drained.wait_for(lambda: not any(one in self._retiring for one in instances))

    def _choose_return(self) -> None:
        self._return = self._return_or_retire if self._retiring else self._idle.append

    def _return_or_retire(self, instance: BackendInstance) -> None:
        """Makes an instance idle after its batch, or removes it; called with the lock held."""
        if instance in self._retiring:
            self._retiring.remove(instance)
            self._count -= 1
            self._choose_return()
            self._drained.notify_all()
        else:
            self._add_finished(instance)

    def _add_finished(self, instance: BackendInstance) -> None:
        """Makes an instance idle after its batch; called with the lock held."""
        self._idle.append(instance)

    def _add_new(self, instances: Iterable[BackendInstance]) -> None:
        """Adds new instances; called with the lock held."""
        self._idle += instances

    def _rank(self, instance: BackendInstance) -> int:
        """The order in which instances are removed; busy ones have a rank above 0."""
        return instance not in self._idle

    def _remove_idle(self, instance: BackendInstance) -> None:
        """Removes an instance that runs no batch."""
        self._idle.remove(instance)

    def _count_idle(self) -> int:
        """Number of instances that run no batch."""
        return len(self._idle)

    def _all_allow_inline(self, instances: Iterable[BackendInstance]) -> bool:
        """Whether batches may run inline."""
        return self._executor.allows_inline and all(instance.allows_inline for instance in instances)

    def _after_removal(self) -> None:
        """Hook, called without the lock when requests may have left the queue without running."""

    def _is_empty(self) -> bool:
        """Whether no instance has anything left to run."""
        return not (self._scheduler.pending or self._scheduler.held)

    def _is_drained(self) -> bool:
        return (
            self._count_idle() == self._count
            and self._is_empty()
            and not (self._expiring or self._tracker.count)
        )

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
            self._wake_all()
            self._expirer_woken.notify()

    def _expire(self, now: int) -> None:
        """Takes out expired requests for the expiry thread; called with the lock held."""
        expired = self._scheduler.expired(now)
        if expired:
            self._expired += expired
            self._expiring += len(expired)
            self._wake_expirer()
        else:
            self._check_drained()  # the last sequence may have ended

    def _wake_expirer(self) -> None:
        # Until it runs, only still earlier times need to wake it.
        self._expirer_wakes_ns = self._expiries.next_ns
        if self._expirer is None:
            self._expirer = threading.Thread(
                target=self._run_expirer, name=f"conch-{self._name}-timeouts", daemon=True
            )
            self._expirer.start()
        else:
            self._expirer_woken.notify()

    def _run_expirer(self) -> None:
        """Completes expired requests, outside the lock: a responder may take time."""
        while expired := self._next_expired():
            for request in expired:
                self._executor.expire(request, self._scheduler.expiry_text(request))
            self._after_removal()
            with self._lock:
                self._expiring -= len(expired)
                self._check_drained()
            del expired, request  # or they live for as long as the thread sleeps

    def _next_expired(self) -> list[InferenceRequest]:
        """Waits for requests to expire; an empty list once the runner is closed and drained."""
        with self._lock:
            while not (self._closing and self._is_drained()):
                now = self._clock()
                if self._expiries.next_ns <= now:
                    self._expired += (expired := self._scheduler.expired(now))
                    self._expiring += len(expired)
                    self._wake_if_due(now)  # the others may now form a batch
                    self._check_drained()
                    if not self._expired:
                        continue  # the last sequence may have ended
                if self._expired:
                    taken, self._expired = self._expired, []
                    self._check_drained()
                    return taken
                wakes_ns = self._expirer_wakes_ns = self._expiries.next_ns
                self._expirer_woken.wait(
                    None if wakes_ns >= NEVER else min((wakes_ns - now) / 1e9, _LONGEST_WAIT_S)
                )
        return []

    def _is_due(self, now: int) -> bool:
        due = self._scheduler.due_ns(now)
        return due is not None and due <= now

    def _wake_if_due(self, now: int) -> None:
        """Wakes a thread if a batch is or will be due and no claim exists; called with the lock held."""
        if self._idle and not self._claimed:
            due = self._scheduler.due_ns(now)
            if due is not None and (due <= now or due < self._timed_ns):
                self._wake()

    def _wake(self) -> None:
        """Wakes or starts a thread of the model; called with the lock held."""
        if self._sleeping:
            self._sleeping.pop().notify()
        elif len(self._threads) < self._count:
            thread = threading.Thread(
                target=self._thread, name=f"conch-{self._name}-{len(self._threads)}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def _wake_all(self) -> None:
        while self._sleeping:
            self._sleeping.pop().notify()

    def _thread(self) -> None:
        # One condition for each thread: it has been woken exactly if it has left `_sleeping`, also if its
        # wait times out at that moment.
        woken = threading.Condition(self._lock)
        while (work := self._pull(woken)) is not None:
            self._run(*work, None)
            del work  # or the batch lives for as long as the thread sleeps

    def _pull(self, woken: threading.Condition) -> tuple[BackendInstance, Batch] | None:
        """Waits for a batch; None once the runner is closed and has nothing to run."""
        with self._lock:
            while True:
                timeout: float | None = None
                timed = False
                if self._idle:
                    now = self._clock()
                    if self._expiries.next_ns <= now:
                        self._expire(now)
                    decision = self._next_batch(now)
                    if type(decision) is Batch:
                        instance = self._instance_for(decision)
                        self._wake_if_due(now)
                        return instance, decision
                    if type(decision) is WaitUntil and decision.time_ns < self._timed_ns:
                        timed = True
                        self._timed_ns = decision.time_ns
                        timeout = (decision.time_ns - now) / 1e9
                if self._closing and self._is_empty():
                    self._check_drained()
                    return None
                self._sleeping.append(woken)
                woken.wait(timeout)
                if woken in self._sleeping:
                    self._sleeping.remove(woken)  # its wait timed out
                if timed:
                    self._timed_ns = NEVER
