"""Values that become an input's array, and those that are refused as they would become other values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.errors import InvalidArgumentError
from conch.core.tensor import NUMPY_DTYPES, Array
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
        ("INT32", [1.0]),
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
        ("FP32", [None]),
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
