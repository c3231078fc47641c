"""The schedulers as data in, data out: rules by example, and invariants over random interleavings."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.support.core import make_request, make_spec
from tests.support.machines import run_machine

from conch.core.model_version import scheduler_for
from conch.core.request import InferenceRequest, RequestState
from conch.core.scheduling.default import DefaultScheduler
from conch.core.scheduling.dynamic import DynamicBatcher
from conch.core.scheduling.scheduler import IDLE, Batch, Decision, Scheduler, WaitUntil
from conch.core.spec import DynamicBatching


@dataclass(frozen=True)
class Settings:
    """Settings of a scheduler; a maximum of None stands for the default one."""

    most: int | None
    preferred: tuple[int, ...] = ()
    delay: int = 0

    def make(self) -> Scheduler:
        if self.most is None:
            return DefaultScheduler()
        return DynamicBatcher(self.most, self.preferred, self.delay)


def expected(chosen: Settings, queue: list[InferenceRequest], now: int) -> int:
    """Number of requests that the rules send from the queue's head now; 0 to wait for the oldest's delay.

    Written from Triton's rules without keeping anything between calls.
    """
    if chosen.most is None:
        return 1
    most = max(chosen.most, 1)
    preferred = chosen.preferred or (most,)
    totals = list(accumulate(request.batch_size for request in queue))
    fitting = 1
    while fitting < len(queue) and totals[fitting] <= most and queue[fitting].batch_key == queue[0].batch_key:
        fitting += 1
    reached = [count for count in range(1, fitting + 1) if totals[count - 1] in preferred]
    # One more would pass every preferred size: the size below is the best one there is.
    passed = [
        count for count in range(1, fitting + 1) if count < len(queue) and totals[count] > max(preferred)
    ]
    best = max(reached) if reached else min(passed, default=0)
    expired = now >= queue[0].queued_ns + chosen.delay
    if best and not (chosen.delay and expired):
        return best
    grown_up = fitting < len(queue) or totals[fitting - 1] >= max(preferred)
    return fitting if grown_up or expired else 0


class Driver:
    """Drives a scheduler, keeps its own books, and checks every answer against them.

    Args:
        chosen: The scheduler's settings.
        looks: True if it asks when a batch is due before it asks for one. It need not, and a scheduler that
            has not been asked has not begun to form the batch.
    """

    def __init__(self, chosen: Settings, looks: bool = True) -> None:
        self.settings = chosen
        self.looks = looks
        self.scheduler = chosen.make()
        self.now = 1_000
        self.queue: list[InferenceRequest] = []
        self.running: list[Batch] = []
        self.cancelled: list[InferenceRequest] = []
        self.returned: list[InferenceRequest] = []
        self.submitted: list[InferenceRequest] = []
        # A batch that was closed by a request stays closed when that is cancelled, so that nothing has to
        # be examined again; after a cancellation a batch may therefore be sent earlier than from scratch.
        self.exact = True

    def submit(self, size: int, key: object) -> None:
        # The validation in front of every queue bounds the size; without batching all are of size 1.
        most = size if self.settings.most is None else max(self.settings.most, 1)
        request = make_request(batch_size=min(size, most), batch_key=key)
        self.scheduler.submit(request, self.now)
        assert request.state is RequestState.QUEUED
        assert request.queued_ns == self.now
        self.queue.append(request)
        self.submitted.append(request)

    def advance(self, ns: int) -> None:
        self.now += ns

    def look(self) -> int | None:
        """Checks `due_ns`, which must not change what comes next, and `eager`."""
        due = self.scheduler.due_ns(self.now)
        assert self.scheduler.pending == len(self.queue)
        if not self.queue:
            assert due is None
            return None
        assert due is not None
        assert due <= self.now or not self.scheduler.eager
        assert due <= max(self.queue[0].queued_ns + self.settings.delay, self.now)
        if self.exact:
            assert (due <= self.now) == bool(expected(self.settings, self.queue, self.now))
        return due

    def take(self) -> Decision:
        due = self.look() if self.looks else None
        count = expected(self.settings, self.queue, self.now) if self.queue else 0
        decision = self.scheduler.next_batch(self.now)
        if isinstance(decision, Batch):
            assert not self.looks or (due is not None and due <= self.now)
            self._check_batch(decision)
            if self.exact:
                assert len(decision.requests) == count
            self.running.append(decision)
            if not self.queue:
                self.exact = True
        elif isinstance(decision, WaitUntil):
            assert self.settings.delay, "nothing waits without a delay"
            assert not self.looks or due == decision.time_ns
            assert self.now < decision.time_ns <= self.queue[0].queued_ns + self.settings.delay
        else:
            assert decision is IDLE and not self.queue, "idle while something is pending"
        assert self.scheduler.pending == len(self.queue)
        return decision

    def _check_batch(self, batch: Batch) -> None:
        requests = batch.requests
        assert requests
        assert requests == self.queue[: len(requests)], "out of order, or skipped one"
        del self.queue[: len(requests)]
        assert batch.size == sum(request.batch_size for request in requests)
        assert len({request.batch_key for request in requests}) == 1
        assert all(request.state is RequestState.RUNNING for request in requests)
        if self.settings.most is None:
            assert len(requests) == 1
        else:
            assert batch.size <= max(self.settings.most, 1)
        self.returned += requests

    def cancel(self, index: int) -> None:
        """Cancels any request ever submitted; only a queued one is given back."""
        if not self.submitted:
            return
        request = self.submitted[index % len(self.submitted)]
        queued = any(request is waiting for waiting in self.queue)
        assert bool(self.scheduler.cancel(request)) is queued
        if queued:
            self.queue = [waiting for waiting in self.queue if waiting is not request]
            self.cancelled.append(request)
            self.exact = not self.queue and self.exact
            assert not self.scheduler.cancel(request), "cancelled twice"

    def complete(self) -> None:
        if self.running:
            self.scheduler.complete(self.running.pop(0), self.now)

    def drain(self) -> None:
        """Everything comes out in the end, and exactly once."""
        for _ in range(2 * len(self.queue) + 1):
            decision = self.take()
            if isinstance(decision, WaitUntil):
                self.now = decision.time_ns
            elif decision is IDLE:
                break
        assert not self.queue
        outcomes = [*self.returned, *self.cancelled]
        assert len(outcomes) == len(self.submitted)
        assert {id(request) for request in outcomes} == {id(request) for request in self.submitted}
        left = {id(request) for request in self.cancelled}
        assert self.returned == [request for request in self.submitted if id(request) not in left]


SETTINGS = st.one_of(
    st.just(Settings(None)),
    st.integers(0, 12).flatmap(
        lambda most: st.builds(
            Settings,
            st.just(most),
            st.lists(st.integers(1, max(most, 1)), max_size=3, unique=True).map(
                lambda sizes: tuple(sorted(sizes))
            ),
            st.sampled_from([0, 0, 7, 50]),
        )
    ),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Random interleavings, shrunk by hypothesis to the shortest failing one."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(Settings(None))

    @initialize(chosen=SETTINGS, looks=st.booleans())
    def choose(self, chosen: Settings, looks: bool) -> None:
        self.driver = Driver(chosen, looks)

    @rule(size=st.integers(1, 3), key=st.sampled_from(["a", "a", "a", "b"]))
    def submit(self, size: int, key: str) -> None:
        self.driver.submit(size, key)

    @rule(ns=st.integers(0, 60))
    def advance(self, ns: int) -> None:
        self.driver.advance(ns)

    @rule()
    def take(self) -> None:
        self.driver.take()

    @rule(index=st.integers(0, 100))
    def cancel(self, index: int) -> None:
        self.driver.cancel(index)

    @rule()
    def complete(self) -> None:
        self.driver.complete()

    @invariant()
    def due_agrees(self) -> None:
        if self.driver.looks:
            self.driver.look()

    def teardown(self) -> None:
        self.driver.drain()


TestSchedulerMachine, TestSlowSchedulerMachine = run_machine(SchedulerMachine, 300)


@pytest.mark.parametrize("seed", range(20))
def test_random_interleavings(seed: int) -> None:
    """Four thousand more of them, cheaper, with and without cancellations."""
    source = random.Random(seed)
    for _ in range(200):
        most = source.choice((None, 0, 1, 4, 8, 8))
        sizes = source.sample(range(1, (most or 1) + 1), k=min(source.randrange(3), most or 1))
        driver = Driver(
            Settings(most, tuple(sorted(sizes)), source.choice((0, 10, 40))), looks=source.random() < 0.5
        )
        cancels = source.random() < 0.5
        for _ in range(25):
            chance = source.random()
            if chance < 0.45:
                driver.submit(source.randint(1, 5), source.choice("aaab"))
            elif chance < 0.6:
                driver.advance(source.randrange(20))
            elif chance < 0.85:
                driver.take()
            elif chance < 0.95 or not cancels:
                driver.complete()
            else:
                driver.cancel(source.randrange(100))
        driver.drain()


def sizes_of(decision: Decision) -> list[int]:
    assert isinstance(decision, Batch), "no batch"
    return [request.batch_size for request in decision.requests]


@pytest.mark.parametrize(
    ("chosen", "sizes", "batch"),
    [
        pytest.param(Settings(8), [1], [1], id="no delay: one alone goes at once"),
        pytest.param(Settings(8), [1, 1, 1], [1, 1, 1], id="no delay: whatever waits goes"),
        pytest.param(Settings(4), [1] * 6, [1] * 4, id="never above the maximum"),
        pytest.param(Settings(4), [3, 2], [3], id="a request is never split"),
        pytest.param(Settings(4), [3, 2, 1], [3], id="a later one that fits does not overtake"),
        pytest.param(Settings(4), [4, 1], [4], id="a full request goes alone"),
        pytest.param(Settings(0), [1, 1], [1], id="without batching each goes alone"),
        pytest.param(Settings(8, (4,)), [1] * 4, [1] * 4, id="the preferred size"),
        pytest.param(Settings(8, (4,)), [1] * 6, [1] * 4, id="the preferred size out of more"),
        pytest.param(Settings(8, (2, 4)), [1] * 5, [1] * 4, id="the largest preferred size reached"),
        pytest.param(Settings(8, (2, 6)), [1] * 5, [1] * 2, id="the largest reached, not the largest"),
        pytest.param(Settings(8, (4,)), [3, 3], [3], id="passing the preferred size: what was below it"),
        pytest.param(Settings(8, (4, 8), 100), [1] * 4, [1] * 4, id="delay: a preferred size does not wait"),
        pytest.param(Settings(8, (4,), 100), [3, 5], [3], id="delay: what can't reach one any more"),
        pytest.param(Settings(4, (), 100), [2, 2], [2, 2], id="delay: a full batch does not wait"),
        pytest.param(Settings(4, (), 100), [3, 2], [3], id="delay: what can't grow does not wait"),
        pytest.param(Settings(None), [3, 3], [3], id="default: as the client sent it"),
    ],
)
@pytest.mark.parametrize("looks", [True, False])
def test_what_is_sent_at_once(chosen: Settings, sizes: list[int], batch: list[int], looks: bool) -> None:
    scheduler = chosen.make()
    for size in sizes:
        scheduler.submit(make_request(batch_size=size), 0)
    if looks:
        assert scheduler.due_ns(0) == 0
    assert sizes_of(scheduler.next_batch(0)) == batch


@pytest.mark.parametrize(
    ("chosen", "sizes"),
    [
        pytest.param(Settings(8, (), 100), [1], id="one alone"),
        pytest.param(Settings(8, (4,), 100), [1, 2], id="below the preferred size"),
        pytest.param(Settings(8, (), 100), [4, 3], id="below the maximum"),
    ],
)
def test_what_waits_goes_when_the_oldest_has_waited_for_the_delay(chosen: Settings, sizes: list[int]) -> None:
    scheduler = chosen.make()
    for age, size in enumerate(sizes):
        scheduler.submit(make_request(batch_size=size), age)
    for now in (10, 99):
        decision = scheduler.next_batch(now)
        assert isinstance(decision, WaitUntil)
        assert decision.time_ns == 100 == scheduler.due_ns(now)
    assert sizes_of(scheduler.next_batch(100)) == sizes


def test_after_the_delay_more_than_the_preferred_size_goes() -> None:
    scheduler = DynamicBatcher(8, (4,), 100)
    for _ in range(6):
        scheduler.submit(make_request(), 0)
    assert sizes_of(scheduler.next_batch(100)) == [1] * 6


def test_what_a_batch_leaves_waits_for_its_own_delay() -> None:
    scheduler = DynamicBatcher(8, (4,), 100)
    for now in range(6):
        scheduler.submit(make_request(), now)
    assert sizes_of(scheduler.next_batch(5)) == [1] * 4
    decision = scheduler.next_batch(5)
    assert isinstance(decision, WaitUntil)
    assert decision.time_ns == 104
    assert sizes_of(scheduler.next_batch(104)) == [1] * 2
    assert scheduler.next_batch(104) is IDLE


def test_a_different_key_closes_the_batch_before_it() -> None:
    scheduler = DynamicBatcher(8, (), 100)
    for key in ("a", "a", "b", "a"):
        scheduler.submit(make_request(batch_key=key), 0)
    assert sizes_of(scheduler.next_batch(0)) == [1, 1]
    assert sizes_of(scheduler.next_batch(0)) == [1]
    assert isinstance(scheduler.next_batch(0), WaitUntil)


def test_later_requests_join_a_batch_that_waits() -> None:
    scheduler = DynamicBatcher(4, (), 100)
    scheduler.submit(make_request(batch_size=2), 0)
    assert isinstance(scheduler.next_batch(0), WaitUntil)
    scheduler.submit(make_request(batch_size=2), 50)
    assert sizes_of(scheduler.next_batch(50)) == [2, 2]


def test_the_delay_of_a_cancelled_head_does_not_count() -> None:
    scheduler = DynamicBatcher(4, (), 100)
    first, second = make_request(), make_request()
    scheduler.submit(first, 0)
    scheduler.submit(second, 30)
    assert scheduler.due_ns(30) == 100
    assert scheduler.cancel(first)
    assert scheduler.due_ns(30) == 130
    assert scheduler.pending == 1


def test_the_config_chooses_the_scheduler() -> None:
    assert isinstance(scheduler_for(make_spec(8)), DefaultScheduler)
    batcher = scheduler_for(make_spec(8, batching=DynamicBatching((2,), 100)))
    assert isinstance(batcher, DynamicBatcher)
    batcher.submit(make_request(), 0)
    assert isinstance(batcher.next_batch(0), WaitUntil)
    batcher.submit(make_request(), 0)
    assert sizes_of(batcher.next_batch(0)) == [1, 1]
