"""More and fewer instances while requests run: none is lost, and the instances are those asked for."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.core import (
    WAIT_S,
    Answers,
    Execute,
    Instance,
    LoadedModel,
    Turnstile,
    echo,
    make_request,
    make_spec,
)
from tests.support.profiles import scaled

from conch.core.backend import BackendInstance
from conch.core.errors import InvalidArgumentError, UnavailableError
from conch.core.execution.executor import Executor
from conch.core.execution.instance_pool import Resize
from conch.core.execution.placement import Placement
from conch.core.execution.rate_limiter import RateLimiter
from conch.core.execution.runner import Runner
from conch.core.model_statistics import ModelStatistics
from conch.core.model_version import Model
from conch.core.request import InferenceResponse
from conch.core.scheduling.default import DefaultScheduler
from conch.core.scheduling.dynamic import DynamicBatcher
from conch.core.scheduling.resource_scheduler import GrantState, ResourceGrant
from conch.core.scheduling.scheduler import Batch, Decision
from conch.core.spec import InstanceGroup, ModelSpec, Resource, WarmupInput, WarmupSample


class Loaded(LoadedModel):
    """Makes instances until there is no room."""

    full = False

    def create_instance(self, placement: Placement) -> BackendInstance:
        if self.full:
            raise UnavailableError(f"no room for {placement.name}")
        return super().create_instance(placement)

    @property
    def open(self) -> list[str]:
        """Names of the instances that are not closed."""
        pairs = zip(self.placements, self.instances, strict=True)
        return sorted(f"{each.name}:{each.device_id}" for each, instance in pairs if not instance.closed)


def with_counts(spec: ModelSpec, *counts: int) -> ModelSpec:
    groups = zip(spec.instance_groups, counts, strict=True)
    return replace(spec, instance_groups=tuple(replace(group, count=count) for group, count in groups))


def make(
    *groups: InstanceGroup, execute: Execute = echo, limiter: RateLimiter | None = None
) -> tuple[Model, Loaded]:
    loaded = Loaded(execute)
    return Model.create(replace(make_spec(), instance_groups=groups), loaded, limiter=limiter), loaded


def resize(model: Model, *counts: int) -> Resize:
    """Resizes without waiting for what goes."""
    made = model.prepare_resize(with_counts(model.spec, *counts))
    made.commit()
    return made


def test_more_instances_run_what_waits() -> None:
    gate = Turnstile()
    model, loaded = make(InstanceGroup("g"), execute=gate)
    answers = Answers()
    for _ in range(3):
        model.submit(make_request(answers))
    gate.wait_entered()
    statistics, before = model.statistics, model.spec
    prepared = model.prepare_resize(with_counts(model.spec, 3))
    assert loaded.open == ["g_0:0", "g_1:0", "g_2:0"]
    assert model.spec is before
    prepared.commit()
    gate.wait_entered(2)
    assert [group.count for group in model.spec.instance_groups] == [3]
    for _ in range(3):
        gate.go.release()
    assert answers.wait(3)
    prepared.finish()
    assert model.statistics is statistics
    assert statistics.snapshot().success.count == 3
    assert model.close()
    assert loaded.open == []


def test_fewer_instances_idle_ones_first() -> None:
    gate = Turnstile()
    model, loaded = make(InstanceGroup("g", count=3), execute=gate)
    answers = Answers()
    model.submit(make_request(answers))
    gate.wait_entered()
    (busy,) = [
        placement.name
        for placement, instance in zip(loaded.placements, loaded.instances, strict=True)
        if instance.batches
    ]
    resize(model, 1).finish()  # nothing to wait for: the busy one stays
    assert loaded.open == [f"{busy}:0"]
    gate.go.release()
    assert answers.wait(1)
    assert model.close()


def test_a_busy_instance_finishes_its_batch_and_takes_no_other() -> None:
    gate = Turnstile()
    model, loaded = make(InstanceGroup("g", count=2), execute=gate)
    answers = Answers()
    for _ in range(4):
        model.submit(make_request(answers))
    gate.wait_entered(2)
    going = resize(model, 1)
    assert loaded.open == ["g_0:0", "g_1:0"]
    for _ in range(4):
        gate.go.release()
    assert answers.wait(4)
    going.finish()
    assert len(loaded.open) == 1
    assert sorted((instance.closed, len(instance.batches)) for instance in loaded.instances) == [
        (0, 3),
        (1, 1),
    ]
    assert model.close()


def test_readiness_does_not_wait_for_an_instance_that_closes() -> None:
    """Checks of readiness run on the I/O loop."""
    closing, may_close = threading.Event(), threading.Event()

    class Slow(Instance):
        def close(self) -> None:
            closing.set()
            assert may_close.wait(WAIT_S)
            super().close()

    groups = (InstanceGroup("a", count=2),)
    model = Model.create(replace(make_spec(), instance_groups=groups), LoadedModel(instance_class=Slow))
    going = resize(model, 1)
    with ThreadPoolExecutor(2) as pool:
        finished = pool.submit(going.finish)
        assert closing.wait(WAIT_S)
        try:
            assert pool.submit(lambda: (model.readiness, model.workers)).result(WAIT_S) == ([], [])
        finally:
            may_close.set()
        finished.result(WAIT_S)
    assert model.close()


def test_close_waits_for_what_still_goes() -> None:
    gate = Turnstile()
    model, loaded = make(InstanceGroup("g", count=2), execute=gate)
    answers = Answers()
    for _ in range(2):
        model.submit(make_request(answers))
    gate.wait_entered(2)
    going = resize(model, 1)
    assert not model.close(0.0)
    for _ in range(2):
        gate.go.release()
    assert answers.wait(2)
    assert model.close()
    going.finish()
    assert [instance.closed for instance in loaded.instances] == [1, 1]
    assert loaded.closed == 1


def test_names_of_all_groups_and_devices() -> None:
    model, loaded = make(
        InstanceGroup("g", "GPU", 1, (0, 3)), InstanceGroup("h", count=2), InstanceGroup("p", passive=True)
    )
    resize(model, 2, 2, 3).finish()
    assert loaded.open == ["g_0:0", "g_0:3", "g_1:0", "g_1:3", "h_0:0", "h_1:0", "p_0:0", "p_1:0", "p_2:0"]
    resize(model, 1, 1, 1).finish()
    assert loaded.open == ["g_0:0", "g_0:3", "h_0:0", "p_0:0"]
    resize(model, 1, 3, 1).finish()
    assert loaded.open == ["g_0:0", "g_0:3", "h_0:0", "h_1:0", "h_2:0", "p_0:0"]
    answers = Answers()
    for _ in range(20):
        model.submit(make_request(answers))
    assert answers.wait(20)
    assert model.close()
    for placement, instance in zip(loaded.placements, loaded.instances, strict=True):
        assert not (placement.passive and instance.batches)


def test_an_instance_that_can_not_be_made_changes_nothing() -> None:
    model, loaded = make(InstanceGroup("g"), InstanceGroup("h"))

    class Once(Loaded):
        def create_instance(self, placement: Placement) -> BackendInstance:
            made = super().create_instance(placement)
            self.full = True
            return made

    loaded.__class__ = Once
    spec = model.spec
    with pytest.raises(UnavailableError, match="no room for h_1"):
        model.prepare_resize(with_counts(spec, 2, 2))
    assert loaded.open == ["g_0:0", "h_0:0"]
    assert model.spec is spec
    answers = Answers()
    model.submit(make_request(answers))
    assert answers.wait(1)
    assert model.close()


def test_an_abandoned_resize() -> None:
    model, loaded = make(InstanceGroup("g"))
    model.prepare_resize(with_counts(model.spec, 4)).abandon()
    assert loaded.open == ["g_0:0"]
    assert [group.count for group in model.spec.instance_groups] == [1]
    assert model.close()


def test_new_instances_are_warmed_up_before_they_take_requests() -> None:
    seen: list[str] = []

    def noting(batch: Batch) -> Sequence[InferenceResponse | None]:
        seen.extend("request" if request.id else "sample" for request in batch.requests)
        return echo(batch)

    model, loaded = make(InstanceGroup("g"), execute=noting)
    sample = WarmupSample("w", (WarmupInput("IN", "FP32", (16,)),), count=2)
    prepared = model.prepare_resize(with_counts(model.spec, 3), [sample])
    assert [len(instance.batches) for instance in loaded.instances] == [0, 2, 2]
    prepared.abandon()
    bad = WarmupSample("bad", (WarmupInput("NO", "FP32", (16,)),))
    with pytest.raises(InvalidArgumentError, match="'bad'"):
        model.prepare_resize(with_counts(model.spec, 2), [bad])
    assert loaded.open == ["g_0:0"]
    assert model.close()


def test_resources_of_instances_that_come_and_go() -> None:
    gate = Turnstile()
    limiter = RateLimiter()
    model, loaded = make(InstanceGroup("g", resources=(Resource("R", 1),)), execute=gate, limiter=limiter)
    answers = Answers()
    for _ in range(3):
        model.submit(make_request(answers))
    gate.wait_entered()
    resize(model, 3).finish()
    assert limiter.units_in_use == 1
    resize(model, 1).finish()
    assert len(loaded.open) == 1
    for _ in range(3):
        gate.go.release()
    assert answers.wait(3)
    assert limiter.units_in_use == 0
    assert model.close()
    assert limiter.capacity == {}


def test_an_instance_that_waits_for_resources_and_goes_waits_no_more() -> None:
    asked = threading.Semaphore(0)
    grants: list[ResourceGrant] = []

    class Watched(RateLimiter):
        def add(self, added: Collection[ResourceGrant]) -> None:
            grants.extend(added)
            super().add(added)

        def ask(self, grants: Collection[ResourceGrant]) -> ResourceGrant | None:
            granted = super().ask(grants)
            asked.release()
            return granted

    gate = Turnstile()
    limiter = Watched()
    held = ResourceGrant("other", [Resource("R", 2)], 0)
    limiter.add([held])
    grants.clear()
    assert limiter.ask([held]) is held
    assert asked.acquire(blocking=False)
    groups = InstanceGroup("g", count=2, resources=(Resource("R", 2),)), InstanceGroup("h", count=2)
    model, loaded = make(*groups, execute=gate, limiter=limiter)
    answers = Answers()
    for _ in range(3):
        model.submit(make_request(answers))
    gate.wait_entered(2)
    assert asked.acquire(timeout=WAIT_S)
    assert all(grant.state is GrantState.WAITING for grant in grants)
    going = resize(model, 1, 1)
    assert sorted(grant.state.name for grant in grants) == ["RESTING", "WAITING"]
    limiter.notify(limiter.release_grant(held))
    for _ in range(3):
        gate.go.release()
    assert answers.wait(3)
    going.finish()
    assert len(loaded.open) == 2
    assert model.close()
    assert limiter.units_in_use == 0


def test_numbers_are_never_used_again() -> None:
    class Named(DynamicBatcher):
        """Its batches name their instance."""

        number = 0

        def instance_dues(self, now_ns: int) -> Mapping[int, int]:
            due_ns = self.due_ns(now_ns)
            return {} if due_ns is None else {self.number: due_ns}

        def next_batch_of(self, number: int, now_ns: int) -> Decision:
            decision = self.next_batch(now_ns)
            if isinstance(decision, Batch):
                decision.instance = number
            return decision

    def runs(number: int) -> Instance:
        """The instance that runs a batch for this number."""
        scheduler.number = number
        assert runner.submit(make_request(), True)
        runner.run_inline()
        (instance,) = [each for each in instances if each.batches]
        instance.batches.clear()
        return instance

    instances = [Instance() for _ in range(5)]
    scheduler = Named(1)
    runner = Runner(
        "m",
        scheduler,
        instances[:2],
        Executor(make_spec(), ModelStatistics(), time.monotonic_ns),
        time.monotonic_ns,
        named=True,
    )
    assert runner.instances.resize(instances[2:3], [(instances[:1], 1)]) == instances[:1]
    assert [runs(number) for number in (1, 2)] == instances[1:3]
    runner.instances.resize(instances[3:], [])
    assert [runs(number) for number in (1, 2, 3, 4)] == instances[1:]
    assert runner.closing.close()


class FollowingInstance(Instance):
    allows_inline = False


def test_whether_it_runs_inline_follows_the_instances() -> None:
    leading, following = Instance(), FollowingInstance()
    runner = Runner(
        "m",
        DefaultScheduler(),
        [leading],
        Executor(make_spec(), ModelStatistics(), time.monotonic_ns),
        time.monotonic_ns,
    )
    answers = Answers()
    runner.instances.resize([following], [])
    assert runner.submit(make_request(answers), True) is False
    assert answers.wait(1)
    going = runner.instances.resize([], [([following], 1)])
    runner.instances.wait_gone(going)
    assert runner.submit(make_request(answers), True) is True
    runner.run_inline()
    assert answers.wait(2)
    assert runner.closing.close()


@settings(max_examples=scaled(8), deadline=None)
@given(seed=st.integers(0, 1000), limited=st.booleans(), failing=st.booleans())
def test_resizing_under_load(seed: int, limited: bool, failing: bool) -> None:
    hammer(seed, limited, failing, 150, 15)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_resizing_under_load_for_long(seed: int) -> None:
    hammer(seed, bool(seed % 2), bool(seed % 3), 1000, 100)


def hammer(seed: int, limited: bool, failing: bool, requests: int, resizes: int) -> None:
    chance = random.Random(seed)
    lock = threading.Lock()

    together: list[threading.Barrier] = []

    def execute(batch: Batch) -> Sequence[InferenceResponse | None]:
        for barrier in together:
            barrier.wait(WAIT_S)
        with lock:
            fails = failing and chance.random() < 0.2
        if fails:
            raise ValueError("told to")
        return echo(batch)

    resources = (Resource("R", 1),) if limited else ()
    limiter = RateLimiter()
    groups = (InstanceGroup("g", resources=resources), InstanceGroup("h", count=2))
    model, loaded = make(*groups, execute=execute, limiter=limiter)
    answers = Answers()

    def client(number: int) -> None:
        for index in range(requests):
            request = make_request(answers)
            claim = model.submit(request, may_claim=number % 2 == 0)
            if claim is not None:
                claim.run_inline()
            if index % 7 == number:
                model.cancel(request)

    def change() -> None:
        order = random.Random(seed)
        for _ in range(resizes):
            counts = order.randint(1, 4), order.randint(1, 4)
            resize(model, *counts).finish()
            assert len(loaded.open) == sum(counts)

    with ThreadPoolExecutor(5) as pool:
        work: list[Callable[[], None]] = [change, *(partial(client, number) for number in range(4))]
        for done in [pool.submit(each) for each in work]:
            done.result(WAIT_S)
    assert answers.wait(4 * requests)
    # All instances run at the same time; those of "g" share one resource.
    counts = [group.count for group in model.spec.instance_groups]
    most = sum(counts) if not limited else 1 + counts[1]
    assert len(loaded.open) == sum(counts)
    together.append(threading.Barrier(most))
    for _ in range(most):
        model.submit(make_request(answers))
    assert answers.wait(4 * requests + most)
    assert model.close(WAIT_S)
    assert answers.finals == 4 * requests + most
    assert limiter.units_in_use == 0
    assert loaded.open == []
    assert loaded.closed == 1


def test_only_passive_instances_take_no_requests() -> None:
    model, loaded = make(InstanceGroup("g", passive=True, count=2))
    answers = Answers()
    request = make_request(answers, id="7")
    with pytest.raises(UnavailableError) as raised:
        model.submit(request)
    assert raised.value.message == (
        f"{request.log_prefix}model 'm' has passive instances only, which take no requests"
    )
    assert loaded.open == ["g_0:0", "g_1:0"]
    assert model.close()
    assert loaded.open == []


def test_passive_instances_are_made_and_warmed_up_but_run_nothing_else() -> None:
    loaded = Loaded()
    spec = replace(
        make_spec(), instance_groups=(InstanceGroup("g"), InstanceGroup("p", passive=True, count=2))
    )
    sample = WarmupSample("w", (WarmupInput("IN", "FP32", (16,)),))
    model = Model.create(spec, loaded, warmup=[sample])
    answers = Answers()
    for _ in range(8):
        model.submit(make_request(answers))
    assert answers.wait(8)
    assert [len(instance.batches) for instance in loaded.instances] == [9, 1, 1]
    assert model.close()
    assert loaded.open == []
