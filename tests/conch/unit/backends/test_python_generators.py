"""`execute` as a generator: steps of responses, their checks, cancellation, and the end."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.backend_harness import Harness, HarnessAnswer, one_batch, opened, rows, tensor_specs
from tests.support.profiles import scaled
from tests.support.servers import eventually

from conch.core.model_version import Model
from conch.core.spec import SequenceBatching
from conch.workers.python_backend import PythonBackend

START = """
import asyncio, threading
import numpy as np
import triton_python_backend_utils as pb_utils
from tests.support.backend_harness import opened

def reply(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("B", np.full((1, 2), value, np.float32))])

def number(request):
    return int(request.inputs()[0].as_numpy()[0, 0])

class TritonPythonModel:
    ended = 0

    def initialize(self, args):
        opened.append(self)

    KIND execute(self, requests):
        try:
BODY
        finally:
            TritonPythonModel.ended += 1
"""

COUNT = """
counts = [number(request) for request in requests]
for value in range(max(counts)):
    yield [reply(value) if value < count else None for count in counts]
"""

KINDS = pytest.mark.parametrize("kind", ["def", "async def"])


def load(
    harness: Harness, body: str, kind: str = "def", decoupled: bool = True, name: str = "m", **changes: Any
) -> Model:
    indented = "\n".join(" " * 12 + line for line in body.strip().splitlines())
    harness.directory(name, {"1/model.py": START.replace("KIND", kind).replace("BODY", indented)})
    spec = harness.spec(
        name,
        **{
            "inputs": tensor_specs(A=("FP32", (2,))),
            "outputs": tensor_specs(B=("FP32", (2,))),
            "decoupled": decoupled,
            **changes,
        },
    )
    return harness.load(PythonBackend(), spec)


def values(answer: HarnessAnswer) -> list[float]:
    return [response.outputs[0].numpy()[0, 0] for response in answer.wait()]


def ended(model: Model) -> int:
    return int(opened[-1].ended)


@KINDS
def test_requests_of_a_batch_stream_side_by_side(harness: Harness, kind: str) -> None:
    model = load(harness, COUNT, kind, batching=one_batch(3))
    answers = harness.batch(model, [{"A": rows(count)} for count in (2, 0, 3)])
    assert [values(answer) for answer in answers] == [[0, 1], [], [0, 1, 2]]
    assert ended(model) == 1
    eventually(lambda: model.statistics.snapshot().success.count == 3, "counted")
    assert model.statistics.snapshot().execution_count == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=scaled(25), deadline=None)
@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=6), kind=st.sampled_from(["def", "async def"]))
def test_every_request_gets_its_own_responses(harness: Harness, counts: list[int], kind: str) -> None:
    model = load(harness, COUNT, kind, batching=one_batch(len(counts)))
    answers = harness.batch(model, [{"A": rows(count)} for count in counts])
    assert [values(answer) for answer in answers] == [list(range(count)) for count in counts]
    harness.close()


@KINDS
def test_a_batch_of_one_yields_the_response_itself(harness: Harness, kind: str) -> None:
    body = "for value in range(number(requests[0])):\n    yield None\n    yield reply(value)"
    model = load(harness, body, kind)
    assert values(harness.infer(model, {"A": rows(3)})) == [0, 1, 2]


@KINDS
def test_an_exception_ends_the_requests(harness: Harness, kind: str) -> None:
    model = load(harness, "yield reply(1)\nraise ValueError('halfway')", kind)
    first, second = harness.infer(model, {"A": rows(3)}).wait()
    assert first.error is None
    assert second.error is not None and "message: ValueError: halfway\n\nAt:\n" in second.error.message
    assert ended(model) == 1
    eventually(lambda: model.statistics.snapshot().fail.count == 1, "counted")


@KINDS
@pytest.mark.parametrize(
    ("step", "text"),
    [
        ("5", "Expected a list in the execute yield, found type '<class 'int'>'. With several"),
        ("[]", "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0\n"),
        ("[5]", "Expected an 'InferenceResponse' object in the execute function yield list, found type"),
    ],
)
def test_wrong_steps(harness: Harness, kind: str, step: str, text: str) -> None:
    model = load(harness, f"yield {step}\nyield reply(1)", kind)
    answer = harness.infer(model, {"A": rows(3)})
    assert answer.error.startswith("Failed to process the request(s) for model 'm_0_0', message: ")
    assert text in answer.error
    assert ended(model) == 1


def test_a_generator_returns_nothing(harness: Harness) -> None:
    model = load(harness, "if False:\n    yield\nreturn [reply(1)]")
    assert "yields responses must not return any, found type '<class 'list'>'." in (
        harness.infer(model, {"A": rows(3)}).error
    )


@KINDS
def test_a_single_response_is_not_for_several_requests(harness: Harness, kind: str) -> None:
    model = load(harness, "yield reply(1)", kind, batching=one_batch(2))
    for answer in harness.batch(model, [{"A": rows(1)}, {"A": rows(2)}]):
        assert "Expected a list in the execute yield" in answer.error


ENDLESS = {
    "def": "value = 0\nwhile True:\n    value += 1\n    yield [reply(value) for _ in requests]",
    "async def": (
        "value = 0\nwhile True:\n    value += 1\n    await asyncio.sleep(0)\n"
        "    yield [reply(value) for _ in requests]"
    ),
}


@KINDS
def test_it_is_closed_when_nobody_waits_for_any_of_the_requests(harness: Harness, kind: str) -> None:
    model = load(harness, ENDLESS[kind], kind, batching=one_batch(2))
    first, second = harness.batch(model, [{"A": rows(1)}, {"A": rows(2)}])
    eventually(lambda: len(first.responses) > 3 and len(second.responses) > 3, "streams")
    assert first.request is not None and second.request is not None
    model.cancel(first.request)
    seen = len(second.responses)
    eventually(lambda: len(second.responses) > seen + 3, "the other one goes on")
    assert ended(model) == 0
    model.cancel(second.request)
    first.wait()
    second.wait()
    eventually(lambda: ended(model) == 1, "closed")
    eventually(lambda: model.statistics.snapshot().cancelled.get("running") == 2, "counted")


def test_it_is_closed_at_the_deadline(harness: Harness) -> None:
    model = load(harness, ENDLESS["def"])
    answer = harness.infer(model, {"A": rows(1)}, deadline_ns=0)
    error = answer.wait()[-1].error
    assert error is not None and error.message == "Deadline Exceeded"


@KINDS
def test_models_that_are_not_decoupled_answer_each_request_once(harness: Harness, kind: str) -> None:
    body = (
        "for one in requests:\n    yield [reply(number(one)) if one is other else None for other in requests]"
    )
    model = load(harness, body, kind, decoupled=False, batching=one_batch(2))
    answers = harness.batch(model, [{"A": rows(1)}, {"A": rows(2)}])
    assert [answer.array("B").tolist() for answer in answers] == [[[1, 1]], [[2, 2]]]
    eventually(lambda: model.statistics.snapshot().success.count == 2, "counted")
    assert model.statistics.snapshot().execution_count == 1


@KINDS
def test_too_few_responses(harness: Harness, kind: str) -> None:
    body = "yield [reply(1), None]"
    model = load(harness, body, kind, decoupled=False, batching=one_batch(2))
    first, second = harness.batch(model, [{"A": rows(1)}, {"A": rows(2)}])
    assert first.array("B").tolist() == [[1, 1]]
    assert "InferenceRequest(s) size is:2, and InferenceResponse(s) size is:1\n" in second.error
    eventually(lambda: model.statistics.snapshot().fail.count == 1, "counted")
    assert model.statistics.snapshot().success.count == 1


@KINDS
def test_too_many_responses(harness: Harness, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = load(harness, "yield reply(1)\nyield reply(2)", kind, decoupled=False)
    assert harness.infer(model, {"A": rows(1)}).array("B").tolist() == [[1, 1]]
    text = "Unable to send response. Non-decoupled model cannot send more than one response."
    eventually(lambda: text in caplog.text, "logged")
    assert ended(model) == 1


ITERATIVE = """
again = [number(request) > self.ended for request in requests]
for request, more in zip(requests, again):
    request.set_release_flags(2 if more else 1)
yield [None if more else reply(self.ended) for more in again]
"""


@pytest.mark.parametrize("decoupled", [True, False])
def test_requests_can_be_rescheduled(harness: Harness, decoupled: bool) -> None:
    sequence = SequenceBatching("OLDEST", iterative=True)
    model = load(harness, ITERATIVE, decoupled=decoupled, sequence=sequence)
    request = {"correlation_id": 7, "sequence_start": True}
    assert values(harness.infer(model, {"A": rows(3)}, **request)) == [3]


def test_rescheduled_requests_have_no_response_unless_decoupled(harness: Harness) -> None:
    body = "requests[0].set_release_flags(2)\nyield reply(1)"
    sequence = SequenceBatching("OLDEST", iterative=True)
    model = load(harness, body, decoupled=False, sequence=sequence)
    answer = harness.infer(model, {"A": rows(3)}, correlation_id=7, sequence_start=True)
    assert "Expected a None object in the execute function return list for reschduled request" in answer.error


def test_senders_of_its_requests_can_be_used_too(harness: Harness) -> None:
    body = """
requests[0].get_response_sender().send(reply(7), 1)
yield [None, reply(8)]
"""
    model = load(harness, body, batching=one_batch(2))
    first, second = harness.batch(model, [{"A": rows(1)}, {"A": rows(2)}])
    assert (values(first), values(second)) == ([7], [8])
    del first, second
    gc.collect()
