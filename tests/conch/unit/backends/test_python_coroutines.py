"""`async def execute`: batches in flight on one instance, and what asks for more than there can be."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.backend_harness import Harness, HarnessAnswer, one_batch, opened, rows, tensor_specs
from tests.support.servers import eventually

from conch.backends.python.runtime.concurrency_limit import ConcurrencyLimit
from conch.backends.python.runtime.event_loop import EventLoop, TaskEnd
from conch.core.errors import InvalidArgumentError
from conch.core.model_version import Model
from conch.core.spec import InstanceGroup, Resource, SequenceBatching
from conch.workers.python_backend import PythonBackend

START = """
import asyncio
import numpy as np
import triton_python_backend_utils as pb_utils
from tests.support.backend_harness import opened

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

def reply(request):
    return pb_utils.InferenceResponse([pb_utils.Tensor("B", request.inputs()[0].as_numpy())])

class TritonPythonModel:
    gates = {}
    running = most = 0

    def initialize(self, args):
        opened.append(self)

    async def passed(self, request):
        # A gate for each value, opened by a request with its negative.
        value = float(request.inputs()[0].as_numpy()[0, 0])
        self.loop = asyncio.get_running_loop()
        TritonPythonModel.running += 1
        TritonPythonModel.most = max(self.most, self.running)
        gate = self.gates.setdefault(abs(value), asyncio.Event())
        if value < 0:
            gate.set()
        await gate.wait()
        TritonPythonModel.running -= 1
"""

ONE_BY_ONE = """
    async def execute(self, requests):
        for request in requests:
            await self.passed(request)
        return [reply(request) for request in requests]
"""

GENERATOR = """
    async def execute(self, requests):
        for request in requests:
            await self.passed(request)
            yield [reply(request) if one is request else None for one in requests]
"""


def load(harness: Harness, body: str, limit: int | None = None, **changes: Any) -> Model:
    harness.directory("m", {"1/model.py": START + body})
    parameters = {} if limit is None else {"CONCH_MAX_INFLIGHT": str(limit)}
    spec = harness.spec(
        **{
            "inputs": tensor_specs(A=("FP32", (2,))),
            "outputs": tensor_specs(B=("FP32", (2,))),
            "parameters": parameters,
            **changes,
        }
    )
    return harness.load(PythonBackend(), spec)


def infer(harness: Harness, model: Model, value: float) -> HarnessAnswer:
    return harness.infer(model, {"A": rows(value)})


@pytest.mark.parametrize("body", [ONE_BY_ONE, GENERATOR])
def test_batches_are_in_flight_at_the_same_time(harness: Harness, body: str) -> None:
    model = load(harness, body, 3)
    waiting = [infer(harness, model, number) for number in (1, 2)]
    eventually(lambda: model.pending == 0, "reached")
    # It needs neither of them to end.
    assert infer(harness, model, -3).array("B").tolist() == [[-3, -3]]
    assert not any(answer.finals for answer in waiting)
    for number, answer in zip((1, 2), waiting, strict=True):
        assert infer(harness, model, -number).array("B").tolist() == [[-number, -number]]
        assert answer.array("B").tolist() == [[number, number]]
    eventually(lambda: model.statistics.snapshot().success.count == 5, "reached")
    counted = model.statistics.snapshot()
    assert (counted.inference_count, counted.execution_count, counted.fail.count) == (5, 5, 0)


def test_no_batch_is_taken_beyond_the_limit(harness: Harness) -> None:
    model = load(harness, ONE_BY_ONE, 2, max_batch_size=1)
    answers = [infer(harness, model, number) for number in (1, 2, 3, 4)]
    eventually(lambda: model.pending == 2, "two in flight")  # the others can still be cancelled
    assert model.cancel(answers[2].request)  # type: ignore[arg-type]
    answers.pop(2)
    opener = infer(harness, model, -4)
    with pytest.raises(AssertionError, match="was not answered"):
        opener.wait(0.05)
    assert model.pending == 2
    # Room for them comes from outside, as the gates are theirs.
    _open(1, 2)
    assert opener.array("B").tolist() == [[-4, -4]]
    assert [answer.array("B")[0, 0] for answer in answers] == [1, 2, 4]


def _open(*numbers: int) -> None:
    for number in numbers:
        eventually(lambda: float(number) in opened[0].gates, "the request has begun")  # noqa: B023
        opened[0].loop.call_soon_threadsafe(opened[0].gates[float(number)].set)


def test_one_at_a_time_where_nothing_is_said(harness: Harness) -> None:
    model = load(harness, ONE_BY_ONE, max_batch_size=1)
    answers = [infer(harness, model, number) for number in (1, 2)]
    eventually(lambda: model.pending == 1, "reached")
    _open(1)
    answers[0].wait()
    _open(2)
    assert answers[1].array("B")[0, 0] == 2
    assert opened[0].most == 1


def test_decoupled_batches_may_be_limited_too(harness: Harness) -> None:
    body = """
    async def execute(self, requests):
        for request in requests:
            await self.passed(request)
            request.get_response_sender().send(reply(request), FINAL)
"""
    model = load(harness, body, 2, max_batch_size=1, decoupled=True)
    answers = [infer(harness, model, number) for number in (1, 2, 3)]
    eventually(lambda: model.pending == 1, "reached")
    _open(1, 2, 3)
    assert [answer.array("B")[0, 0] for answer in answers] == [1, 2, 3]


FAILING = """
    async def execute(self, requests):
        await self.passed(requests[0])
        OUTCOME
"""


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        ("raise ValueError('no')", "message: ValueError: no\n\nAt:\n"),
        ("raise SystemExit(3)", "message: SystemExit: 3\n\nAt:\n"),
        ("return None", "Expected a list in the execute return, found type '<class 'NoneType'>'."),
        ("return []", "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0"),
        ("return [5]", "Expected an 'InferenceResponse' object in the execute function return list, found"),
        ("requests[0].set_release_flags(2)", "has several batches in flight"),
    ],
)
@pytest.mark.parametrize("limit", [None, 2])
def test_errors_read_the_same_in_flight(harness: Harness, outcome: str, text: str, limit: int | None) -> None:
    if limit is None and "set_release_flags" in outcome:
        outcome, text = "return [5]", "found type '<class 'int'>'"
    model = load(harness, FAILING.replace("OUTCOME", outcome), limit)
    answer = infer(harness, model, 1)
    eventually(lambda: 1.0 in opened[0].gates, "reached")
    _open(1)
    assert answer.error.startswith("Failed to process the request(s) for model 'm_0_0', message: ")
    assert text in answer.error
    eventually(lambda: model.statistics.snapshot().fail.count == 1, "reached")
    assert model.statistics.snapshot().execution_count == 0


def test_senders_work_in_flight_and_failures_end_what_is_left(harness: Harness) -> None:
    body = """
    async def execute(self, requests):
        await self.passed(requests[0])
        requests[0].get_response_sender().send(reply(requests[0]))
        raise ValueError("halfway")
"""
    model = load(harness, body, 2, batching=one_batch(2))
    first, second = harness.batch(model, [{"A": rows(1)}, {"A": rows(2)}])
    eventually(lambda: 1.0 in opened[0].gates, "reached")
    _open(1)
    assert first.array("B").tolist() == [[1, 1]]
    assert "ValueError: halfway" in second.error


def test_execution_lasts_until_its_answers(harness: Harness) -> None:
    model = load(harness, ONE_BY_ONE, 2)
    answer = infer(harness, model, 1)
    eventually(lambda: 1.0 in opened[0].gates, "reached")
    eventually(lambda: model.statistics.snapshot().running == 1, "reached")
    assert model.statistics.snapshot().execution_count == 0
    _open(1)
    answer.wait()
    counted = model.statistics.snapshot()
    assert counted.execution_count == 1
    # The request may be counted before the batch's outputs begin, or after.
    batch, request = (
        [each.compute_infer.ns, each.compute_output.ns] for each in (counted.batches[1], counted)
    )
    assert sum(batch) == sum(request)


def test_unloading_waits_for_what_is_in_flight(harness: Harness) -> None:
    model = load(harness, ONE_BY_ONE, 2)
    answer = infer(harness, model, 1)
    eventually(lambda: 1.0 in opened[0].gates, "reached")
    assert not model.close(0.01)
    assert not answer.finals
    _open(1)
    harness.close()
    assert answer.array("B").tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("changes", "body", "text"),
    [
        ({}, "    def execute(self, requests):\n        pass\n", "'execute' is no coroutine"),
        ({"sequence": SequenceBatching("OLDEST")}, ONE_BY_ONE, "the next request of a sequence must not run"),
        (
            {"instance_groups": (InstanceGroup("m_0", resources=(Resource("r", 1),)),)},
            ONE_BY_ONE,
            "rate limiter resources",
        ),
    ],
)
def test_more_than_can_be_is_refused(harness: Harness, changes: dict[str, Any], body: str, text: str) -> None:
    with pytest.raises(
        InvalidArgumentError, match="parameter 'CONCH_MAX_INFLIGHT' must be 1, not 4, as"
    ) as info:
        load(harness, body, 4, **changes)
    assert text in info.value.message
    # One is what they have anyway, and an option is for all models.
    load(harness, body, 1, **changes)
    load(harness, body, backend_options={"max-inflight": "4", "placement": harness.placement}, **changes)


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop("test")
    yield loop
    loop.close()


def test_flights_hand_over_each_outcome_once(loop: EventLoop) -> None:
    """A coroutine may end before or after the wait for it has ended."""
    flights = ConcurrencyLimit(loop, 3)
    later: list[TaskEnd] = []
    both = threading.Lock()

    def goes_on(outcome: TaskEnd) -> None:
        with both:
            later.append(outcome)

    async def work(number: int) -> int:
        for _ in range(number % 3):
            await asyncio.sleep(0)
        return number

    now = [flights.run(work(number), goes_on) for number in range(300)]
    flights.wait()
    returned = [outcome[0] for outcome in now if outcome is not None] + [outcome[0] for outcome in later]
    assert sorted(returned) == list(range(300))


def test_a_single_flight_is_always_waited_for(loop: EventLoop) -> None:
    flights = ConcurrencyLimit(loop, 1)

    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    for _ in range(100):
        assert flights.run(work(), lambda outcome: pytest.fail("it was not waited for")) == (7, None)
