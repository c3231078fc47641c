"""The classification extension."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from conch.core.errors import InvalidArgumentError
from conch.core.execution.shaping import classify
from conch.core.spec import TensorSpec
from conch.core.tensor import Array, Tensor

LABELLED = TensorSpec("OUT", "FP32", (3,), labels=("cat", "", "dog"))


def classes(array: Array, count: int, spec: TensorSpec | None = None, batches: bool = False) -> list[object]:
    result = classify(Tensor.from_array("OUT", array), count, spec, batches)
    assert (result.name, result.datatype) == ("OUT", "BYTES")
    elements: list[object] = result.numpy().tolist()
    return elements


@pytest.mark.parametrize(
    ("array", "count", "spec", "batches", "expected"),
    [
        pytest.param(np.array([0.5, 1, -2], "f4"), 1, None, False, [b"1.000000:1"], id="floats"),
        pytest.param(np.array([1, 3, 2], "i4"), 2, None, False, [b"3:1", b"2:2"], id="integers"),
        pytest.param(np.array([1, 3, 2], "u8"), 9, None, False, [b"3:1", b"2:2", b"1:0"], id="k-is-bounded"),
        pytest.param(
            np.array([3, 2, 1], "f4"),
            3,
            LABELLED,
            False,
            [b"3.000000:0:cat", b"2.000000:1", b"1.000000:2:dog"],
            id="labels",
        ),
        pytest.param(np.array([0, 0, 0, 5], "f4"), 1, LABELLED, False, [b"5.000000:3"], id="label-missing"),
        pytest.param(np.array([2, 7, 7, 7], "i4"), 3, None, False, [b"7:1", b"7:2", b"7:3"], id="ties"),
        pytest.param(np.array([[1, 2], [4, 3]], "i4"), 1, None, True, [[b"2:1"], [b"4:0"]], id="batch"),
        pytest.param(np.array([[1, 2], [4, 3]], "i4"), 1, None, False, [b"4:2"], id="rank-ignored"),
        pytest.param(np.zeros((2, 2, 2), "i1"), 1, None, True, [[b"0:0"], [b"0:0"]], id="rank-ignored-batch"),
        pytest.param(np.zeros((0, 3), "f4"), 2, None, True, [], id="batch-of-none"),
        pytest.param(np.zeros((0,), "f4"), 2, None, False, [], id="no-elements"),
    ],
)
def test_classes(
    array: Array, count: int, spec: TensorSpec | None, batches: bool, expected: list[object]
) -> None:
    assert classes(array, count, spec, batches) == expected


def test_shape_of_a_batch_of_none() -> None:
    assert classify(Tensor.from_array("OUT", np.zeros((0, 3), "f4")), 2, None, True).shape == (0, 2)


@given(npst.arrays(np.int8, st.integers(1, 12)), st.integers(1, 15))
def test_order_is_by_value_then_index(array: Array, count: int) -> None:
    order = sorted(range(len(array)), key=lambda index: (-int(array[index]), index))[:count]
    assert classes(array, count) == [f"{array[index]}:{index}".encode() for index in order]


@pytest.mark.parametrize("datatype", ["BYTES", "BOOL", "FP16", "BF16"])
def test_unsupported_datatypes(datatype: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        classify(Tensor("OUT", datatype, (0,), b""), 1, None, False)
    assert (
        caught.value.message == f"class result not available for output due to unsupported type '{datatype}'"
    )


def test_largest_tensor() -> None:
    assert classes(np.zeros(1_000_000, np.int8), 1) == [b"0:0"]
    with pytest.raises(InvalidArgumentError) as caught:
        classes(np.zeros(1_000_001, np.int8), 1)
    assert caught.value.message == "classification output tensor too large"
