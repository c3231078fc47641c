"""Values that become an input's array, and those that are refused as they would become other values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.errors import InvalidArgumentError
from conch.core.tensor import NUMPY_DTYPES, Array
from conch_api.array_conversion import array_of
from conch_api.client_common import Signature
from conch_api.in_process import input_tensor


def directly(datatype: str, value: Any) -> Array:
    return input_tensor("X", value, datatype).numpy()


def over_a_client(datatype: str, value: Any) -> Array:
    data_type = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
    signature = Signature({"name": "m", "input": [{"name": "X", "data_type": data_type}]})
    return signature.arrays([value], {}, sample=False)["X"][1]


WAYS = pytest.mark.parametrize("way", [directly, over_a_client])


@WAYS
@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        ("INT32", [1.7]),
        ("INT32", np.array([2], object) / 3),
        ("INT64", [2.0**60]),
        ("INT64", [1, None]),
        ("BOOL", [None]),
        ("BOOL", [1.0]),
        ("FP64", [2**53 + 1]),
        ("FP32", [2**24 + 1]),
        ("FP32", [2**24 + 1, 0.5]),
        ("FP16", [4097]),
        ("FP64", [0.5, 2**53 + 1]),
        ("INT64", [2.0**53, 2**53 + 1]),
        ("FP64", np.array([[2**53 + 1]])),
        ("FP64", np.array([[-(2**53) - 1]])),
        ("FP64", np.array([2**53 + 1, None], object)),
        ("INT8", np.array([[200]])),
        ("UINT64", np.array([-1])),
        ("INT32", np.array([True, "a"], object)),
        ("UINT8", [300]),
        ("UINT8", [-1]),
        ("INT32", [2**40]),
        ("INT64", [2**70]),
        ("BOOL", [2]),
        ("FP32", [[1e300]]),
        ("FP32", -1e39),
        ("FP32", [float("nan"), np.float64(1e39)]),
        ("FP16", [1.0, 70_000]),
        ("FP32", ["1.5"]),
        ("FP32", [1j]),
        ("FP32", [[1.0], [1.0, 2.0]]),
        ("BYTES", [[b"a"], [b"a", b"b"]]),
        ("BYTES", [1]),
        ("BYTES", [None]),
    ],
)
def test_what_would_be_another_value_is_refused(way: Any, datatype: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="input 'X'"):
        way(datatype, value)


@WAYS
@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        ("INT32", []),
        ("INT32", [True, 2]),
        ("INT32", [1.0, -2.0]),
        ("FP64", [2**53, -(2**53)]),
        ("FP64", np.array([[2**53], [-(2**53)]])),
        ("FP64", np.array([True, False])),
        ("FP64", np.array([[1.5]], np.float32)),
        ("INT64", np.array([[1]], np.int8)),
        ("FP32", np.array([True, 1.5, 2], object)),
        ("INT32", (1, -2)),
        ("UINT64", [2**64 - 1]),
        ("UINT8", np.int64(3)),
        ("BOOL", [True, False]),
        ("BOOL", [1, 0]),
        ("FP32", [1, 2.5]),
        ("FP16", [[0.5], [1]]),
        ("FP64", 3),
        ("FP32", [float("inf"), -float("inf")]),
        ("BYTES", []),
    ],
)
def test_values_that_fit_become_the_input_s_type(way: Any, datatype: str, value: Any) -> None:
    array = way(datatype, value)
    assert array.dtype == NUMPY_DTYPES[datatype]
    assert array.tolist() == np.asarray(value).tolist()


@WAYS
@given(st.lists(st.binary() | st.text()))
def test_strings_stay_as_they_are(way: Any, texts: list[bytes | str]) -> None:
    found = [text.encode() if isinstance(text, str) else text for text in way("BYTES", texts).tolist()]
    assert found == [text.encode() if isinstance(text, str) else text for text in texts]


@WAYS
@pytest.mark.parametrize("value", [[1, None], [None, 1], np.array([2.5, None], object), (None,)])
def test_a_missing_number_is_nan(way: Any, value: Any) -> None:
    wanted = [math.nan if each is None else each for each in np.asarray(value, object)]
    for datatype in ("FP16", "FP32", "FP64"):
        np.testing.assert_array_equal(way(datatype, value), wanted)


@given(st.lists(st.integers(-(2**70), 2**70) | st.integers(-(2**54), 2**54)))
def test_whole_numbers_stay_exact_or_are_refused(numbers: list[int]) -> None:
    try:
        found = array_of(numbers, "FP64")
    except ValueError:
        assert any(abs(number) > 2**53 for number in numbers)
        return
    assert all(abs(number) <= 2**53 for number in numbers)
    assert list(map(int, found.tolist())) == numbers
