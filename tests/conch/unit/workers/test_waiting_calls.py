"""Records of the server about the calls that models in workers wait for."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.workers import NoCalls

from conch.core.errors import UnavailableError
from conch.core.request import InferenceRequest, RequestState
from conch.core.spec import ModelSpec
from conch.workers.connection.waiting_calls import WaitingCalls, WorkerWaiter


def request(
    model: WorkerWaiter | None = None, state: RequestState = RequestState.RUNNING
) -> InferenceRequest:
    made = InferenceRequest("m", "", {}, lambda *_: None, 0)
    made.state = state
    if model is not None:
        identifier, version = model.model
        made.model = cast(Any, SimpleNamespace(spec=SimpleNamespace(identifier=identifier, version=version)))
    return made


class Instance:
    """One in a worker, that executes a request."""

    def __init__(self, server: NoCalls, name: str, namespace: str = "") -> None:
        identifier = f"{namespace}::{name}" if namespace else name
        spec = SimpleNamespace(identifier=identifier, namespace=namespace, version=1)
        self.waiter = WorkerWaiter(server, f"{name}_0", cast(ModelSpec, spec))
        self.waits = WaitingCalls(self.waiter)
        self.executed = [request()]
        server.waiters.add(self.waiter)

    def waits_for(self) -> tuple[InferenceRequest, Any] | None:
        waiting = self.waiter.waiting
        return None if waiting is None else (waiting.core, waiting.parents)

    def says(self, number: int, call: InferenceRequest) -> bool:
        return self.waits.report(number, call, self.executed)


@pytest.fixture
def server() -> Iterator[NoCalls]:
    yield NoCalls()


def test_a_wait_is_believed_the_second_time(server: NoCalls) -> None:
    one = Instance(server, "one")
    call = request(one.waiter, RequestState.QUEUED)
    assert not one.says(1, call)
    assert one.waits_for() is None
    assert one.says(1, call)
    assert one.waits_for() == (call, one.executed)
    one.waits.finish(1)
    assert one.waits_for() is None
    assert not one.says(1, call), "something has been sent meanwhile"
    one.executed = [request()]
    assert not one.says(1, call), "another batch waits for it"
    assert one.says(1, call)
    one.waits.close()
    assert one.waits_for() is None and not one.waits


def test_a_circle_is_found_by_two_looks_and_the_last_call_fails(server: NoCalls) -> None:
    one, two = Instance(server, "one"), Instance(server, "two")
    calls = {one: request(two.waiter, RequestState.QUEUED), two: request(one.waiter, RequestState.QUEUED)}
    calls[two].received_ns = 1
    for instance, call in calls.items():
        assert not instance.says(1, call)
    assert one.says(1, calls[one])
    assert one.waits.check(1) == (False, False), "the other is not known to wait"
    assert two.says(1, calls[two])
    assert one.waits.check(1) == two.waits.check(1) == (True, False)
    assert one.waits.check(1) == (True, False)
    assert two.waits.check(1) == (True, True)
    calls[two].state = RequestState.RUNNING  # another caller, which is not known, has taken it
    assert two.waits.check(1) == one.waits.check(1) == (False, False)


def test_another_instance_that_does_not_wait_may_serve_it(server: NoCalls) -> None:
    one = Instance(server, "one")
    Instance(server, "one")  # its worker may be about to start
    call = request(one.waiter, RequestState.QUEUED)
    assert not one.says(1, call) and one.says(1, call)
    assert [one.waits.check(1) for _ in range(3)] == [(False, False)] * 3


def test_another_thread_does_not_stand_for_the_instance(server: NoCalls) -> None:
    one = Instance(server, "one")
    call = request(one.waiter, RequestState.QUEUED)
    assert not one.waits.report(1, call, []) and one.waits.report(1, call, [])
    assert one.waits_for() is None
    assert one.waits.check(1) == (False, False)
    assert one.waits.check(2) == (False, False), "nobody has said anything of it"


@pytest.mark.parametrize("namespace", ["", "some"])
def test_loads_that_wait_for_each_other(server: NoCalls, namespace: str) -> None:
    one, two = Instance(server, "one", namespace), Instance(server, "two", namespace)
    with one.waits.loading("one"):
        assert not one.waiter.loads, "an instance that serves may have its model loaded"
    one.waiter.opening = two.waiter.opening = True
    refused = pytest.raises(UnavailableError, match=r"'one' cannot be loaded .* its load would wait for that")
    with refused, one.waits.loading("one"):
        raise AssertionError
    with one.waits.loading("two"), refused, two.waits.loading("one"):
        raise AssertionError
    with two.waits.loading("one"):
        pass
