"""Instances that are made at the same time."""

from __future__ import annotations

import threading
from contextvars import ContextVar

import pytest
from tests.support.core import LoadedModel, make_spec
from tests.support.servers import WAIT_S

from conch.core.backend import BackendInstance
from conch.core.errors import InternalError, InvalidArgumentError, UnavailableError
from conch.core.execution import instance_pool
from conch.core.execution.instance_pool import start_in_parallel
from conch.core.execution.placement import Placement
from conch.core.execution.warmup import Warmup
from conch.core.model_control import cancellable_load, load_cancelled
from conch.core.model_version import Model
from conch.core.request import InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import WarmupInput, WarmupSample

_SAMPLE = WarmupSample("w", (WarmupInput("IN", "FP32", (16,)),))
_given: ContextVar[str] = ContextVar("given", default="nothing")


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(4)))


class Together(LoadedModel):
    """Makes no instance before as many are being made as there are to be at a time."""

    creates_in_parallel = True

    def __init__(self, count: int, fails: str = "", execute: object = None) -> None:
        super().__init__() if execute is None else super().__init__(execute)  # type: ignore[arg-type]
        self.barrier = threading.Barrier(count)
        self.fails = fails
        self.stopped: list[str] = []
        self.names: dict[BackendInstance, str] = {}

    def create_instance(self, placement: Placement) -> BackendInstance:
        self.barrier.wait(WAIT_S)
        name = placement.name
        if name == self.fails:
            raise InternalError(f"{name} fails")
        if self.fails:
            while not load_cancelled()():
                threading.Event().wait(0.01)
            self.stopped.append(name)
            raise UnavailableError("its load was stopped")
        instance = super().create_instance(placement)
        self.names[instance] = name
        return instance


def test_all_are_made_at_the_same_time_and_keep_their_order() -> None:
    loaded = Together(4)
    made = instance_pool.InstancePool(make_spec(instances=4), loaded)
    made.create(Warmup(make_spec(), (), lambda: 0))
    assert [loaded.names[instance] for instance in made.active] == ["m_0", "m_1", "m_2", "m_3"]
    made.close()
    assert loaded.closed == 1


def test_no_more_than_there_are_cores() -> None:
    loaded = Together(4)
    model = Model.create(make_spec(instances=8), loaded)
    assert len(loaded.instances) == 8
    assert model.close()


@pytest.mark.parametrize("fails", ["m_0", "m_2"])
def test_the_failure_of_one_ends_the_others(fails: str) -> None:
    loaded = Together(4, fails)
    with pytest.raises(InternalError, match=f"^{fails} fails$"):
        Model.create(make_spec(instances=8), loaded)
    assert len(loaded.stopped) == 3
    assert loaded.closed == 1


def test_what_was_made_is_closed_when_a_sample_fails() -> None:
    def execute(batch: Batch) -> list[InferenceResponse | None]:
        raise InternalError("no luck")

    loaded = Together(2, execute=execute)
    with pytest.raises(InvalidArgumentError, match=r"failed to run warmup sample 'w': .*no luck"):
        Model.create(make_spec(instances=2), loaded, warmup=[_SAMPLE])
    assert [instance.closed for instance in loaded.instances] == [1, 1]
    assert loaded.closed == 1


def test_the_first_sample_is_told_of_once() -> None:
    told: list[None] = []
    loaded = Together(4)
    model = Model.create(
        make_spec(instances=4), loaded, warmup=[_SAMPLE], on_warmup=lambda: told.append(None)
    )
    assert len(told) == 1
    assert [len(instance.batches) for instance in loaded.instances] == [1, 1, 1, 1]
    assert model.close()


def test_what_is_known_of_the_load_is_known_to_all() -> None:
    found: set[tuple[int, str, bool]] = set()
    barrier = threading.Barrier(3)
    stopped = threading.Event()

    def task() -> None:
        barrier.wait(WAIT_S)
        stopped.set()
        found.add((threading.get_ident(), _given.get(), load_cancelled()()))

    token = _given.set("something")
    try:
        with cancellable_load(stopped.is_set):
            start_in_parallel([task] * 3, 3)
    finally:
        _given.reset(token)
    assert len(found) == 3
    assert {each[1:] for each in found} == {("something", True)}


def test_without_threads_it_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    done: list[int] = []
    start_in_parallel([lambda: done.append(1), lambda: done.append(2)], 4)
    assert done == [1, 2]


@pytest.mark.parametrize("most", [1, 4])
def test_nothing_is_begun_once_the_load_is_stopped(most: int) -> None:
    stopped = threading.Event()
    with cancellable_load(stopped.is_set), pytest.raises(UnavailableError, match="the load was stopped"):
        start_in_parallel([stopped.set, *[lambda: pytest.fail("begun")] * (8 if most == 1 else 0)], most)
        start_in_parallel([lambda: pytest.fail("begun")], most)


def test_two_are_made_at_the_same_time_on_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(1)))
    model = Model.create(
        make_spec(instances=2), Together(2)
    )  # else it waits for the other one until it fails
    assert model.close()
