"""Ragged and padded batches: what a function is given, and what each request gets of its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conch.unit.backends.test_arrays import Function, spec
from tests.support.backend_harness import Harness, HarnessAnswer

from conch.backends.arrays import ArrayInstance
from conch.backends.gather import KINDS
from conch.backends.scatter import split_flat
from conch.core.execution.executor import Executor
from conch.core.model_statistics import ModelStatistics
from conch.core.padding import MadeInput, PaddedInput, PaddedOutput, Padding
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import BatchInput, BatchOutput, ModelSpec, TensorSpec
from conch.core.tensor import Array

SHAPES = [(1, 3), (2, 4), (1, 1)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("BATCH_ELEMENT_COUNT", [3, 8, 1]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", [3, 11, 12]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 3, 11, 12]),
        ("BATCH_ITEM_SHAPE", [[3], [4], [4], [1]]),
        ("BATCH_ITEM_SHAPE_FLATTEN", [3, 4, 4, 1]),
    ],
)
def test_kinds(kind: str, expected: Any) -> None:
    assert KINDS[kind](SHAPES).tolist() == expected


def test_the_largest_count_is_a_shape() -> None:
    assert KINDS["BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"](SHAPES).shape == (8,)


def test_item_shapes_of_higher_rank_and_of_no_rows() -> None:
    shapes = [(2, 3, 4), (0, 5, 6), (1, 7, 8)]
    assert KINDS["BATCH_ITEM_SHAPE"](shapes).tolist() == [[3, 4], [3, 4], [7, 8]]
    assert KINDS["BATCH_ITEM_SHAPE_FLATTEN"](shapes).tolist() == [3, 4, 3, 4, 7, 8]
    assert KINDS["BATCH_ITEM_SHAPE"]([(0, 5, 6)]).shape == (0, 2)


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=5))
def test_splitting_is_the_reverse_of_joining(shapes: list[list[int]]) -> None:
    arrays = [np.random.default_rng(0).random(shape) for shape in shapes]
    joined = np.concatenate([array.reshape(-1) for array in arrays])
    parts = split_flat(joined, [tuple(shape) for shape in shapes])
    assert all(np.array_equal(part, array) for part, array in zip(parts, arrays, strict=True))
    with pytest.raises(ValueError, match="elements for shapes of"):
        split_flat(np.append(joined, 0), [tuple(shape) for shape in shapes])


class Seen:
    """A function that keeps what it was given."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self.inputs: list[dict[str, Array]] = []

    def __call__(self, inputs: dict[str, Array], outputs: tuple[str, ...]) -> Mapping[str, Array]:
        self.inputs.append(dict(inputs))
        return self._function(inputs, outputs)


def run(
    model: ModelSpec, function: Function, inputs: list[dict[str, Array]], **attributes: Any
) -> tuple[list[HarnessAnswer], Batch]:
    pairs = [Harness.request(item, **attributes) for item in inputs]
    batch = Batch([request for request, _ in pairs], len(inputs))
    Executor(model, ModelStatistics(), lambda: 1).run(ArrayInstance(model, function), batch)
    return [answer for _, answer in pairs], batch


def ragged_spec(**changes: Any) -> ModelSpec:
    values: dict[str, Any] = {
        "inputs": (TensorSpec("A", "FP32", (-1,), ragged=True), TensorSpec("S", "BYTES", (-1,), ragged=True)),
        "outputs": (TensorSpec("ROWS", "FP32", (1,)), TensorSpec("FLAT", "FP32", (-1,))),
        "batch_inputs": (
            BatchInput("BATCH_ELEMENT_COUNT", ("N", "M"), "FP32", "A"),
            BatchInput("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", ("OFFSETS",), "INT32", "S"),
        ),
        "batch_outputs": (BatchOutput("BATCH_SCATTER_WITH_INPUT_SHAPE", ("FLAT",), "A"),),
    }
    return spec(**{**values, **changes})


def sums(inputs: dict[str, Array], outputs: tuple[str, ...]) -> dict[str, Array]:
    """Sum of each one-row request, and every element doubled."""
    ends = np.cumsum(inputs["N"]).astype(int)
    parts = np.split(inputs["A"], ends[:-1])
    return {"ROWS": np.array([[part.sum()] for part in parts], np.float32), "FLAT": inputs["A"] * 2}


def ragged_input(values: list[float], texts: list[bytes]) -> dict[str, Array]:
    return {"A": np.array([values], np.float32), "S": np.array([texts], object)}


def test_ragged_inputs_are_flat_and_outputs_find_their_requests() -> None:
    seen = Seen(sums)
    answers, batch = run(
        ragged_spec(),
        seen,
        [ragged_input([1, 2, 3], [b"a"]), ragged_input([4], [b"b", b"cc"]), ragged_input([5, 6], [])],
    )
    (inputs,) = seen.inputs
    assert inputs["A"].tolist() == [1, 2, 3, 4, 5, 6]
    assert inputs["S"].tolist() == [b"a", b"b", b"cc"]
    assert inputs["N"].dtype == np.float32 and inputs["N"].tolist() == inputs["M"].tolist() == [3, 1, 2]
    assert inputs["OFFSETS"].dtype == np.int32 and inputs["OFFSETS"].tolist() == [0, 1, 3, 3]
    assert [answer.array("ROWS").tolist() for answer in answers] == [[[6]], [[4]], [[11]]]
    assert [answer.array("FLAT").tolist() for answer in answers] == [[[2, 4, 6]], [[8]], [[10, 12]]]
    assert [[tensor.name for tensor in answer.one.outputs] for answer in answers] == [["ROWS", "FLAT"]] * 3
    assert batch.bytes_copied > 0


def test_one_ragged_request_is_flat_too_and_not_copied() -> None:
    seen = Seen(lambda inputs, outputs: {"FLAT": inputs["A"]})
    model = ragged_spec(inputs=(TensorSpec("A", "FP32", (-1,), ragged=True),), batch_inputs=())
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    (answer,), batch = run(model, seen, [{"A": values}], requested=("FLAT",))
    assert seen.inputs[0]["A"].shape == (6,)
    assert answer.array("FLAT").tolist() == values.tolist()
    assert batch.bytes_copied == 0


def test_only_the_outputs_asked_for_are_split() -> None:
    answers, _ = run(ragged_spec(), sums, [ragged_input([1, 2], [])] * 2, requested=("FLAT",))
    assert [[tensor.name for tensor in answer.one.outputs] for answer in answers] == [["FLAT"]] * 2
    answers, _ = run(ragged_spec(), sums, [ragged_input([1, 2], [])] * 2, requested=("ROWS",))
    assert [[tensor.name for tensor in answer.one.outputs] for answer in answers] == [["ROWS"]] * 2


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        (None, "model 'm' did not return output 'FLAT'"),
        (
            np.zeros(2, np.float32),
            "output 'FLAT' of model 'm' can't be split by the shapes of input 'A': 2 elements for shapes of "
            "3 elements",
        ),
        (np.zeros(3, np.int8), "output 'FLAT' of model 'm' has datatype INT8, but the model configuration"),
    ],
)
def test_an_output_that_cannot_be_split(flat: Array | None, message: str) -> None:
    def wrong(inputs: dict[str, Array], outputs: tuple[str, ...]) -> dict[str, Array]:
        return {"FLAT": flat} if flat is not None else {}

    (answer,), _ = run(ragged_spec(), wrong, [ragged_input([1, 2, 3], [])], requested=("FLAT",))
    assert answer.error.startswith(message)


TOKENS = PaddedInput(
    "T", 0, (4, 8), value=7, lengths=MadeInput("N", "INT32"), mask=MadeInput("MASK", "INT64")
)


def padded_spec(*rules: PaddedInput, outputs: tuple[PaddedOutput, ...] = ()) -> ModelSpec:
    return spec(
        inputs=(
            TensorSpec("T", "INT64", (-1,), optional=True),
            TensorSpec("I", "FP32", (2, -1, -1), optional=True),
            TensorSpec("S", "BYTES", (-1,), optional=True),
        ),
        outputs=(TensorSpec("OUT", "INT64", (-1,)),),
        padding=Padding(rules, outputs),
    )


def doubled(inputs: dict[str, Array], outputs: tuple[str, ...]) -> dict[str, Array]:
    return {"OUT": inputs["T"] * 2}


def row(*values: int) -> Array:
    return np.array([values], np.int64)


def test_padded_inputs_share_one_array_and_outputs_are_cut_back() -> None:
    seen = Seen(doubled)
    model = padded_spec(TOKENS, outputs=(PaddedOutput("OUT", 0, "T", 0),))
    two = np.array([[1, 2], [3, 4]], np.int64)
    answers, batch = run(model, seen, [{"T": row(5, 6, 7)}, {"T": two}, {"T": row(1, 2, 3, 4)}])
    (inputs,) = seen.inputs
    assert inputs["T"].tolist() == [[5, 6, 7, 7], [1, 2, 7, 7], [3, 4, 7, 7], [1, 2, 3, 4]]
    assert inputs["N"].dtype == np.int32 and inputs["N"].tolist() == [3, 2, 2, 4]
    assert inputs["MASK"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    assert [answer.array("OUT").tolist() for answer in answers] == [
        [[10, 12, 14]],
        [[2, 4], [6, 8]],
        [[2, 4, 6, 8]],
    ]
    assert [bytes(answer.one.outputs[0].data) for answer in answers][1] == (two * 2).tobytes()
    assert batch.bytes_copied == 4 * 4 * 8, "each row is copied once, into the array the model gets"


def test_what_needs_no_padding_is_not_copied() -> None:
    seen = Seen(doubled)
    _, batch = run(padded_spec(TOKENS), seen, [{"T": row(1, 2, 3, 4)}])
    assert batch.bytes_copied == 0
    assert seen.inputs[0]["MASK"].tolist() == [[1, 1, 1, 1]]


def test_several_axes_and_strings() -> None:
    seen = Seen(lambda inputs, outputs: {"OUT": np.zeros((len(inputs["I"]), 1), np.int64)})
    rules = (
        PaddedInput("I", 1, (), 4, -1.0),
        PaddedInput("I", 2, (), 0, -1.0, lengths=MadeInput("WIDTH", column=True)),
        PaddedInput("S", 0, (2,), value="-"),
    )
    strings = np.empty((1, 1), object)
    strings[0, 0] = b"a"
    images = [np.ones((1, 2, 3, 3), np.float32), np.ones((1, 2, 4, 4), np.float32)]
    run(padded_spec(*rules), seen, [{"I": image, "S": strings} for image in images])
    (inputs,) = seen.inputs
    assert inputs["I"].shape == (2, 2, 4, 4)
    assert inputs["I"][0].sum() == 2 * 9 - 2 * 7 and inputs["I"][1].sum() == 32
    assert inputs["S"].tolist() == [[b"a", b"-"]] * 2
    assert inputs["WIDTH"].tolist() == [[3], [4]]


def test_an_absent_input_makes_none() -> None:
    seen = Seen(lambda inputs, outputs: {"OUT": np.zeros((1, 1), np.int64)})
    run(padded_spec(TOKENS), seen, [{"I": np.ones((1, 2, 3, 3), np.float32)}])
    assert set(seen.inputs[0]) == {"I"}


def test_an_output_that_is_too_short_to_be_cut() -> None:
    model = padded_spec(TOKENS, outputs=(PaddedOutput("OUT", 0, "T", 0),))
    (answer,), _ = run(model, lambda inputs, outputs: {"OUT": row(1, 2)}, [{"T": row(1, 2, 3)}])
    assert answer.error == (
        "unexpected shape for output 'OUT' of model 'm': expected at least 3 in dimension 1, as in input "
        "'T', got [1, 2]"
    )


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=6))
def test_every_row_comes_back_as_it_went(shapes: list[tuple[int, int]]) -> None:
    model = padded_spec(PaddedInput("T", 0, (9,), value=-5), outputs=(PaddedOutput("OUT", 0, "T", 0),))
    source = np.random.default_rng(1)
    arrays = [source.integers(0, 100, shape) for shape in shapes]
    answers, _ = run(model, lambda inputs, outputs: {"OUT": inputs["T"]}, [{"T": a} for a in arrays])
    assert all(
        np.array_equal(answer.array("OUT"), array) for answer, array in zip(answers, arrays, strict=True)
    )
