"""Gather, run, scatter: every response has the rows of its own request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.backend_harness import Harness, HarnessAnswer, rows, strings

from conch.backends.arrays import ArrayBackend, ArrayFunction, ArrayInstance
from conch.core.execution.executor import Executor
from conch.core.execution.placement import Placement
from conch.core.model_statistics import ModelStatistics
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.tensor import Array, Tensor

Function = Callable[[dict[str, Array], tuple[str, ...]], Mapping[str, Array]]


class Backend(ArrayBackend):
    default_model_file = "model"

    def __init__(self, function: Function) -> None:
        self.function = function

    def open(self, spec: ModelSpec, placement: Placement) -> ArrayFunction:
        return self.function


def spec(max_batch_size: int = 64, **changes: Any) -> ModelSpec:
    values: dict[str, Any] = {
        "inputs": (
            TensorSpec("A", "FP32", (2,)),
            TensorSpec("S", "BYTES", (1,), optional=True),
        ),
        "outputs": (TensorSpec("B", "FP32", (2,)), TensorSpec("T", "BYTES", (1,))),
    }
    values.update(changes)
    return ModelSpec(
        name="m",
        version=1,
        platform="",
        backend="fake",
        max_batch_size=max_batch_size,
        directory=Path("m"),
        version_directory=Path("m/1"),
        model_file="model",
        instance_groups=(),
        **values,
    )


def run(
    model: ModelSpec, function: Function, inputs: list[dict[str, Array]], **attributes: Any
) -> tuple[list[HarnessAnswer], Batch]:
    pairs = [Harness.request(item, **attributes) for item in inputs]
    sizes = [len(next(iter(item.values()))) if model.max_batch_size else 1 for item in inputs]
    batch = Batch([request for request, _ in pairs], sum(sizes))
    Executor(model, ModelStatistics(), lambda: 1).run(ArrayInstance(model, function), batch)
    return [answer for _, answer in pairs], batch


def identity(inputs: dict[str, Array], outputs: tuple[str, ...]) -> dict[str, Array]:
    results = {"B": inputs["A"]}
    if "T" in outputs:
        results["T"] = inputs["S"]
    return results


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.booleans())
def test_every_request_gets_its_own_rows(counts: list[int], with_strings: bool) -> None:
    model = spec()
    inputs: list[dict[str, Array]] = []
    for number, count in enumerate(counts):
        item: dict[str, Array] = {"A": np.full((count, 2), number, np.float32)}
        if with_strings:
            text = np.empty((count, 1), dtype=object)
            text[:, 0] = [f"{number}\0{row}".encode() for row in range(count)]
            item["S"] = text
        inputs.append(item)
    requested = None if with_strings else ("B",)
    answers, batch = run(model, identity, inputs, requested=requested)
    for item, answer in zip(inputs, answers, strict=True):
        np.testing.assert_array_equal(answer.array("B"), item["A"])
        if with_strings:
            assert answer.array("T").tolist() == item["S"].tolist()
        assert len(answer.one.outputs) == 1 + with_strings
    if len(counts) == 1:
        assert batch.bytes_copied == 0
    elif not with_strings:
        assert batch.bytes_copied == 8 * sum(counts)
    assert batch.compute_input_end_ns <= batch.compute_output_start_ns


def test_absent_optional_inputs_are_absent() -> None:
    seen: list[set[str]] = []

    def function(inputs: dict[str, Array], outputs: tuple[str, ...]) -> dict[str, Array]:
        seen.append(set(inputs))
        return identity(inputs, outputs)

    answers, _ = run(spec(), function, [{"A": rows(1)}, {"A": rows(2)}], requested=("B",))
    assert [answer.array("B").tolist() for answer in answers] == [[[1, 1]], [[2, 2]]]
    assert seen == [{"A"}]


def test_union_of_requested_outputs_is_passed_down_in_the_configs_order() -> None:
    seen: list[tuple[str, ...]] = []

    def function(inputs: dict[str, Array], outputs: tuple[str, ...]) -> dict[str, Array]:
        seen.append(outputs)
        return identity(inputs, outputs)

    item = {"A": rows(1), "S": strings(b"x")}
    model = spec()
    pairs = [Harness.request(item, requested=requested) for requested in (("T",), ("B",))]
    batch = Batch([request for request, _ in pairs], 2)
    Executor(model, ModelStatistics(), lambda: 1).run(ArrayInstance(model, function), batch)
    assert seen == [("B", "T")]
    assert [[tensor.name for tensor in answer.one.outputs] for _, answer in pairs] == [["T"], ["B"]]


def test_outputs_are_views_of_the_models_array() -> None:
    result = rows(1, 2)

    def function(inputs: dict[str, Array], outputs: tuple[str, ...]) -> dict[str, Array]:
        return {"B": result}

    answers, _ = run(spec(), function, [{"A": rows(1)}, {"A": rows(2)}], requested=("B",))
    assert all(np.shares_memory(answer.array("B"), result) for answer in answers)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "model 'm' did not return output 'B'"),
        (rows(1), "output 'B' of model 'm' has batch dimension 1, but the batch has 2 rows"),
        (
            rows(1, 2, width=3),
            "output 'B' of model 'm' has shape [2,3], but the model configuration specifies [-1,2]",
        ),
        (
            np.float32(1).reshape(()),
            "output 'B' of model 'm' has shape [], but the model configuration specifies [-1,2]",
        ),
        (
            rows(1, 2).astype(np.float64),
            "output 'B' of model 'm' has datatype FP64, but the model configuration specifies FP32",
        ),
    ],
)
def test_wrong_results_are_errors_of_all_requests(result: Array | None, message: str) -> None:
    def function(inputs: dict[str, Array], outputs: tuple[str, ...]) -> dict[str, Array]:
        return {} if result is None else {"B": result}

    answers, _ = run(spec(), function, [{"A": rows(1)}, {"A": rows(2)}], requested=("B",))
    assert [answer.error for answer in answers] == [message, message]


def test_model_without_batching_runs_requests_one_by_one() -> None:
    model = spec(0, inputs=(TensorSpec("A", "FP32", (1, 2)),), outputs=(TensorSpec("B", "FP32", (1, 2)),))
    answers, batch = run(model, identity, [{"A": rows(1)}, {"A": rows(2)}])
    assert [answer.array("B").tolist() for answer in answers] == [[[1, 1]], [[2, 2]]]
    assert batch.bytes_copied == 0


def test_unaligned_memory_is_copied_before_it_reaches_the_model() -> None:
    request, answer = Harness.request({"A": rows(1)}, requested=("B",))
    data = memoryview(b"?" + bytes(request.inputs["A"].data))[1:]
    request.inputs["A"] = Tensor("A", "FP32", (1, 2), data)
    batch = Batch([request], 1)
    model = spec()
    Executor(model, ModelStatistics(), lambda: 1).run(ArrayInstance(model, identity), batch)
    assert answer.array("B").flags.aligned
    assert batch.bytes_copied == 8


def test_small_backend_through_a_model(harness: Harness) -> None:
    closed: list[bool] = []

    class Function:
        def __call__(self, inputs: dict[str, Array], outputs: tuple[str, ...]) -> dict[str, Array]:
            return {"B": inputs["A"] * 2}

        def close(self) -> None:
            closed.append(True)

    model = harness.load(
        Backend(Function()),
        harness.spec(
            inputs=(TensorSpec("A", "FP32", (2,)),), outputs=(TensorSpec("B", "FP32", (2,)),), batching=None
        ),
    )
    assert harness.infer(model, {"A": rows(3)}).array("B").tolist() == [[6, 6]]
    harness.close()
    assert closed == [True]


def test_exception_of_the_model_is_the_requests_error() -> None:
    def function(inputs: dict[str, Array], outputs: tuple[str, ...]) -> dict[str, Array]:
        raise ValueError("no")

    (answer,), _ = run(spec(), function, [{"A": rows(1)}])
    assert answer.error == "no"
