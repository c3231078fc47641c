"""Rows of a request in parts, and arrays by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch.core.tensor import Tensor
from conch_frames.column_check import check_columns
from conch_frames.column_rules import ModelInput, make_columns
from conch_frames.frame_error import FrameError
from conch_frames.interface import FrameInterface, OutputRule
from conch_frames.invocations.replies import AcceptError, import_format, predictions
from conch_frames.invocations.request_body import ARROW_TYPE, PARQUET_TYPE, ContentTypeError, read_request
from conch_frames.invocations.request_inputs import array_tensor, joined_rows, split_rows
from conch_frames.libraries import frame_table


@given(st.integers(1, 9), st.integers(0, 4))
def test_rows_are_split_by_the_batch_and_joined_again(count: int, most: int) -> None:
    texts = Tensor.from_array("t", np.array([str(each).encode() for each in range(count)], object))
    numbers = Tensor.from_array("n", np.arange(2 * count, dtype=np.int32).reshape(count, 2))
    parts = split_rows({"t": texts, "n": numbers}, most)
    assert len(parts) == (-(-count // most) if most else 1)
    joined = joined_rows([list(part.values()) for part in parts])
    assert [each.numpy().tolist() for each in joined] == [texts.numpy().tolist(), numbers.numpy().tolist()]


def test_rows_are_split_into_no_more_requests_than_a_queue_takes() -> None:
    rows = {"n": Tensor.from_array("n", np.zeros(2 * 16384 + 1, np.int32))}
    assert len(split_rows(rows, 3)) == -(-(2 * 16384 + 1) // 3)
    with pytest.raises(InvalidArgumentError, match="32769 rows are more than 16384 requests of 2 rows"):
        split_rows(rows, 2)


@pytest.mark.parametrize(
    ("values", "datatype", "expected"),
    [
        ([[1, 2], [3, 4]], "FP32", [[1, 2], [3, 4]]),
        ([[1, None]], "FP64", [[1, float("nan")]]),
        ([["a"], ["b"]], "BYTES", [[b"a"], [b"b"]]),
        ([[2**53 + 1, 1]], "INT64", [[2**53 + 1, 1]]),
        ([[0.5, 1], [2**53 + 1, 1]], "FP64", "column 'x', row 1: 9007199254740993 is a whole number"),
        ([[1, 2], [3]], "FP32", "column 'x': its values are no regular array"),
        ([["a"], ["b", "c"]], "BYTES", "column 'x': its values are no regular array"),
        ([["a"], [None]], "BYTES", "column 'x', row 1: it is null"),
    ],
)
def test_an_array_of_more_dimensions_keeps_the_rules_of_a_column(
    values: Any, datatype: str, expected: Any
) -> None:
    of = ModelInput("x", datatype, (-1, -1))
    if isinstance(expected, str):
        with pytest.raises(FrameError) as caught:
            array_tensor(values, of)
        assert caught.value.message.startswith(expected)
    else:
        assert np.array_equal(array_tensor(values, of).numpy(), np.array(expected), datatype == "FP64")


def test_conch_check_finds_rules_that_contradict_the_inputs() -> None:
    config: dict[str, Any] = {
        "name": "m",
        "max_batch_size": 8,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [2]}],
        "parameters": {"CONCH_COLUMNS": {"string_value": '["a"]'}},
    }
    (found,) = check_columns(config, Path(), None)
    assert (found.severity, found.path) == ("error", 'parameters["CONCH_COLUMNS"].string_value')
    assert "has 1 columns, and input 'x' has dims [-1, 2]" in found.message
    assert not list(check_columns({**config, "input": [{"name": "x"}]}, Path(), None))


def test_without_pyarrow_its_formats_are_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "conch_frames.arrow_tables", raising=False)
    fix = r"pip install 'conch\[frames\]'"
    for kind in (ARROW_TYPE, PARQUET_TYPE):
        with pytest.raises(ContentTypeError, match=fix):
            read_request(b"", kind, 0, bool)
    with pytest.raises(AcceptError, match=fix):
        import_format(ARROW_TYPE)
    with pytest.raises(UnavailableError, match=fix):
        frame_table(np.zeros(1))
    long = b"a\n" + b"1\n" * 40_000
    assert read_request(long, "text/csv", 0, bool).data.rows == 40_000


def test_infinity_is_no_null_of_a_reply() -> None:
    interface = FrameInterface(make_columns("m", (), None, 0), {}, (OutputRule("y", "y", in_records=False),))
    infinite = Tensor.from_array("y", np.array([1.0, np.nan, -np.inf]))
    with pytest.raises(InvalidArgumentError, match="output 'y' has infinity, which JSON has not: accept CSV"):
        predictions([infinite], interface)
    assert predictions([infinite], interface, "text/csv") == b"y\n1.0\n\n-inf\n"
