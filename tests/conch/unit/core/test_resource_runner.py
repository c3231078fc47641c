"""Models that share resources: no batch runs without, none that could run waits, and all is given back."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.core import (
    WAIT_S,
    Answers,
    Execute,
    FollowingInstance,
    Instance,
    LoadedModel,
    Shifted,
    Turnstile,
    echo,
    make_request,
    make_spec,
)
from tests.support.profiles import scaled

from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import CancelledError, ConchError, InvalidArgumentError, UnavailableError
from conch.core.execution.executor import Executor
from conch.core.execution.rate_limiter import RateLimiter
from conch.core.execution.resource_limits import ResourceLimits
from conch.core.execution.runner import Runner
from conch.core.model_statistics import ModelStatistics
from conch.core.model_version import Model
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.default import DefaultScheduler
from conch.core.scheduling.resource_scheduler import ResourceGrant, ResourceLimit
from conch.core.scheduling.scheduler import IDLE, Batch, Decision, Scheduler
from conch.core.servable import ClosedError
from conch.core.spec import DynamicBatching, InstanceGroup, QueuePolicy, Resource, SequenceBatching

MS = 1_000_000
HOUR = 3_600_000 * MS


def group(needs: str = "R1", count: int = 1, priority: int = 1, **more: object) -> InstanceGroup:
    """A group such as ``"R2 S1"``; a lower-case name is a shared resource."""
    resources = tuple(Resource(part[0], int(part[1:]), part[0].islower()) for part in needs.split())
    made = InstanceGroup("g", count=count, resources=resources, priority=priority)
    return replace(made, **more)  # type: ignore[arg-type]


def make_model(
    limiter: RateLimiter | None,
    *groups: InstanceGroup,
    execute: Execute = echo,
    name: str = "m",
    allows_inline: bool = True,
    batching: DynamicBatching | None = None,
    most: int = 0,
    clock: Clock = monotonic_ns,
) -> Model:
    spec = replace(make_spec(most, name=name, batching=batching), instance_groups=groups)
    loaded = LoadedModel(execute, Instance if allows_inline else FollowingInstance)
    return Model.create(spec, loaded, clock, limiter=limiter)


class Watched(RateLimiter):
    """A limiter that says when a runner has begun to wait."""

    def __init__(self, *limits: ResourceLimit) -> None:
        super().__init__(limits)
        self._refused = threading.Semaphore(0)
        self.asked = 0

    def ask(self, grants: Collection[ResourceGrant]) -> ResourceGrant | None:
        self.asked += 1
        granted = super().ask(grants)
        if granted is None:
            self._refused.release()
        return granted

    def wait_refused(self) -> None:
        assert self._refused.acquire(timeout=WAIT_S)


def submit(model: Model, answers: Answers, **changes: object) -> InferenceRequest:
    request = make_request(answers, name=model.spec.name, **changes)  # type: ignore[arg-type]
    model.submit(request)
    return request


def finish(answers: Answers, count: int) -> None:
    """Waits for so many answers, none of them an error."""
    assert answers.wait(count)
    for _, response, _ in answers.calls:
        assert response is not None
        assert response.error is None


def test_only_who_needs_something_asks() -> None:
    limiter = Watched()
    models = [
        make_model(None, group()),
        make_model(limiter, group("")),
        make_model(limiter, group("R0")),
        make_model(limiter, group(passive=True), group("")),
        make_model(limiter, group("R1")),
    ]
    claims = [model.submit(make_request(), may_claim=True) for model in models]
    asked = []
    for model, claim in zip(models, claims, strict=True):
        assert claim is not None
        before = limiter.asked
        claim.run_inline()
        asked.append(limiter.asked - before)
        assert model.close()
    assert asked == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("allows_inline", [True, False])
def test_two_models_never_run_at_the_same_time(allows_inline: bool) -> None:
    limiter, gate = Watched(), Turnstile()
    one, two = (
        make_model(limiter, group(), execute=gate, name=name, allows_inline=allows_inline) for name in "ab"
    )
    answers = Answers()
    submit(one, answers)
    gate.wait_entered()
    submit(two, answers)
    limiter.wait_refused()
    submit(one, answers)
    assert not gate.running
    assert (one.pending, two.pending) == (1, 1)
    gate.go.release()
    gate.wait_entered()
    assert not gate.running
    assert (one.pending, two.pending) == (1, 0), "the other one has run less"
    gate.go.release()
    gate.wait_entered()
    gate.go.release()
    finish(answers, 3)
    assert one.close()
    assert two.close()
    assert limiter.units_in_use == 0


def test_a_claimant_runs_what_it_may_and_leaves_the_rest() -> None:
    limiter, gate = Watched(), Turnstile()
    threads: list[threading.Thread] = []

    def noting(batch: Batch) -> Sequence[InferenceResponse | None]:
        threads.append(threading.current_thread())
        return echo(batch)

    held = make_model(limiter, group(), execute=gate, name="held")
    led = make_model(limiter, group(), execute=noting, name="led")
    answers = Answers()
    claim = led.submit(make_request(answers), may_claim=True)
    assert claim is not None
    assert claim.run_inline() is False
    assert threads == [threading.current_thread()]
    submit(held, answers)
    gate.wait_entered()
    claim = led.submit(make_request(answers), may_claim=True)
    assert claim is not None
    assert claim.run_inline() is False
    assert len(threads) == 1
    claim = led.submit(make_request(answers), may_claim=True)
    assert claim is not None
    claim.release()
    gate.go.release()
    finish(answers, 4)
    assert len(threads) == 3
    assert threading.current_thread() not in threads[1:]
    assert held.close()
    assert led.close()


def test_a_budget_that_is_used_up() -> None:
    limiter = RateLimiter()
    model = make_model(limiter, group())
    answers = Answers()
    claim = model.submit(make_request(answers), may_claim=True)
    assert claim is not None
    model.submit(make_request(answers), may_claim=True)
    assert claim.run_inline(0) is True
    assert claim.run_inline(0) is False
    assert answers.finals == 2
    assert limiter.units_in_use == 0
    assert model.close()


@pytest.mark.parametrize("end", ["cancel", "deadline", "drain"])
def test_what_waits_and_has_nothing_to_run_any_more_waits_no_more(end: str) -> None:
    limiter, gate, clock = Watched(), Turnstile(), Shifted()
    small, big, other = (
        make_model(limiter, group(needs), execute=gate, name=needs, clock=clock)
        for needs in ("R1", "R2", "R1 S1")
    )
    answers, gone = Answers(), Answers()
    submit(small, answers)
    gate.wait_entered()
    request = submit(big, gone, deadline_ns=clock() + HOUR if end == "deadline" else None)
    limiter.wait_refused()
    if end == "deadline":
        clock.ahead_ns += HOUR
        submit(big, gone, deadline_ns=0)  # which wakes what sleeps for an hour
        assert gone.wait(2)
    else:
        submit(other, answers)
        limiter.wait_refused()
        assert not gate.running, "what is left is set aside for the big one"
        if end == "cancel":
            assert big.cancel(request)
        else:
            assert big.fail_queued(UnavailableError("going")) == 1
    assert gone.finals_of(request) == 1
    if end == "deadline":
        submit(other, answers)
    gate.wait_entered()
    for _ in range(2):
        gate.go.release()
    finish(answers, 2)
    for model in (small, big, other):
        assert model.close()
    assert limiter.units_in_use == 0


def test_a_decoupled_model_holds_what_it_needs_while_it_executes() -> None:
    gate = Turnstile()
    limiter = Watched()
    begun: list[InferenceRequest] = []

    def answering_later(batch: Batch) -> None:
        gate(batch)
        begun.extend(batch.requests)

    spec = replace(make_spec(decoupled=True, name="decoupled"), instance_groups=(group(),))
    decoupled = Model.create(spec, LoadedModel(answering_later), limiter=limiter)
    plain = make_model(limiter, group(), name="plain")
    answers, later = Answers(), Answers()
    decoupled.submit(make_request(later, name="decoupled"))
    gate.wait_entered()
    submit(plain, answers)
    limiter.wait_refused()
    assert not answers.finals
    gate.go.release()
    finish(answers, 1)
    assert not later.finals, "what it sends after that needs nothing"
    begun[0].respond(InferenceResponse([]), True)
    assert later.wait(1)
    assert decoupled.close()
    assert plain.close()


def test_an_instance_that_needs_nothing_runs_while_another_waits() -> None:
    limiter, gate = Watched(), Turnstile()
    held = make_model(limiter, group(), execute=gate, name="held")
    mixed = make_model(limiter, group(), group(""), execute=gate, name="mixed")
    answers = Answers()
    submit(held, answers)
    gate.wait_entered()
    for _ in range(3):
        submit(mixed, answers)
    gate.wait_entered()
    assert not gate.running
    assert mixed.pending == 2
    for _ in range(4):
        gate.go.release()
    finish(answers, 4)
    assert held.close()
    assert mixed.close()


def test_who_waits_for_a_request_that_another_instance_took_waits_no_more() -> None:
    limiter, gates = Watched(), {name: Turnstile() for name in ("R1", "S1", "R1+S2", "S1 T1")}
    r, s, two, other = (
        make_model(limiter, *(group(needs) for needs in name.split("+")), execute=gate, name=name)
        for name, gate in gates.items()
    )
    answers = Answers()
    for model in (r, s):
        submit(model, answers)
        gates[model.spec.name].wait_entered()
    submit(two, answers)
    limiter.wait_refused()
    gates["R1"].go.release()
    gates["R1+S2"].wait_entered()
    submit(other, answers)
    gates["S1 T1"].wait_entered()  # nothing of S is set aside for an instance with nothing to run
    for gate in gates.values():
        gate.go.release()
    finish(answers, 4)
    for model in (r, s, two, other):
        assert model.close()
    assert limiter.units_in_use == 0


def test_nothing_is_held_while_a_batch_waits_for_company() -> None:
    limiter = RateLimiter()
    batching = DynamicBatching((4,), 3600 * 1000 * MS)
    patient = make_model(limiter, group(), name="patient", batching=batching, most=4)
    other = make_model(limiter, group(), name="other")
    answers = Answers()
    submit(patient, answers, rows=2)
    assert limiter.units_in_use == 0
    submit(other, answers)
    finish(answers, 1)
    submit(patient, answers, rows=2)
    finish(answers, 3)
    assert patient.close()
    assert other.close()


def test_a_delay_that_ends() -> None:
    limiter = RateLimiter()
    model = make_model(limiter, group(count=2), batching=DynamicBatching((4,), 20 * MS), most=4)
    answers = Answers()
    submit(model, answers, rows=1)
    finish(answers, 1)
    assert model.close()
    assert limiter.units_in_use == 0


@pytest.mark.parametrize(("priorities", "shares"), [((1, 2), (2, 1)), ((1, 1), (1, 1)), ((3, 1), (1, 3))])
def test_priorities(priorities: tuple[int, int], shares: tuple[int, int]) -> None:
    limiter, gate = Watched(), Turnstile()
    order: list[str] = []

    def noting(batch: Batch) -> Sequence[InferenceResponse | None]:
        order.append(batch.requests[0].model_name)
        return echo(batch)

    blocker = make_model(limiter, group(), execute=gate, name="blocker")
    answers = Answers()
    submit(blocker, answers)
    gate.wait_entered()
    models = [
        make_model(limiter, group(priority=priority), execute=noting, name=name)
        for name, priority in zip("ab", priorities, strict=True)
    ]
    for model in models:
        for _ in range(120):
            submit(model, answers)
        limiter.wait_refused()
    gate.go.release()
    finish(answers, 241)
    counts = Counter(order[:120])
    assert counts["a"] * shares[1] == pytest.approx(counts["b"] * shares[0], abs=4)
    for model in (blocker, *models):
        assert model.close()


def test_a_version_that_is_replaced_drains_and_leaves() -> None:
    limiter, gate = Watched(), Turnstile()
    old = make_model(limiter, group("R4"), execute=gate)
    answers = Answers()
    submit(old, answers)
    gate.wait_entered()
    submit(old, answers)
    new = make_model(limiter, group("R2"), execute=gate)
    submit(new, answers)
    limiter.wait_refused()
    with ThreadPoolExecutor(1) as pool:
        closed = pool.submit(old.close)
        assert not gate.running
        gate.go.release()
        gate.wait_entered()
        gate.go.release()
        gate.wait_entered()
        gate.go.release()
        finish(answers, 3)
        assert closed.result(WAIT_S)
    assert limiter.capacity == {("R", 0): 2}
    assert new.close()
    assert limiter.capacity == {}


def test_what_could_never_run_is_not_made() -> None:
    limiter = RateLimiter([ResourceLimit("R", 1)])
    loaded = LoadedModel()
    spec = replace(make_spec(), instance_groups=(group("R1"), group("R4")))
    with pytest.raises(InvalidArgumentError, match='Resource count for "R" is limited to 1'):
        Model.create(spec, loaded, limiter=limiter)
    assert loaded.instances == []
    assert loaded.closed == 1


def test_a_model_that_can_not_be_made_leaves_nothing_behind() -> None:
    class Failing(LoadedModel):
        def create_instance(self, placement: object) -> Instance:
            if self.instances:
                raise UnavailableError("no room")
            made = Instance()
            self.instances.append(made)
            return made

    limiter = RateLimiter()
    with pytest.raises(UnavailableError):
        Model.create(replace(make_spec(), instance_groups=(group("R3", 2),)), Failing(), limiter=limiter)
    assert limiter.capacity == {}


class Slots(Scheduler):
    """A request goes to the instance that its priority names, one at a time."""

    def __init__(self, instances: int) -> None:
        self._queue = DefaultScheduler()
        self._waiting: list[InferenceRequest] = []
        self._busy: set[int] = set()
        self.expiries = self._queue.expiries
        self.eager = False
        self.pending = 0

    def submit(self, request: InferenceRequest, now_ns: int) -> None:
        self._waiting.append(request)
        self.pending += 1

    def _next(self) -> InferenceRequest | None:
        return next((one for one in self._waiting if one.priority not in self._busy), None)

    def due_ns(self, now_ns: int) -> int | None:
        return None if self._next() is None else now_ns

    def next_batch(self, now_ns: int) -> Decision:
        request = self._next()
        return IDLE if request is None else self.next_batch_of(request.priority, now_ns)

    def instance_dues(self, now_ns: int) -> Mapping[int, int]:
        return {one.priority: now_ns for one in self._waiting if one.priority not in self._busy}

    def next_batch_of(self, number: int, now_ns: int) -> Decision:
        request = next(one for one in self._waiting if one.priority == number)
        self._waiting.remove(request)
        self.pending -= 1
        self._busy.add(number)
        return Batch([request], 1, number)

    def complete(self, batch: Batch, now_ns: int) -> None:
        assert batch.instance is not None
        self._busy.remove(batch.instance)

    def cancel(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        return ()

    def expired(self, now_ns: int) -> list[InferenceRequest]:
        return []

    def drain(self) -> list[InferenceRequest]:
        taken, self._waiting, self.pending = self._waiting, [], 0
        return taken


def slotted(limiter: RateLimiter, instances: Sequence[Instance]) -> Runner:
    grants = [ResourceGrant("m", [Resource("R", 1)], 0) for _ in instances]
    limiter.add(grants)
    return Runner(
        "m",
        Slots(len(instances)),
        instances,
        Executor(make_spec(), ModelStatistics(), time.monotonic_ns),
        time.monotonic_ns,
        named=True,
        limits=ResourceLimits(limiter, dict(zip(instances, grants, strict=True))),
    )


def test_batches_that_name_their_instance() -> None:
    limiter, gate = Watched(), Turnstile()
    instances = [Instance(gate) for _ in range(3)]
    runner = slotted(limiter, instances)
    answers = Answers()
    requests = [make_request(answers, priority=number) for number in (0, 0, 1, 2, 2, 1)]
    for request in requests:
        runner.submit(request)
    for _ in requests:
        gate.wait_entered()
        assert not gate.running
        gate.go.release()
    finish(answers, 6)
    assert runner.closing.close()
    assert limiter.units_in_use == 0
    ran = [[request for batch in instance.batches for request in batch] for instance in instances]
    assert ran == [requests[:2], [requests[2], requests[5]], requests[3:5]]


def test_batches_that_wait_for_their_instance_are_given_up_with_the_queue() -> None:
    limiter, gate = Watched(), Turnstile()
    runner = slotted(limiter, [Instance(gate) for _ in range(2)])
    answers = Answers()
    requests = [make_request(answers, priority=number) for number in (0, 1, 1)]
    runner.submit(requests[0])
    gate.wait_entered()
    for request in requests[1:]:
        runner.submit(request)
    limiter.wait_refused()
    assert sorted(map(id, runner.take_queued())) == sorted(map(id, requests[1:]))
    gate.go.release()
    finish(answers, 1)
    assert runner.closing.close()
    assert limiter.units_in_use == 0


def test_a_batch_that_waits_for_its_instance_keeps_the_runner_open() -> None:
    limiter = Watched()
    held = ResourceGrant("other", [Resource("R", 1)], 0)
    limiter.add([held])
    assert limiter.ask([held]) is held
    runner = slotted(limiter, [Instance()])
    answers = Answers()
    runner.submit(make_request(answers, priority=0))
    limiter.wait_refused()
    assert not runner.closing.close(0.0)
    limiter.notify(limiter.release_grant(held))
    finish(answers, 1)
    assert runner.closing.close()
    assert limiter.units_in_use == 0


class Blocked:
    """A model with three idle sequences, each with its row, whose resources another model holds."""

    def __init__(self) -> None:
        self.limiter, self.gate = Watched(), Turnstile()
        self.holder = make_model(self.limiter, group(), execute=self.gate, name="holder")
        self.clock = Shifted()
        sequence = SequenceBatching("DIRECT", 2 * HOUR)
        spec = replace(make_spec(4, name="m", sequence=sequence), instance_groups=(group(),))
        loaded = LoadedModel(echo, FollowingInstance)
        self.model = Model.create(spec, loaded, self.clock, limiter=self.limiter)
        self.answers, self.held = Answers(), Answers()
        for number in (1, 2, 3):
            self.submit(number, self.answers, sequence_start=True)
            assert self.answers.wait(number)
        submit(self.holder, self.held)
        self.gate.wait_entered()

    def submit(self, number: int, answers: Answers, **changes: object) -> InferenceRequest:
        return submit(self.model, answers, rows=1, correlation_id=number, **changes)

    def release(self) -> None:
        self.gate.go.release()
        finish(self.held, 1)

    def close(self) -> None:
        assert self.model.fail_queued(UnavailableError("live sequences")) == 0
        assert self.holder.close(WAIT_S)
        assert self.model.close(WAIT_S)
        assert self.limiter.units_in_use == 0


def test_requests_of_sequences_that_wait_for_resources_are_queued() -> None:
    made, gone = Blocked(), Answers()
    made.submit(3, gone)
    made.limiter.wait_refused()
    seen = made.model.statistics.snapshot()
    assert (made.model.pending, seen.pending, seen.running) == (1, 1, 0)
    assert made.model.fail_queued(UnavailableError("going")) == 1, "no fillers"
    assert gone.finals == 1
    assert made.model.statistics.snapshot().fail.count == 1
    made.release()
    made.close()


def test_a_request_of_a_sequence_that_waits_for_resources_is_cancelled() -> None:
    made, gone = Blocked(), Answers()
    request = made.submit(3, gone)
    made.limiter.wait_refused()
    assert made.model.cancel(request)
    assert isinstance(gone.response(request).error, CancelledError)
    made.release()
    made.submit(3, made.answers)
    finish(made.answers, 4)
    made.close()


def test_a_request_of_a_sequence_that_waits_for_resources_expires() -> None:
    made, gone = Blocked(), Answers()
    request = made.submit(3, gone, deadline_ns=made.clock() + HOUR)
    made.limiter.wait_refused()
    made.clock.ahead_ns += HOUR
    made.submit(2, gone, deadline_ns=0)  # which wakes what sleeps for an hour
    assert gone.wait(2), "while nothing has come free"
    assert gone.response(request).error is not None
    made.release()
    made.close()


def test_sequences_that_come_while_others_wait_for_resources_join_them() -> None:
    made = Blocked()
    for number in (3, 1, 2):
        made.submit(number, made.answers)
        if number == 3:
            made.limiter.wait_refused()
    before = made.model.statistics.snapshot().execution_count
    made.release()
    finish(made.answers, 6)
    assert made.model.statistics.snapshot().execution_count == before + 1
    made.close()


def test_what_is_not_due_any_more_is_run_when_it_is_due_again() -> None:
    """One of those that reached a preferred size is cancelled: the other one's delay must be kept."""
    limiter, gate = Watched(), Turnstile()
    held = make_model(limiter, group(), execute=gate, name="held")
    batching = DynamicBatching((4,), 100 * MS)
    patient = make_model(limiter, group(), name="patient", batching=batching, most=4)
    answers, gone = Answers(), Answers()
    submit(held, answers)
    gate.wait_entered()
    submit(patient, answers, rows=2)
    request = submit(patient, gone, rows=2)
    limiter.wait_refused()
    assert patient.cancel(request)
    gate.go.release()
    finish(answers, 2)
    assert held.close()
    assert patient.close()
    assert limiter.units_in_use == 0


class Meter:
    """Counts what runs, and fails the test when it is more than there is."""

    def __init__(self, capacity: dict[str, int], failing: float, seed: int) -> None:
        self._lock = threading.Lock()
        self._free = dict(capacity)
        self._failing = failing
        self._random = random.Random(seed)
        self.problems: list[str] = []

    def execute(self, needs: dict[str, int]) -> Execute:
        def run(batch: Batch) -> Sequence[InferenceResponse | None]:
            with self._lock:
                for name, count in needs.items():
                    self._free[name] -= count
                    if self._free[name] < 0:
                        self.problems.append(f"{name} is over its capacity")
                fails = self._random.random() < self._failing
            try:
                if fails:
                    raise ValueError("told to")
                return echo(batch)
            finally:
                with self._lock:
                    for name, count in needs.items():
                        self._free[name] += count

        return run


NEEDS: tuple[dict[str, int], ...] = ({"R": 1}, {"R": 2}, {"R": 3, "S": 1}, {"S": 1}, {"R": 1, "S": 1}, {})


def hammer(meter: Meter, limiter: RateLimiter, seed: int, requests: int) -> None:
    """Threads submit, run inline, release and cancel on models that share resources; then all is closed."""
    policy = QueuePolicy(timeout_ns=2 * MS, allow_override=True)
    models = [
        make_model(
            limiter,
            group(
                " ".join(f"{name}{count}" for name, count in needs.items()), 1 + number % 2, 1 + number % 3
            ),
            execute=meter.execute(needs),
            name=f"m{number}",
            allows_inline=number % 3 != 2,
            batching=(None, DynamicBatching(), DynamicBatching((2,), MS, (policy,)))[number % 3],
            most=4,
        )
        for number, needs in enumerate(NEEDS)
    ]
    answers = Answers()
    sent: list[InferenceRequest] = []

    def client(number: int) -> None:
        chance = random.Random(seed * 100 + number)
        for _ in range(requests):
            model = chance.choice(models)
            request = make_request(answers, rows=1, name=model.spec.name)
            sent.append(request)
            try:
                claim = model.submit(request, may_claim=chance.random() < 0.7)
            except ClosedError:
                request.fail(UnavailableError("closed"))
                continue
            except ConchError as error:
                request.fail(error)
                continue
            if chance.random() < 0.2:
                model.cancel(request)
            if claim is None:
                continue
            if chance.random() < 0.2:
                claim.release()
            else:
                while claim.run_inline(chance.choice([0, 50_000, None])):
                    pass

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(client, number) for number in range(6)]:
            done.result(WAIT_S)
    assert answers.wait(len(sent)), [model.pending for model in models]
    with ThreadPoolExecutor(len(models)) as pool:
        assert all(pool.map(lambda model: model.close(WAIT_S), models))
    assert answers.finals == len(sent)
    assert Counter(id(request) for request, _, final in answers.calls if final).most_common(1)[0][1] == 1
    assert meter.problems == []
    assert limiter.units_in_use == 0
    assert limiter.capacity == {}


@settings(max_examples=scaled(6), deadline=None)
@given(seed=st.integers(0, 1000), failing=st.sampled_from([0.0, 0.3, 1.0]), limited=st.booleans())
def test_all_is_given_back_whatever_happens(seed: int, failing: float, limited: bool) -> None:
    limits = [ResourceLimit("R", 4), ResourceLimit("S", 2)] if limited else []
    meter = Meter({"R": 4, "S": 2} if limited else {"R": 3, "S": 1}, failing, seed)
    hammer(meter, RateLimiter(limits), seed, 60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_all_is_given_back_whatever_happens_for_long(seed: int) -> None:
    hammer(Meter({"R": 3, "S": 1}, 0.2, seed), RateLimiter(), seed, 400)


def test_grants_that_lead_to_grants_are_not_nested() -> None:
    """A thousand claims that are given back one after the other must not use up the stack."""
    limiter = RateLimiter()
    told: list[int] = []

    def passing_on(number: int) -> Callable[[], None]:
        def on_granted() -> None:
            told.append(number)
            limiter.notify(limiter.return_grants([grants[number]]))

        return on_granted

    grants = [ResourceGrant(str(number), [Resource("R", 1)], 0) for number in range(5000)]
    for number, grant in enumerate(grants):
        grant.notify_with(passing_on(number))
    limiter.add(grants)
    assert limiter.ask(grants[:1]) is grants[0]
    for grant in grants[1:]:
        limiter.ask([grant])
    limiter.notify(limiter.release_grant(grants[0]))
    assert told == list(range(1, 5000))
    assert limiter.units_in_use == 0


def test_cancelled_while_it_waits_for_resources() -> None:
    limiter, gate = Watched(), Turnstile()
    one, two = (make_model(limiter, group(), execute=gate, name=name) for name in "ab")
    answers, cancelled = Answers(), Answers()
    submit(one, answers)
    gate.wait_entered()
    request = submit(two, cancelled)
    limiter.wait_refused()
    assert two.cancel(request)
    error = cancelled.response(request).error
    assert isinstance(error, CancelledError)
    gate.go.release()
    finish(answers, 1)
    assert one.close()
    assert two.close()
    assert limiter.units_in_use == 0
