"""Drives a scheduler with threads: the lock, the condition and the idle instances of one model.

An idle instance pulls its next batch from the scheduler. The thread that submits requests may promise to run
batches on an idle instance itself (it leads); otherwise one of the model's own threads does. Those threads
are started when they are first needed, never more than there are instances.

While all instances are busy none of these threads looks at the queue, so requests that may wait only for so
long are seen to by one more thread, started with the first of them. It sleeps until the earliest time that
it has been told of; later requests with later times, as most are, do not wake it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from conch.core.backend import BackendInstance
from conch.core.clock import Clock
from conch.core.errors import ResourceExhaustedError, UnavailableError
from conch.core.execution.execution import Executor
from conch.core.execution.ordering import ResponseOrder
from conch.core.request import InferenceRequest
from conch.core.scheduling.base import Batch, Decision, Scheduler, WaitUntil
from conch.core.scheduling.expiry import NEVER
from conch.core.servable import ClosedError

_FAST_NS = 500_000
_LONGEST_WAIT_S = 3600.0  # the platform's own limit is passed by timeouts a config may well have


class Runner:
    """The instances of one model version and the queue they pull from.

    Args:
        name: Name of the model, for its threads.
        scheduler: The queue; every call to it is made under the runner's lock.
        instances: The model's instances, all idle.
        executor: Runs a batch on an instance.
        clock: Monotonic time in nanoseconds.
        order: Keeps the responses in the order of the requests; None where they leave as they come.
    """

    __slots__ = (
        "_by_number",
        "_clock",
        "_closing",
        "_count",
        "_drained",
        "_enqueue",
        "_execute",
        "_executing",
        "_executor",
        "_expired",
        "_expiries",
        "_idle",
        "_leads",
        "_lock",
        "_mean_ns",
        "_name",
        "_next_batch",
        "_next_number",
        "_open",
        "_promised",
        "_reaper",
        "_reaper_wakes_ns",
        "_reaper_woken",
        "_rest",
        "_retiring",
        "_scheduler",
        "_sleeping",
        "_threads",
        "_timed_ns",
        "_unanswered",
    )

    _wakes: ClassVar[bool] = True
    """Whether other threads may be woken by one that takes a batch."""

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
        # What a batch goes through, as a subclass or a resize wants it.
        self._next_batch: Callable[[int], Decision] = scheduler.next_batch
        self._execute = executor.run
        self._rest: Callable[[BackendInstance], None] = self._idle.append
        self._lock = threading.Lock()
        self._sleeping: list[threading.Condition] = []
        self._drained = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []
        self._timed_ns = NEVER  # until when a thread sleeps that is then to look again
        self._promised = False
        self._closing = False
        self._leads = self._may_be_led(instances)
        self._executing = 0
        self._open = executor.open  # answered by the model itself, possibly after their batch
        self._open.on_none = self._answered
        self._mean_ns = 0
        self._expiries = scheduler.expiries
        self._reaper: threading.Thread | None = None
        self._reaper_woken = threading.Condition(self._lock)
        self._reaper_wakes_ns = NEVER
        # Taken out of the queue for good, and how many of them have not been answered yet.
        self._expired: list[InferenceRequest] = []
        self._unanswered = 0

    @property
    def pending(self) -> int:
        """Requests queued."""
        with self._lock:
            return self._scheduler.pending

    @property
    def running(self) -> int:
        """Requests that are executed, or still answered by a model whose `execute` has returned."""
        with self._lock:
            # Those of a decoupled model are open from the start of their execution to their last response.
            return self._open.count + (0 if self._open.decoupled else self._executing)

    @property
    def fast(self) -> bool:
        """Whether its batches have lately been short, in `_FAST_NS`; False until that is known."""
        return 0 < self._mean_ns < _FAST_NS

    def submit(self, request: InferenceRequest, may_lead: bool = False) -> bool:
        """Queues a request.

        Args:
            request: A validated request.
            may_lead: Whether the caller is willing to run batches soon.

        Returns:
            Whether the caller has promised, by `may_lead`, to call `lead` or `hand_over` soon. Until then
            the model's own threads are left asleep.

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
                if self._expiries.next_ns < self._reaper_wakes_ns:
                    self._wake_reaper()
                if self._promised or not self._idle:
                    return False  # the one who promised, or whichever instance is done first, pulls it
                if may_lead and self._leads:
                    self._promised = True
                    return True
                self._wake_if_due(now)
        except (ResourceExhaustedError, UnavailableError) as error:
            self._executor.refuse(request, error, self.pending, self._mean_ns, self._count)
            raise
        return False

    _submit = submit  # for a subclass: `super()` takes a tenth of the time that all this takes

    def lead(self, budget_ns: int | None = None) -> bool:
        """Keeps a promise on the calling thread: runs batches until nothing is ready.

        Args:
            budget_ns: Nanoseconds after which no further batch is begun; None for no such limit.

        Returns:
            Whether the budget was used up and the promise given again.
        """
        with self._lock:
            self._promised = False
            work = self._take(budget_ns is None)
            if work is None:
                return False
            instance, batch = work
            end = None if budget_ns is None else self._clock() + budget_ns
        return self._run(instance, batch, end)

    def lead_one(self) -> bool:
        """Keeps a promise with one batch, and has others woken for what is left meanwhile.

        Returns:
            Whether something is ready afterwards and the promise has been given again.
        """
        with self._lock:
            self._promised = False
            work = self._take(True)
        return work is not None and self._run(*work, 0)

    def hand_over(self) -> None:
        """Gives a promise back: the model's own threads run the batches."""
        with self._lock:
            self._promised = False
            self._wake_if_due(self._clock())

    def _run(self, instance: BackendInstance, batch: Batch, end: int | None) -> bool:
        """Runs a batch, then what is ready for its instance; True if time was up before that."""
        while True:
            self._execute(instance, batch)
            spent = batch.compute_end_ns - batch.compute_start_ns
            # Written without the lock: a lost update does no harm to a rough mean.
            self._mean_ns = spent if not self._mean_ns else (7 * self._mean_ns + spent) // 8
            with self._lock:
                now = self._clock()
                self._scheduler.complete(batch, now)
                self._rest(instance)
                self._executing -= len(batch.requests) - batch.fillers
                if end is not None and now >= end and self._is_due(now):
                    self._promised = True
                    return True
                work = self._take(end is None)
                if work is None:
                    self._check_drained()
                    return False
                instance, batch = work

    def _take(self, wake: bool) -> tuple[BackendInstance, Batch] | None:
        """An idle instance and what it runs next; called with the lock held.

        Args:
            wake: Whether other idle instances are to run what is left. Not worth it for short batches,
                which are run one after the other sooner than a thread wakes.
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
        """Takes the idle instance that runs a batch."""
        self._executing += len(batch.requests) - batch.fillers
        if batch.instance is None:
            return self._idle.pop()
        instance = self._by_number[batch.instance]
        self._idle.remove(instance)
        return instance

    def cancel(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Takes a request out of the queue, with those that can't be served without it.

        Returns:
            What was taken out, for the caller to answer; nothing if it already runs or has been answered.
        """
        with self._lock:
            cancelled = self._scheduler.cancel(request)
            if cancelled:
                self._wake_if_due(self._clock())  # without it, the others may fit together
            self._check_drained()
        self._settle()
        return cancelled

    @property
    def held(self) -> int:
        """What has been begun and may have further requests."""
        return self._scheduler.held

    def continues(self, request: InferenceRequest) -> bool:
        """Whether a request belongs to something that this version has begun."""
        with self._lock:
            return self._scheduler.continues(request)

    def close(self, timeout_s: float | None = None) -> bool:
        """Refuses new requests, finishes those it has, and ends the threads.

        Args:
            timeout_s: How long to wait for requests to finish; None for as long as it takes.

        Returns:
            Whether everything finished in time. If not, the threads end when their batches do.
        """
        with self._lock:
            self._closing = True
            self._scheduler.begin_closing(self._clock())
            self._wake_all()
            self._reaper_woken.notify()
            done = self._drained.wait_for(self._is_drained, timeout_s)
        if done:
            for thread in (*self._threads, *([] if self._reaper is None else [self._reaper])):
                if thread is not threading.current_thread():
                    thread.join()
        return done

    def take_queued(self) -> list[InferenceRequest]:
        """Takes everything out of the queue, for a shutdown that can't wait; the caller answers it."""
        with self._lock:
            taken = self._scheduler.drain()
            self._check_drained()
        self._settle()
        return taken

    def resize(
        self,
        added: Sequence[BackendInstance],
        surplus: Iterable[tuple[Sequence[BackendInstance], int]],
    ) -> list[BackendInstance]:
        """Changes which instances there are while requests run; no request is lost or waits for it.

        Args:
            added: Instances to run batches from now on.
            surplus: Of which instances how many are to go: idle ones first, and the later ones before the
                earlier ones.

        Returns:
            Those that go. Of them, busy ones still run their batch; see `wait_gone`.
        """
        with self._lock:
            going: list[BackendInstance] = []
            for candidates, count in surplus:
                going += sorted(reversed(candidates), key=self._rank)[:count]
            for instance in going:
                if self._rank(instance) > 0:
                    self._retiring.append(instance)
                else:
                    self._withdraw(instance)
                    self._count -= 1
            self._put(added)
            self._count += len(added)
            self._by_number = {number: one for number, one in self._by_number.items() if one not in going}
            self._by_number |= enumerate(added, self._next_number)
            self._next_number += len(added)
            self._leads = self._may_be_led(self._by_number.values())
            self._choose_rest()
            self._wake_if_due(self._clock())
            return going

    def wait_gone(self, instances: Sequence[BackendInstance]) -> None:
        """Waits until instances that `resize` took out run nothing any more."""
        with self._lock:
            self._drained.wait_for(lambda: not any(one in self._retiring for one in instances))

    def _choose_rest(self) -> None:
        self._rest = self._rest_or_retire if self._retiring else self._idle.append

    def _rest_or_retire(self, instance: BackendInstance) -> None:
        """Puts an instance that has finished its batch where it belongs; called with the lock held."""
        if instance in self._retiring:
            self._retiring.remove(instance)
            self._count -= 1
            self._choose_rest()
            self._drained.notify_all()
        else:
            self._keep(instance)

    def _keep(self, instance: BackendInstance) -> None:
        """Puts an instance that has finished its batch to the idle ones; called with the lock held."""
        self._idle.append(instance)

    def _put(self, instances: Iterable[BackendInstance]) -> None:
        """Puts new instances to the idle ones; called with the lock held."""
        self._idle += instances

    def _rank(self, instance: BackendInstance) -> int:
        """Which instances are to go first; those that run something have a rank above 0."""
        return instance not in self._idle

    def _withdraw(self, instance: BackendInstance) -> None:
        """Takes an instance out that runs nothing."""
        self._idle.remove(instance)

    def _rests(self) -> int:
        """How many instances run nothing."""
        return len(self._idle)

    def _may_be_led(self, instances: Iterable[BackendInstance]) -> bool:
        """Whether threads that received requests may run their batches."""
        return self._executor.may_be_led and all(instance.leads for instance in instances)

    def _settle(self) -> None:
        """Called without the lock when requests may have left the queue without running."""

    def _is_empty(self) -> bool:
        """Whether nothing is left that an instance has to run."""
        return not (self._scheduler.pending or self._scheduler.held)

    def _is_drained(self) -> bool:
        return (
            self._rests() == self._count and self._is_empty() and not (self._unanswered or self._open.count)
        )

    def _answered(self) -> None:
        """Looks again whether it is drained, as no request is left that the model answers itself."""
        # Without the lock: a close that does not show here yet will find the number itself.
        if self._closing:
            with self._lock:
                self._check_drained()

    def _check_drained(self) -> None:
        """Lets `close` and the threads end if nothing is left to do; called with the lock held."""
        if self._closing and self._is_drained():
            self._drained.notify_all()
            self._wake_all()
            self._reaper_woken.notify()

    def _expire(self, now: int) -> None:
        """Takes out what may not wait any longer, for the reaper to answer; called with the lock held."""
        expired = self._scheduler.expired(now)
        if expired:
            self._expired += expired
            self._unanswered += len(expired)
            self._wake_reaper()
        else:
            self._check_drained()  # the last sequence may have been given up

    def _wake_reaper(self) -> None:
        # What it is told of is noted here: until it runs, only still earlier times need to wake it.
        self._reaper_wakes_ns = self._expiries.next_ns
        if self._reaper is None:
            self._reaper = threading.Thread(
                target=self._reap, name=f"conch-{self._name}-timeouts", daemon=True
            )
            self._reaper.start()
        else:
            self._reaper_woken.notify()

    def _reap(self) -> None:
        """Answers requests that have waited for too long, outside the lock: a responder may take time."""
        while expired := self._next_expired():
            for request in expired:
                self._executor.expire(request, self._scheduler.expiry_text(request))
            self._settle()
            with self._lock:
                self._unanswered -= len(expired)
                self._check_drained()
            del expired, request  # or their messages live for as long as the thread sleeps

    def _next_expired(self) -> list[InferenceRequest]:
        """Waits for requests to expire; an empty list once the runner is closed and empty."""
        with self._lock:
            while not (self._closing and self._is_drained()):
                now = self._clock()
                if self._expiries.next_ns <= now:
                    self._expired += (expired := self._scheduler.expired(now))
                    self._unanswered += len(expired)
                    self._wake_if_due(now)  # without them, the others may fit together
                    self._check_drained()
                    if not self._expired:
                        continue  # the last sequence may have been given up
                if self._expired:
                    taken, self._expired = self._expired, []
                    self._check_drained()
                    return taken
                wakes_ns = self._reaper_wakes_ns = self._expiries.next_ns
                self._reaper_woken.wait(
                    None if wakes_ns >= NEVER else min((wakes_ns - now) / 1e9, _LONGEST_WAIT_S)
                )
        return []

    def _is_due(self, now: int) -> bool:
        due = self._scheduler.due_ns(now)
        return due is not None and due <= now

    def _wake_if_due(self, now: int) -> None:
        """Has a thread look at the queue, if it holds something nobody has promised to see to."""
        if self._idle and not self._promised:
            due = self._scheduler.due_ns(now)
            if due is not None and (due <= now or due < self._timed_ns):
                self._wake()

    def _wake(self) -> None:
        """Sees to it that a thread of the model's own looks at the queue; called with the lock held."""
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
        # One condition for each thread: whether a thread has been woken is then exactly whether it has
        # left the list, also when it is woken in the moment its wait times out.
        woken = threading.Condition(self._lock)
        while (work := self._pull(woken)) is not None:
            self._run(*work, None)
            del work  # or the last batch, with its messages, lives for as long as the thread sleeps

    def _pull(self, woken: threading.Condition) -> tuple[BackendInstance, Batch] | None:
        """Waits for a batch; None once the runner is closed and empty."""
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
