"""Frames as examples of functions: rows travel as tensors and come back as the frame they were."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import polars.testing
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import conch
from conch.core.errors import InvalidArgumentError
from conch_api.frame_examples import FrameExample
from conch_frames.column_rules import ModelInput, make_columns
from conch_frames.conversion import table_tensors
from conch_frames.libraries import frame_table

_TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5)
_DATES = st.datetimes(datetime(1700, 1, 1), datetime(2200, 1, 1))
_EXACT = st.integers(-(2**53), 2**53)
_ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "whole": st.integers(-(2**63), 2**63 - 1),
            "small": st.integers(0, 255),
            "maybe_whole": st.none() | _EXACT,
            "float": st.floats(allow_nan=False),
            "single": st.floats(width=32, allow_nan=False),
            "bool": st.booleans(),
            "maybe_bool": st.none() | st.booleans(),
            "text": _TEXTS,
            "maybe_text": st.none() | _TEXTS,
            "category": st.none() | st.sampled_from(["b", "a", ""]),
            "date": _DATES,
            "maybe_date": st.none() | _DATES,
        }
    ),
    min_size=1,
    max_size=4,
)
_FIRST: dict[str, Any] = {
    "whole": 1,
    "small": 1,
    "maybe_whole": None,
    "float": 0.5,
    "single": 0.5,
    "bool": True,
    "maybe_bool": None,
    "text": "a",
    "maybe_text": None,
    "category": "a",
    "date": datetime(2026, 1, 1),
    "maybe_date": None,
}


def pandas_frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows as a frame with a nullable type where a value may be missing."""
    dtypes = {
        "whole": "int64",
        "small": "uint8",
        "maybe_whole": "Int64",
        "float": "float64",
        "single": "float32",
        "bool": "bool",
        "maybe_bool": "boolean",
        "text": "str",
        "maybe_text": "string",
        "category": pd.CategoricalDtype(["a", "", "b", "c"], ordered=True),
        "date": "datetime64[us]",
        "maybe_date": "datetime64[us]",
    }
    return pd.DataFrame({name: pd.Series([row[name] for row in rows], dtype=dtypes[name]) for name in dtypes})


def polars_frame(rows: list[dict[str, Any]]) -> pl.DataFrame:
    """Rows as a frame of polars."""
    schema: dict[str, Any] = {
        "whole": pl.Int64,
        "small": pl.UInt8,
        "maybe_whole": pl.Int64,
        "float": pl.Float64,
        "single": pl.Float32,
        "bool": pl.Boolean,
        "maybe_bool": pl.Boolean,
        "text": pl.String,
        "maybe_text": pl.String,
        "category": pl.Enum(["a", "", "b", "c"]),
        "date": pl.Datetime("us"),
        "maybe_date": pl.Datetime("us"),
    }
    return pl.DataFrame(rows, schema=schema)


def arrow_table(rows: list[dict[str, Any]]) -> pa.Table:
    """Rows as a table of pyarrow; a dictionary has the categories that occur."""
    types = {
        "whole": pa.int64(),
        "small": pa.uint8(),
        "maybe_whole": pa.int64(),
        "float": pa.float64(),
        "single": pa.float32(),
        "bool": pa.bool_(),
        "maybe_bool": pa.bool_(),
        "text": pa.large_string(),
        "maybe_text": pa.string(),
        "date": pa.timestamp("us"),
        "maybe_date": pa.timestamp("us"),
    }
    return pa.table({name: pa.array([row[name] for row in rows], kind) for name, kind in types.items()})


def as_the_function_gets_it(example: FrameExample, frame: Any) -> Any:
    """A frame on its way through tensors."""
    inputs = [ModelInput(each.name, each.datatype, (-1, 1)) for each in example.tensors if each.name]
    tensors = table_tensors(frame_table(frame), make_columns("m", inputs, example.parameter, 0))
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    return example.frame(arrays | {name: read(arrays[name]) for name, read in example.readers.items()})


@given(_ROWS)
def test_rows_of_pandas_come_as_they_are(rows: list[dict[str, Any]]) -> None:
    example, frame = FrameExample(pandas_frame([_FIRST])), pandas_frame(rows)
    pd.testing.assert_frame_equal(as_the_function_gets_it(example, frame), frame, check_exact=True)


@given(_ROWS)
def test_rows_of_polars_come_as_they_are(rows: list[dict[str, Any]]) -> None:
    example, frame = FrameExample(polars_frame([_FIRST])), polars_frame(rows)
    polars.testing.assert_frame_equal(as_the_function_gets_it(example, frame), frame, check_exact=True)


@given(_ROWS)
def test_rows_of_pyarrow_come_as_they_are(rows: list[dict[str, Any]]) -> None:
    example, table = FrameExample(arrow_table([_FIRST])), arrow_table(rows)
    assert as_the_function_gets_it(example, table).equals(table)


@pytest.mark.parametrize(
    ("values", "datatype"),
    [([10, 20], "INT64"), ([1.5, 2.5], "FP64"), ([True, False], "BOOL"), (["1", "True"], "BYTES")],
)
def test_categories_are_values_of_their_own_type(values: list[Any], datatype: str) -> None:
    frame = pd.DataFrame({"kind": pd.Categorical(values)})
    example = FrameExample(frame)
    assert [each.datatype for each in example.columns] == [datatype]
    other = frame[::-1].reset_index(drop=True)
    pd.testing.assert_frame_equal(as_the_function_gets_it(example, other), other)
    one_is_none = pd.DataFrame({"kind": [values[0], {"BYTES": "x", "BOOL": 0.5}.get(datatype, 7)]})
    with pytest.raises(InvalidArgumentError, match="column 'kind', row 1: "):
        as_the_function_gets_it(example, one_is_none.astype(object))


@pytest.mark.parametrize(
    ("column", "values", "text"),
    [
        ("maybe_whole", [1.0, 1.5], "1.5 is no whole number from -9223372036854775808 to"),
        ("maybe_bool", [1.0, 2.0], "2.0 is no whole number from 0 to 1"),
        ("maybe_date", [0.0, np.inf], "inf is no whole number"),
        ("text", [b"a", b"\xff"], r"b'\xff' is no text in UTF-8"),
    ],
)
def test_what_the_example_can_not_have_is_refused(column: str, values: list[Any], text: str) -> None:
    read = FrameExample(pandas_frame([_FIRST])).readers[column]
    array = np.array(values, object if column == "text" else np.float64)[:, np.newaxis]
    with pytest.raises(InvalidArgumentError) as caught:
        read(array)
    assert caught.value.message.startswith(f"input '{column}', row 1: {text}")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1, "a"], "column 'x' has int, str: an input has texts, whole numbers"),
        ([None, None], "column 'x' has no value: an input has"),
        (pd.to_datetime(["2026-01-01"]).tz_localize("UTC"), "column 'x' is Datetime("),
        (pd.to_timedelta(["1s"]), "column 'x': its type is timedelta64[us], which no model takes"),
        ([], "a frame as example needs a column and a row"),
    ],
)
def test_columns_that_no_input_can_be(values: Any, text: str) -> None:
    server = conch.Server(grpc_port=None, http_port=None, metrics_port=None)
    frame = pd.DataFrame({"x": pd.Series(values, dtype=None if len(values) else object)})
    if isinstance(values, list) and values:
        frame = frame.astype(object)
    with pytest.raises(InvalidArgumentError) as caught:
        server.bind("m", lambda frame: frame, example=frame)
    assert text in caught.value.message


def test_a_frame_says_all_of_the_inputs() -> None:
    server = conch.Server(grpc_port=None, http_port=None, metrics_port=None)
    frame = pd.DataFrame({"x": [1.0]})
    for given_too in ({"inputs": [conch.Tensor("x")]}, {"config": conch.ModelConfig(batching=False)}):
        with pytest.raises(InvalidArgumentError, match="a frame as example has rows and says all"):
            server.bind("m", lambda frame: frame, example=frame, **given_too)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (pd.DataFrame({"x": ["a", None]}), "column 'x' has no value in row 1"),
        (pd.DataFrame({"x": pd.to_datetime(["2026-01-01"] * 2)}), "column 'x' has dates"),
        (pd.DataFrame({"x": [1]}), "an output has shape [1], but the inputs of the batch have 2 rows"),
    ],
)
def test_frames_that_can_not_be_outputs(answer: pd.DataFrame, text: str) -> None:
    server = conch.Server(grpc_port=None, http_port=None, metrics_port=None)
    with pytest.raises(InvalidArgumentError) as caught:
        server.bind("m", lambda frame: answer, example=pd.DataFrame({"x": [1, 2]}))
    assert text in caught.value.message


def test_a_frame_s_missing_numbers_are_outputs() -> None:
    answer = pd.DataFrame({"whole": pd.array([1, None], dtype="Int64"), "kind": pd.Categorical(["b", "a"])})
    server = conch.Server(grpc_port=None, http_port=None, metrics_port=None)
    server.bind("m", lambda frame: answer, example=pd.DataFrame({"x": [1, 2]}))
    with server:
        found = server.infer_frame("m", pl.DataFrame({"x": [5, 6]}))
    polars.testing.assert_frame_equal(found, pl.DataFrame({"whole": [1.0, float("nan")], "kind": ["b", "a"]}))


@pytest.mark.parametrize("bits", [63, 64])
def test_a_float_of_the_power_of_two_behind_a_type_is_refused(bits: int) -> None:
    name = "Int64" if bits == 63 else "UInt64"
    example = FrameExample(pd.DataFrame({"x": pd.array([1, None], dtype=name)}))
    read = example.readers["x"]
    below = np.array([[np.nextafter(2.0**bits, 0)]])
    assert example.frame({"x": read(below)})["x"].tolist() == [int(below.item())]
    with pytest.raises(InvalidArgumentError, match=r"input 'x', row 0: .* is no whole number from"):
        read(np.array([[2.0**bits]]))
