"""Responses of a batch as their clients want them: outputs that were asked for, classes, errors."""

from __future__ import annotations

import time

import numpy as np
import pytest
from tests.support.core import Answers, Instance, make_request, make_spec

from conch.core.errors import InternalError
from conch.core.execution.executor import Executor
from conch.core.model_statistics import ModelStatistics
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.responder_layers import ResponderLayer
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.tensor import Tensor

MADE = ("A", "B", "MORE")
PLAIN = make_spec(8, outputs=(TensorSpec("A", "FP32", (2,)), TensorSpec("B", "FP32", (2,))))
RESHAPING = make_spec(
    8, outputs=(TensorSpec("A", "FP32", (2,), reshape=(1, 2)), TensorSpec("B", "FP32", (2,)))
)


def run(spec: ModelSpec, *requests: InferenceRequest) -> list[InferenceResponse]:
    """The responses to requests of one batch, to a model that makes the same for each of them."""
    shape = (1, 1, 2) if spec is RESHAPING else (1, 2)

    def execute(batch: Batch) -> list[InferenceResponse | None]:
        def outputs() -> list[Tensor]:
            return [
                Tensor.from_array(name, np.zeros(shape if name == "A" else (1, 2), np.float32))
                for name in MADE
            ]

        failing = InferenceResponse([], InternalError("no"))
        return [failing if each.id == "fails" else InferenceResponse(outputs()) for each in batch.requests]

    answers = Answers()
    for request in requests:
        request.wrap_responder(lambda _: answers, ResponderLayer.CACHE)
    statistics = ModelStatistics()
    Executor(spec, statistics, time.monotonic_ns).run(Instance(execute), Batch(list(requests), len(requests)))
    responses = [answers.response(request) for request in requests]
    errors = sum(response.error is not None for response in responses)
    counted = statistics.snapshot()
    assert (counted.success.count, counted.fail.count) == (len(requests) - errors, errors)
    return responses


def names(response: InferenceResponse) -> list[str]:
    return [tensor.name for tensor in response.outputs]


@pytest.mark.parametrize("spec", [PLAIN, RESHAPING], ids=["plain", "reshaping"])
def test_each_request_of_a_batch_has_the_outputs_that_it_asked_for(spec: ModelSpec) -> None:
    wanted: list[tuple[str, ...] | None] = [None, ("A",), ("B", "A"), ("B",), (), MADE]
    responses = run(spec, *(make_request(requested=each) for each in wanted))
    for response, each in zip(responses, wanted, strict=True):
        assert response.error is None
        assert names(response) == [name for name in MADE if each is None or name in each]
        for tensor in response.outputs:
            assert tensor.shape == (1, 2), "as clients see it"


def test_classes_are_made_also_where_no_output_is_left_out() -> None:
    whole, classes = run(PLAIN, make_request(requested=MADE), make_request(requested=MADE, classes={"B": 1}))
    assert [tensor.datatype for tensor in whole.outputs] == ["FP32"] * 3
    assert [tensor.datatype for tensor in classes.outputs] == ["FP32", "BYTES", "FP32"]


def test_one_that_fails_takes_no_other_along() -> None:
    good, bad, other = run(
        PLAIN,
        make_request(requested=("A",)),
        make_request(requested=("A",), id="fails"),
        make_request(requested=("B",)),
    )
    assert (names(good), names(other)) == (["A"], ["B"])
    assert bad.error is not None and bad.error.message == "no" and not bad.outputs
