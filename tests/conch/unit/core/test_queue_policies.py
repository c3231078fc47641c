"""Priority levels, bounded queues, timeouts and deadlines: rules by example, and against a naive model."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.support.core import make_request, make_spec
from tests.support.machines import run_machine

from conch.core.errors import ConchError, ResourceExhaustedError, UnavailableError
from conch.core.model_version import scheduler_for
from conch.core.request import InferenceRequest
from conch.core.scheduling.default import DefaultScheduler
from conch.core.scheduling.dynamic import DynamicBatcher
from conch.core.scheduling.priority import PriorityBatcher
from conch.core.scheduling.queue import NEVER, Expiries
from conch.core.scheduling.scheduler import IDLE, Batch, Scheduler, WaitUntil
from conch.core.spec import DynamicBatching, QueuePolicy

US = 1000


class Message:
    """Something that can be watched, and that a request keeps."""


@dataclass(frozen=True)
class Chosen:
    """Settings of a scheduler; a maximum of None stands for the default one, no policies for none."""

    most: int | None
    delay: int = 0
    bound: int = 0
    policies: tuple[QueuePolicy, ...] = ()
    default: int = 1

    def make(self) -> Scheduler:
        if self.most is None:
            return DefaultScheduler(self.bound)
        if not self.policies:
            return DynamicBatcher(self.most, (), self.delay, self.bound)
        return PriorityBatcher(self.most, (), self.delay, self.bound, self.policies, self.default)


@dataclass(eq=False)
class Waiting:
    """Record of a request in the naive model."""

    request: InferenceRequest
    level: int
    timeout_at: int | None
    delayed: int = 0


class PolicyMachine(RuleBasedStateMachine):
    """Every step is compared with a plain list, ordered anew each time."""

    @initialize(
        most=st.sampled_from([None, 0, 1, 3, 8]),
        delay=st.sampled_from([0, 0, 20 * US]),
        bound=st.sampled_from([0, 0, 4]),
        policies=st.lists(
            st.builds(
                QueuePolicy,
                st.booleans(),
                st.sampled_from([0, 10 * US, 30 * US]),
                st.booleans(),
                st.sampled_from([0, 0, 2]),
            ),
            max_size=3,
        ),
        default=st.integers(1, 3),
        looks=st.booleans(),
    )
    def choose(
        self,
        most: int | None,
        delay: int,
        bound: int,
        policies: list[QueuePolicy],
        default: int,
        looks: bool,
    ) -> None:
        self.looks = looks  # whether it asks when a batch is due before it asks for one; it need not
        given_policies = () if most is None else tuple(policies)
        self.chosen = Chosen(most, delay, bound, given_policies, min(default, max(len(given_policies), 1)))
        self.scheduler = self.chosen.make()
        self.now = 1_000_000
        self.waiting: list[Waiting] = []
        self.submitted: list[InferenceRequest] = []
        self.outcomes: list[InferenceRequest] = []
        self.moves = 0

    @rule(
        size=st.integers(1, 3),
        key=st.sampled_from("aaab"),
        priority=st.integers(0, 4),
        timeout_us=st.sampled_from([0, 5, 20, 1000]),
        deadline=st.sampled_from([None, None, 0, 15 * US, 40 * US]),
    )
    def submit(self, size: int, key: str, priority: int, timeout_us: int, deadline: int | None) -> None:
        request = make_request(
            batch_size=min(size, max(self.chosen.most or 1, 1)),
            batch_key=key,
            priority=priority,
            timeout_us=timeout_us,
            deadline_ns=None if deadline is None else self.now + deadline,
        )
        levels = self.chosen.policies or (QueuePolicy(),)
        level = priority if 1 <= priority <= len(levels) else self.chosen.default
        policy = levels[level - 1]
        on_level = sum(waiting.level == level for waiting in self.waiting)
        error: type[ConchError] | None = None
        if policy.max_size and on_level >= policy.max_size:
            error = UnavailableError
        elif self.chosen.bound and len(self.waiting) >= self.chosen.bound:
            error = ResourceExhaustedError
        if error is not None:
            with pytest.raises(error):
                self.scheduler.submit(request, self.now)
            assert not self.scheduler.cancel(request)
            return
        self.scheduler.submit(request, self.now)
        self.submitted.append(request)
        timeout = policy.timeout_ns
        if policy.allow_override and timeout_us and timeout_us * US < timeout:
            timeout = timeout_us * US
        self.waiting.append(Waiting(request, level, self.now + timeout if timeout else None))

    @rule(us=st.integers(0, 25))
    def advance(self, us: int) -> None:
        self.now += us * US

    @rule(index=st.integers(0, 60))
    def cancel(self, index: int) -> None:
        if self.submitted:
            request = self.submitted[index % len(self.submitted)]
            queued = any(waiting.request is request for waiting in self.waiting)
            assert bool(self.scheduler.cancel(request)) is queued
            if queued:
                self.forget([request])

    @rule()
    def expire(self) -> None:
        levels = self.chosen.policies or (QueuePolicy(),)
        gone, moved = [], []
        for waiting in self.waiting:
            deadline = waiting.request.deadline_ns
            ends = [time for time in (deadline, waiting.timeout_at) if time is not None]
            if not ends or min(ends) > self.now:
                continue
            if levels[waiting.level - 1].delays and (deadline is None or deadline > self.now):
                moved.append((min(ends), waiting))
            else:
                gone.append(waiting.request)
        before = self.scheduler.expiries.next_ns
        expired = self.scheduler.expired(self.now)
        assert {id(request) for request in expired} == {id(request) for request in gone}
        assert len(expired) == len(gone)
        assert before <= self.now or not (gone or moved), "nobody would have come to look"
        assert self.scheduler.expiries.next_ns > self.now
        # Those that pass their timeout together are delayed in the order of their timeouts; ties, which
        # only the heap decides, are told apart by asking nothing of them.
        for _, waiting in sorted(moved, key=lambda pair: pair[0]):
            self.moves += 1
            waiting.delayed, waiting.timeout_at = self.moves, None
        self.forget(gone)

    @rule()
    def take(self) -> None:
        self.expire()
        self.take_without_expiring()

    def take_without_expiring(self) -> bool:
        due = self.scheduler.due_ns(self.now) if self.looks else None
        decision = self.scheduler.next_batch(self.now)
        if not isinstance(decision, Batch):
            assert decision is not IDLE or not self.waiting
            if isinstance(decision, WaitUntil):
                assert decision.time_ns > self.now
                assert not self.looks or due == decision.time_ns
            return False
        assert not self.looks or (due is not None and due <= self.now)
        taken = [next(w for w in self.waiting if w.request is request) for request in decision.requests]
        left = [waiting for waiting in self.waiting if waiting not in taken]
        ranks = [(waiting.level, waiting.delayed > 0) for waiting in taken]
        assert ranks == sorted(ranks), "a level served before a higher one"
        if left:
            assert max(ranks) <= min((waiting.level, waiting.delayed > 0) for waiting in left)
        for rank in set(ranks):
            if not rank[1]:
                in_time = [w for w in self.waiting if (w.level, w.delayed > 0) == rank]
                served = [w for w in taken if (w.level, w.delayed > 0) == rank]
                assert served == in_time[: len(served)], "out of order within a level"
        assert decision.size == sum(request.batch_size for request in decision.requests)
        assert (
            decision.size <= max(self.chosen.most or 1, 1)
            and len({r.batch_key for r in decision.requests}) == 1
        )
        self.forget(decision.requests)
        return True

    def forget(self, requests: list[InferenceRequest]) -> None:
        self.waiting = [waiting for waiting in self.waiting if waiting.request not in requests]
        self.outcomes += requests

    @invariant()
    def counted(self) -> None:
        assert self.scheduler.pending == len(self.waiting)
        if not self.looks:
            return
        due = self.scheduler.due_ns(self.now)
        assert (due is None) == (not self.waiting)
        if due is not None and self.waiting:
            assert due <= max(self.now, max(w.request.queued_ns for w in self.waiting) + self.chosen.delay)

    def teardown(self) -> None:
        self.now = 1 << 62
        while self.take_without_expiring():
            pass
        assert not self.waiting
        assert sorted(map(id, self.outcomes)) == sorted(map(id, self.submitted)), "each exactly once"
        assert isinstance(self.scheduler.expiries, Expiries)
        assert not self.scheduler.expiries.take(NEVER), "a request that has left is still timed"


TestPolicyMachine, TestSlowPolicyMachine = run_machine(PolicyMachine, 300)


def ids(decision: object) -> list[str]:
    assert isinstance(decision, Batch), "no batch"
    return [request.id for request in decision.requests]


def submit(scheduler: Scheduler, names: str, now: int = 0, **settings: Any) -> None:
    for name in names:
        scheduler.submit(make_request(id=name, **settings), now)


def test_levels_are_served_strictly_and_unknown_ones_as_the_default() -> None:
    scheduler = PriorityBatcher(0, policies=(QueuePolicy(),) * 3, default_level=2)
    for name, priority in (("a", 3), ("b", 0), ("c", 4), ("d", 1), ("e", 2**64 - 1), ("f", 2)):
        submit(scheduler, name, priority=priority)
    served = [ids(scheduler.next_batch(0)) for _ in range(6)]
    assert served == [["d"], ["b"], ["c"], ["e"], ["f"], ["a"]]


def test_a_higher_level_goes_into_a_batch_that_waits_first() -> None:
    scheduler = PriorityBatcher(4, (), 100, 0, (QueuePolicy(),) * 2)
    submit(scheduler, "abc", 0, priority=2)
    assert scheduler.due_ns(10) == 100
    submit(scheduler, "de", 20, priority=1)
    assert ids(scheduler.next_batch(20)) == ["d", "e", "a", "b"]
    assert scheduler.due_ns(20) == 100, "the delay of the one left counts from when it came"


def test_the_delay_runs_for_the_oldest_whatever_its_level() -> None:
    scheduler = PriorityBatcher(4, (), 100, 0, (QueuePolicy(),) * 2)
    submit(scheduler, "a", 0, priority=2)
    submit(scheduler, "b", 60, priority=1)
    assert scheduler.due_ns(60) == 100


def test_a_full_level_refuses_with_tritons_text_and_counts_what_is_being_formed() -> None:
    scheduler = PriorityBatcher(8, (), 100, 0, (QueuePolicy(max_size=2), QueuePolicy()))
    submit(scheduler, "ab", priority=1)
    scheduler.due_ns(0)
    with pytest.raises(UnavailableError) as raised:
        submit(scheduler, "c", priority=1)
    assert raised.value.message == "[request id: c] Exceeds maximum queue size"
    submit(scheduler, "ddd", priority=2)
    scheduler.next_batch(100)
    submit(scheduler, "ef", 100, priority=1)


@pytest.mark.parametrize(
    "chosen", [Chosen(None, bound=2), Chosen(8, bound=2), Chosen(8, 0, 2, (QueuePolicy(),))]
)
def test_the_bound_refuses_with_a_hint(chosen: Chosen) -> None:
    scheduler = chosen.make()
    submit(scheduler, "ab")
    with pytest.raises(ResourceExhaustedError) as raised:
        submit(scheduler, "c")
    assert raised.value.message == (
        "[request id: c] 2 requests are waiting, the most the model's queue takes; "
        "retry after a pause, a longer one each time"
    )
    assert scheduler.pending == 2
    scheduler.next_batch(0)
    submit(scheduler, "d")


@pytest.mark.parametrize(
    ("policy", "asked_us", "timeout_us"),
    [
        (QueuePolicy(timeout_ns=50 * US), 10, 50),
        (QueuePolicy(timeout_ns=50 * US, allow_override=True), 10, 10),
        (QueuePolicy(timeout_ns=50 * US, allow_override=True), 50, 50),
        (QueuePolicy(timeout_ns=50 * US, allow_override=True), 90, 50),
        (QueuePolicy(timeout_ns=50 * US, allow_override=True), 0, 50),
        (QueuePolicy(timeout_ns=50 * US, allow_override=True), -1, 50),
        (QueuePolicy(timeout_ns=0, allow_override=True), 10, 0),
    ],
)
def test_a_request_may_only_shorten_its_timeout(policy: QueuePolicy, asked_us: int, timeout_us: int) -> None:
    scheduler = PriorityBatcher(0, policies=(policy,))
    submit(scheduler, "a", 7, timeout_us=asked_us)
    assert scheduler.expiries.next_ns == (7 + timeout_us * US if timeout_us else NEVER)
    if timeout_us:
        assert not scheduler.expired(6 + timeout_us * US)
        assert [request.id for request in scheduler.expired(7 + timeout_us * US)] == ["a"]
        assert scheduler.next_batch(1 << 40) is IDLE


def test_delayed_requests_come_after_those_in_time_and_before_lower_levels() -> None:
    scheduler = PriorityBatcher(0, policies=(QueuePolicy(delays=True, timeout_ns=50), QueuePolicy()))
    submit(scheduler, "ab", 0, priority=1)
    submit(scheduler, "c", 0, priority=2)
    submit(scheduler, "d", 10, priority=1)
    assert scheduler.expired(50) == []
    submit(scheduler, "e", 55, priority=1)
    assert "".join(ids(scheduler.next_batch(55))[0] for _ in range(5)) == "deabc"


def test_a_delayed_request_still_has_its_deadline() -> None:
    scheduler = PriorityBatcher(4, (), 500, 0, (QueuePolicy(delays=True, timeout_ns=50),))
    submit(scheduler, "a", 0, deadline_ns=80)
    assert (scheduler.due_ns(0), scheduler.expired(50)) == (500, [])
    assert scheduler.expiries.next_ns == 80
    assert [request.id for request in scheduler.expired(80)] == ["a"]
    assert scheduler.pending == 0 and scheduler.next_batch(1000) is IDLE


def test_what_expires_leaves_a_batch_that_is_being_formed() -> None:
    scheduler = DynamicBatcher(4, (), 100)
    submit(scheduler, "a", 0, deadline_ns=30)
    submit(scheduler, "b", 20)
    assert scheduler.due_ns(20) == 100
    assert [request.id for request in scheduler.expired(30)] == ["a"]
    assert scheduler.due_ns(30) == 120


@pytest.mark.parametrize(
    "chosen", [Chosen(None), Chosen(4), Chosen(4, policies=(QueuePolicy(timeout_ns=9),))]
)
def test_nothing_that_has_left_is_kept(chosen: Chosen) -> None:
    """While no instance asks for a batch, clients come and go; the queue must not grow with them."""
    scheduler = chosen.make()
    gc.disable()
    try:
        seen = []
        for number in range(1000):
            message = Message()
            request = make_request(deadline_ns=1 << 50, context=message)
            seen.append(weakref.ref(message))
            scheduler.submit(request, number)
            assert scheduler.cancel(request)
            del request, message
        assert sum(reference() is not None for reference in seen) < 100
    finally:
        gc.enable()


def test_times_of_those_that_left_are_swept() -> None:
    expiries = Expiries()
    stays = make_request()
    expiries.add(stays, 5)
    for time in range(1000):
        request = make_request()
        expiries.add(request, 10 + time)
        expiries.discard(request)
    assert expiries.take(4) == []
    assert expiries.next_ns == 5
    assert expiries.take(1 << 40) == [stays]
    assert expiries.next_ns == NEVER


def test_the_config_chooses_the_scheduler() -> None:
    batching = DynamicBatching(policies=(QueuePolicy(max_size=1),))
    scheduler = scheduler_for(make_spec(0, batching=batching))
    assert isinstance(scheduler, PriorityBatcher)
    submit(scheduler, "a")
    with pytest.raises(UnavailableError):
        submit(scheduler, "b")
