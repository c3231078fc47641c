"""Each kind of column against each kind of input: what it becomes, or why it is refused."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conch.core.errors import InvalidArgumentError
from conch_frames.column_rules import columns_of_config
from conch_frames.conversion import Table, table_tensors
from conch_frames.csv_table import csv_table, csv_text
from conch_frames.frame_error import FrameError
from conch_frames.libraries import frame_like, frame_table
from conch_frames.output_columns import output_columns

NAN = float("nan")
ZONED = dt.datetime(2026, 1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1)))
NEW_YEAR = 1_767_225_600
"""Seconds of 2026-01-01 in UTC."""


def config(columns: dict[str, str], stated: Any = None, width: int = 1) -> dict[str, Any]:
    """A model's config in JSON, with an input for each column."""
    inputs = [
        {"name": name, "data_type": f"TYPE_{datatype}", "dims": [str(width)]}
        for name, datatype in columns.items()
    ]
    parameters = {} if stated is None else {"CONCH_COLUMNS": {"string_value": json.dumps(stated)}}
    return {"name": "m", "max_batch_size": 8, "input": inputs, "parameters": parameters}


def converted(data: Any, datatype: str, texts: bool = False, **rule: Any) -> Any:
    model = columns_of_config(config({"x": datatype}, [{"name": "x", **rule}]))
    table = Table({"x": data}, texts=True) if texts else frame_table({"x": data})
    tensor = table_tensors(table, model)["x"]
    assert tensor.shape == (len(data), 1)
    return tensor.numpy()[:, 0].tolist()


def categorical(*values: Any) -> Any:
    return pa.array(values).dictionary_encode()


DATES = pd.Series(pd.to_datetime(["2026-01-01", None])).to_numpy()
CITIES = {"categories": ["NL", "DE"]}

CONVERTED: list[tuple[Any, str, dict[str, Any], Any]] = [
    ([True, False], "BOOL", {}, [True, False]),
    ([True, None], "FP32", {}, [1, NAN]),
    ([True, False], "INT8", {}, [1, 0]),
    ([1, 2.5, None], "FP64", {}, [1, 2.5, NAN]),
    ([2**53, -(2**53)], "FP64", {}, [2**53, -(2**53)]),
    ([2**24], "FP32", {}, [2**24]),
    ([0.1], "FP32", {}, [float(np.float32(0.1))]),
    ([1.0, -3.0], "INT64", {}, [1, -3]),
    ([2**63], "UINT64", {}, [2**63]),
    (np.array([1, 255], np.int64), "UINT8", {}, [1, 255]),
    (np.array([1, 2], np.uint8), "INT16", {}, [1, 2]),
    (np.array([1.5], np.float16), "FP64", {}, [1.5]),
    (pa.array([2**53 + 1, None]), "INT64", {}, "row 1: it is null, which INT64 can't be"),
    (pa.array([None, None]), "FP64", {}, [NAN, NAN]),
    (["", "ü"], "STRING", {}, [b"", "ü".encode()]),
    (["x", NAN], "STRING", {"null": "?"}, [b"x", b"?"]),
    (pa.array(["a", None]), "STRING", {"null": ""}, [b"a", b""]),
    (pa.array(["a", "b"], pa.string_view()), "STRING", {}, [b"a", b"b"]),
    (categorical("a", "b", "a"), "STRING", {}, [b"a", b"b", b"a"]),
    (categorical("a", None), "STRING", {"null": "-"}, [b"a", b"-"]),
    (categorical(10, 20, None), "FP32", {}, [10, 20, NAN]),
    (["DE", "NL", None], "FP32", {**CITIES, "codes": True}, [1, 0, NAN]),
    (["DE", "FR"], "FP32", {**CITIES, "codes": True, "unseen": "null"}, [1, NAN]),
    (categorical("DE", "NL"), "INT8", {**CITIES, "codes": True}, [1, 0]),
    ([20.0, 10], "FP32", {"categories": [10, 20], "codes": True}, [1, 0]),
    ([20, 10], "INT64", {"categories": [10, 20]}, [20, 10]),
    (["NL"], "STRING", CITIES, [b"NL"]),
    (DATES[:1], "INT64", {"unit": "ms"}, [NEW_YEAR * 1000]),
    (DATES, "FP64", {"unit": "s"}, [NEW_YEAR, NAN]),
    ([dt.date(2026, 1, 1), ZONED], "INT64", {"unit": "us"}, [NEW_YEAR * 10**6] * 2),
    (["2026-01-01", "2026-01-01T01:00:00+01:00"], "INT64", {"unit": "s"}, [NEW_YEAR] * 2),
    ([NEW_YEAR], "INT64", {"unit": "s"}, [NEW_YEAR]),
    (pa.array([ZONED], pa.timestamp("ns", "Europe/Berlin")), "INT64", {"unit": "s"}, [NEW_YEAR]),
    ([dt.date(2026, 1, 1)], "STRING", {"unit": "iso"}, [b"2026-01-01T00:00:00"]),
    ([2**53 + 1], "FP64", {}, "row 0: 9007199254740993 is a whole number beyond 9007199254740992"),
    ([0, 2**24 + 1], "FP32", {}, "row 1: 16777217 is a whole number beyond 16777216"),
    (pa.array([2**53 + 1, None]), "FP64", {}, "row 0: 9007199254740993 is a whole number"),
    ([0.5, 2**60], "FP64", {}, "row 1: 1152921504606846976 is a whole number"),
    ([1e39], "FP32", {}, "row 0: 1e+39 is beyond FP32"),
    ([1, 1.5], "INT32", {}, "row 1: 1.5 is no whole number"),
    ([1, 128], "INT8", {}, "row 1: 128 is beyond INT8"),
    ([-1], "UINT8", {}, "row 0: -1 is beyond UINT8"),
    ([2.0**63], "INT64", {}, "row 0: 9.223372036854776e+18 is beyond INT64"),
    ([2**64], "UINT64", {}, "row 0: 18446744073709551616 is beyond UINT64"),
    ([1.0, 2.0**53], "INT64", {}, "row 1: 9007199254740992.0 is a float of 9007199254740992 or more, which"),
    ([None], "BOOL", {}, "row 0: it is null, which BOOL can't be"),
    (pa.array([None, 1]), "BOOL", {}, "row 0: it is null, which BOOL can't be"),
    ([1, NAN], "INT64", {}, "row 1: it is null, which INT64 can't be"),
    ([1.5, None], "INT64", {}, "row 0: 1.5 is no whole number"),
    ([True, None], "BOOL", {}, "row 1: it is null, which BOOL can't be"),
    ([True, 1], "BOOL", {}, "row 1: must have true or false, not 1"),
    (["1"], "FP64", {}, "row 0: must have numbers of type FP64, not '1'"),
    ([1, "1"], "INT64", {}, "row 1: must have numbers of type INT64, not '1'"),
    (["a", 5], "STRING", {}, "row 1: must have texts, not 5: send texts, or, if a CatBoost"),
    ([True], "STRING", {}, "row 0: must have texts, not True: send texts, or, if a CatBoost"),
    ([None], "STRING", {}, "row 0: it is null, and a text can't be: send another one, such as '', or, if"),
    (["?"], "STRING", {"null": "?"}, "row 0: '?' stands for null in this column"),
    (["\ud800"], "STRING", {}, "row 0: its text has a surrogate"),
    (categorical("a", None), "STRING", {}, "row 1: it is null, and a text can't be"),
    (["DE", "de"], "STRING", CITIES, "row 1: 'de' is no category of the model: 'NL', 'DE'"),
    (categorical("DE", "NL", "FR"), "STRING", CITIES, "row 2: 'FR' is no category of the model"),
    (["10"], "FP32", {"categories": [10], "codes": True}, "row 0: '10' is no category"),
    ([True], "FP32", {"categories": [1], "codes": True}, "row 0: True is no category"),
    (DATES[:1], "INT64", {}, "it has dates, and the model's config states no unit"),
    (["2026-01-01T00:00:00.5"], "INT64", {"unit": "s"}, "row 0: 2026-01-01T00:00:00.500000000 is finer"),
    (["01/02/2026"], "INT64", {"unit": "s"}, "row 0: '01/02/2026' is no date of ISO 8601"),
    (["2026-01-01", 5], "INT64", {"unit": "s"}, "row 1: must have dates in ISO 8601, not 5"),
    (["9999-01-01"], "INT64", {"unit": "s"}, "row 0: '9999-01-01' is no date"),
    ([[1]], "FP64", {}, "row 0: its value is of type list"),
    (np.array([1j]), "FP64", {}, "its type is complex128, which no model takes"),
    (pa.array([[1]]), "FP64", {}, "its Arrow type is list<item: int64>"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "datatype", "rule", "expected"), CONVERTED)
def test_a_column_becomes_its_input_or_is_refused_where_it_stands(
    data: Any, datatype: str, rule: dict[str, Any], expected: Any
) -> None:
    if isinstance(expected, list):
        assert np.array_equal(
            converted(data, datatype, **rule),
            expected,
            equal_nan=rule.get("null") is None and datatype[0] == "F",
        )
        return
    with pytest.raises(FrameError) as caught:
        converted(data, datatype, **rule)
    place = "column 'x', " if expected.startswith("row") else "column 'x': "
    assert caught.value.message.startswith(place + expected)


NUMBERS = st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.just("1")


@given(
    st.lists(NUMBERS | st.integers(-9, 9), min_size=1, max_size=6),
    st.sampled_from(["FP64", "FP32", "INT64", "UINT64"]),
)
def test_a_list_of_several_types_becomes_what_its_values_become(values: list[Any], datatype: str) -> None:
    expected: list[Any] = []
    for row, value in enumerate(values):
        try:
            expected += converted([value], datatype)
        except FrameError as error:
            with pytest.raises(FrameError) as caught:
                converted(values, datatype)
            assert (caught.value.row, caught.value.reason) == (row, error.reason)
            return
    assert np.array_equal(converted(values, datatype), expected, equal_nan=datatype[0] == "F")


CELLS: list[tuple[list[str | None], str, dict[str, Any], Any]] = [
    (["007", "7.0", "1e2"], "INT64", {}, [7, 7, 100]),
    (["1", None, "nan", "-inf"], "FP64", {}, [1, NAN, NAN, -np.inf]),
    (["1", ""], "FP64", {}, [1, NAN]),
    (["True", "false", "1"], "BOOL", {}, [True, False, True]),
    (["true", "2"], "FP32", {}, [1, 2]),
    (["007", "NA", "null", ""], "STRING", {}, [b"007", b"NA", b"null", b""]),
    (["20", "10"], "FP32", {"categories": [10, 20], "codes": True}, [1, 0]),
    (["2026-01-01"], "INT64", {"unit": "s"}, [NEW_YEAR]),
    (["9007199254740993"], "FP64", {}, "row 0: 9007199254740993 is a whole number"),
    (["1", "16777217"], "FP32", {}, "row 1: 16777217 is a whole number"),
    (["1_0"], "INT64", {}, "row 0: must have numbers of type INT64, not '1_0'"),
    (["0x10"], "INT64", {}, "row 0: must have"),
    (["1", "٣"], "FP64", {}, "row 1: must have"),
    ([" 1"], "FP64", {}, "row 0: must have"),
    (["1e400"], "FP64", {}, "row 0: must have"),
    (["yes"], "BOOL", {}, "row 0: must have true or false, not 'yes'"),
    ([None], "INT64", {}, "row 0: it is null"),
    ([None], "STRING", {}, "row 0: it is null"),
]  # fmt: skip


@pytest.mark.parametrize(("cells", "datatype", "rule", "expected"), CELLS)
def test_a_cell_of_csv_is_what_the_model_says(
    cells: list[str | None], datatype: str, rule: dict[str, Any], expected: Any
) -> None:
    if isinstance(expected, list):
        found = converted(cells, datatype, texts=True, **rule)
        assert np.array_equal(found, expected, equal_nan=datatype[0] == "F")
        return
    with pytest.raises(FrameError, match=rf"^column 'x', {expected}"):
        converted(cells, datatype, texts=True, **rule)


MATRIX = config({"input": "FP32"}, ["a", "b"], width=2)
TABLES: list[tuple[dict[str, Any], Table, Any]] = [
    (MATRIX, Table({"c": [9], "b": [2], "a": [1]}), {"input": [[1, 2]]}),
    (MATRIX, Table({"0": [1], "1": [2]}, named=False), {"input": [[1, 2]]}),
    (config({"input": "FP32"}, width=2), Table({"0": [1], "1": [2]}, named=False), {"input": [[1, 2]]}),
    (config({"a": "FP32", "b": "INT8"}), Table({"b": [2], "a": [1]}), {"a": [[1]], "b": [[2]]}),
    (
        config({"input": "FP32"}, [{"name": "a_b", "spaces": True}, "c"], width=2),
        Table({"c": [2], "a b": [1]}),
        {"input": [[1, 2]]},
    ),
    (MATRIX, Table({"a": [1]}), "column 'b': model 'm' needs it, and the table has 'a'"),
    (
        MATRIX,
        Table({}, texts=True, others=("a;b",)),
        "column 'a': model 'm' needs it, and the table has 'a;b'; values of CSV are separated by commas",
    ),
    (
        MATRIX,
        Table({"0": [1]}, named=False),
        "the table: it has 1 columns without names, and model 'm' has 2",
    ),
    (MATRIX, Table({"a": [1], "b": [1, 2]}), "column 'b': it has 2 rows, and the columns before have 1"),
    (MATRIX, Table({"a": [], "b": []}), "the table: it has no rows"),
    (MATRIX, Table({}), "the table: it has no columns; model 'm' has 'a', 'b'"),
    (
        config({"input": "FP32"}, width=2),
        Table({"a": [1], "b": [2]}),
        "the table: model 'm' does not name the columns of its input",
    ),
    (
        config({"a": "FP32", "b": "INT8"}),
        Table({"0": [1], "1": [2]}, named=False),
        "the table: name its columns: model 'm' has 'a', 'b'",
    ),
    (config({"a": "FP32", "b": "FP32"}, width=3), Table({"a": [1]}), "the table: input 'a' of model 'm' has"),
]


@pytest.mark.parametrize(("model", "table", "expected"), TABLES)
def test_columns_go_to_the_models_places_by_name(model: dict[str, Any], table: Table, expected: Any) -> None:
    if isinstance(expected, dict):
        found = table_tensors(table, columns_of_config(model))
        assert {name: each.numpy().tolist() for name, each in found.items()} == expected
        return
    with pytest.raises(FrameError) as caught:
        table_tensors(table, columns_of_config(model))
    assert caught.value.message.startswith(expected)


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ("[", "is not JSON"),
        ({"a": 1}, "must be a list"),
        ([1], "has 1, which is no name"),
        (["x", "x"], "has column 'x' twice"),
        (["y", "z"], "has 2 columns, and input 'x' has dims"),
        ([{"name": "x", "kind": 1}], "column 'x' has 'kind'; known are name, categories"),
        ([{"name": "x", "categories": [1, "a"]}], "'categories' must be a list of different values of one"),
        ([{"name": "x", "categories": ["a"]}], "its categories are texts and its input is FP32"),
        ([{"name": "x", "codes": True}], "'codes' must be true or false; it needs categories"),
        ([{"name": "x", "unit": "iso"}], "'unit' of dates must be s, ms, us, ns, not 'iso'"),
        ([{"name": "x", "null": ""}], "'null' must be a text, and needs an input of texts"),
        ([{"name": "x", "unseen": "other"}], "'unseen' must be 'refuse'"),
        ([{"name": "x", "spaces": 1.5}], "'spaces' must be true or false"),
    ],
)
def test_a_parameter_that_contradicts_the_inputs_is_refused(stated: Any, reason: str) -> None:
    model = config({"x": "FP32"})
    text = stated if isinstance(stated, str) else json.dumps(stated)
    model["parameters"]["CONCH_COLUMNS"] = {"string_value": text}
    with pytest.raises(InvalidArgumentError, match=f"model 'm': parameter 'CONCH_COLUMNS'.*{reason}"):
        columns_of_config(model)


OUTPUTS = ("p", "t", "q_0", "q_1")
FRAME = pd.DataFrame(
    {"a": [1.5, NAN], "s": ["x", "y"], "c": pd.Categorical(["u", "v"]), "n": pd.array([1, None], "Int64")},
    index=[7, 9],
)


@pytest.mark.parametrize("frame", [FRAME, pl.from_pandas(FRAME), pa.Table.from_pandas(FRAME)])
def test_frames_of_all_libraries_are_one_table_and_come_back_as_they_came(frame: Any) -> None:
    model = columns_of_config(config({"a": "FP32", "s": "STRING", "c": "STRING", "n": "FP64"}))
    found = {name: each.numpy()[:, 0] for name, each in table_tensors(frame_table(frame), model).items()}
    assert np.array_equal(found["a"], [1.5, NAN], equal_nan=True)
    assert np.array_equal(found["n"], [1, NAN], equal_nan=True)
    assert found["s"].tolist() == [b"x", b"y"] and found["c"].tolist() == [b"u", b"v"]
    outputs = {"p": np.array([[1], [2]]), "t": np.array([b"x", b"y"], object), "q": np.eye(2)}
    back = frame_like(output_columns(outputs), frame)
    assert type(back) is type(frame)
    columns = (
        back.to_dict() if isinstance(back, pa.Table) is False and isinstance(back, pl.DataFrame) else None
    )
    if isinstance(back, pd.DataFrame):
        assert back.index.tolist() == [7, 9]
        columns = {name: back[name] for name in back}
    elif isinstance(back, pa.Table):
        columns = back.to_pydict()
    assert columns is not None
    assert {name: list(values) for name, values in columns.items()} == {
        "p": [1, 2],
        "t": ["x", "y"],
        "q_0": [1, 0],
        "q_1": [0, 1],
    }


@given(
    st.lists(
        st.tuples(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), st.floats()),
        min_size=1,
    )
)
def test_csv_comes_back_as_it_went(rows: list[tuple[str, float]]) -> None:
    texts, numbers = np.array([row[0] for row in rows], object), np.array([row[1] for row in rows])
    table = csv_table(csv_text({"t": texts, "n": numbers}).encode())
    assert table.columns["t"] == texts.tolist()
    assert np.array_equal(converted(table.columns["n"], "FP64", texts=True), numbers, equal_nan=True)


@pytest.mark.parametrize(
    ("text", "cells"),
    [
        ('a,b\r\n"",\r\n', [[""], [None]]),
        ('a,b\n,""""\n', [[None], ['"']]),
        ('a,b\n"x"",""y",""\n', [['x","y'], [""]]),
        ('a,b\n"",""', [[""], [""]]),
        ('\ufeffa,b\n\n"1\n",2\n', [["1\n"], ["2"]]),
    ],
)
def test_a_quoted_empty_field_is_a_text_and_an_empty_one_null(
    text: str, cells: list[list[str | None]]
) -> None:
    assert list(csv_table(text.encode()).columns.values()) == cells


FILLER = [("1.5", "7", "word" * 20, "true")] * 1000
"""Rows behind others, which make a body long enough for the quick parser."""
ODD_CELLS = ("", '""', "nan", "1e400", "007", "NA", "+1", ".5", "0x10", str(2**53 + 1), "9" * 30)


def read_csv(content: bytes | str) -> Table:
    """A table, read in a thread, as servers do: in the main one pyarrow keeps a pipe for signals."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(csv_table, content).result()


QUOTED = st.text('1.5,\n "xü', max_size=5).map(lambda text: '"' + text.replace('"', '""') + '"')
CELL = st.text("0123456789+-.eE xn_ü", max_size=6) | st.sampled_from(ODD_CELLS) | QUOTED


@given(
    st.lists(st.tuples(CELL, CELL, CELL, st.sampled_from(["1", "true", "no", ""])), max_size=3), st.booleans()
)
@example([("1", "9" * 30, "a", "true")], False)
@example([('""', '"7"', '""', "1"), ("", "1", '",\n"', "true"), ("2", "", "", "1")], True)
@example([("1", "1", 'a"b"', "1")], False)
@example([("1", "1", '"a""b"', "1")], False)
def test_long_csv_is_read_by_a_quick_parser_as_by_the_careful_one(
    rows: list[tuple[str, ...]], returns: bool
) -> None:
    datatypes = {"f": "FP64", "i": "INT64", "s": "STRING", "b": "BOOL"}
    model = columns_of_config(config(datatypes, [{"name": "s", "null": "none"}]))
    end = "\r\n" if returns else "\n"
    lines = end.join(",".join(row) for row in [*rows, *FILLER])
    text = f'"f",i,s,b{end}{lines}'
    found: list[str] = []
    for content in (text.encode(), text):  # a text is for the careful one
        try:
            tensors = table_tensors(read_csv(content), model)
            arrays = {name: each.numpy() for name, each in tensors.items()}
        except FrameError as error:
            found.append(error.message)
        else:
            found.append(repr({name: array.ravel()[:3].tolist() for name, array in arrays.items()}))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("cell", "quick"), [('""', True), ('"a,\n"', True), ('"a""b"', False), ('a"b', False), (' "a"', False)]
)
def test_fields_with_quotes_are_for_the_careful_parser(cell: str, quick: bool) -> None:
    lines = "\n".join(",".join(row) for row in [("1", "1", cell, "1"), *FILLER])
    table = read_csv(f"f,i,s,b\n{lines}".encode())
    assert isinstance(table.columns["s"], pa.ChunkedArray) == quick


@pytest.mark.process
def test_csv_becomes_tensors_without_pandas() -> None:
    # Imported by many of pyarrow's methods, it takes longer than 10,000 rows.
    lines = "\n".join(",".join(row) for row in [("", "7", "", "1"), *FILLER])
    model = config({"f": "FP64", "i": "INT64", "s": "STRING"}, [{"name": "s", "null": "none"}])
    source = f"""
import sys
from conch_frames.column_rules import columns_of_config
from conch_frames.conversion import table_tensors
from conch_frames.csv_table import csv_table
table_tensors(csv_table(sys.stdin.buffer.read()), columns_of_config({model!r}))
assert "pyarrow" in sys.modules
print("pandas" in sys.modules)
"""
    body = f"f,i,s,b\n{lines}".encode()
    done = subprocess.run([sys.executable, "-c", source], input=body, capture_output=True, check=True)
    assert done.stdout == b"False\n"


@pytest.mark.parametrize(
    "text", ["", "a,a\n1,2\n", "a,b\n1\n", 'a\n"x"y\n', 'a\n"x', "a\n\0\n", b"a\n\xff\n"]
)
def test_csv_that_is_malformed_is_refused(text: Any) -> None:
    with pytest.raises(FrameError, match=r"^the table"):
        csv_table(text if isinstance(text, bytes) else text.encode())
