"""Requests of MLflow's scoring protocol as tensors, and outputs as predictions."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.errors import ConchError, InvalidArgumentError
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.tensor import Tensor
from conch_mlflow.scoring.scoring_body import ContentTypeError, read_body
from conch_mlflow.scoring.scoring_tensors import (
    joined_rows,
    predictions,
    request_tensors,
    split_rows,
    wanted_outputs,
)
from conch_mlflow.scoring.scoring_warmup import example_sample
from conch_mlflow.signature import Signature, parse_signature

COLUMNS: list[dict[str, Any]] = [
    {"type": "double", "name": "a"},
    {"type": "long", "name": "n"},
    {"type": "string", "name": "s"},
    {"type": "boolean", "name": "b"},
]
FRAME: dict[str, list[Any]] = {
    "columns": ["n", "a", "b", "s"],
    "data": [[1, 2.5, True, "x"], [-3, None, False, "ü"]],
}


def signature(inputs: list[dict[str, Any]], outputs: Any = None, params: Any = None) -> Signature:
    found = parse_signature(
        {
            "inputs": json.dumps(inputs),
            "outputs": json.dumps(outputs or []),
            "params": json.dumps(params or []),
        }
    )
    assert found is not None
    return found


def spec(*inputs: TensorSpec, outputs: tuple[str, ...] = ("y",), batch: int = 0) -> ModelSpec:
    made = tuple(TensorSpec(name, "FP64", (-1,)) for name in outputs)
    return ModelSpec("m", 1, "", "x", batch, inputs, made, Path("m"), Path("m/1"), "", ())


def tensors(body: Any, model: ModelSpec, of: Signature, kind: str = "application/json") -> dict[str, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = request_tensors(read_body(content, kind), model, of)
    return {name: each.numpy().tolist() for name, each in found.items()}


BY_COLUMN = spec(
    TensorSpec("a", "FP64", (-1,)),
    TensorSpec("n", "INT64", (-1, 1)),
    TensorSpec("s", "BYTES", (-1,)),
    TensorSpec("b", "BOOL", (-1,)),
)
RECORDS = [dict(zip(FRAME["columns"], row, strict=True)) for row in FRAME["data"]]
CSV = 's,a,n,b\nx,2.5,1,True\n"ü",,-3,false\n'.encode()


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"dataframe_split": FRAME}, "application/json; charset=utf-8"),
        ({"dataframe_records": RECORDS, "params": None}, "application/json"),
        ({"instances": RECORDS}, ""),
        ({"inputs": {name: [row[name] for row in RECORDS] for name in "abns"}}, "application/json"),
        ({"inputs": RECORDS}, "application/json"),
        (CSV, "text/csv"),
    ],
)
def test_one_table_in_every_format(body: Any, kind: str) -> None:
    found = tensors(body, BY_COLUMN, signature(COLUMNS), kind)
    a = found.pop("a")
    assert a[0] == 2.5 and np.isnan(a[1])
    assert found == {"n": [[1], [-3]], "s": [b"x", "ü".encode()], "b": [True, False]}


@pytest.mark.parametrize("name", ["dataframe_records", "inputs", "instances"])
def test_a_null_in_a_column_of_texts_is_refused_where_it_stands(name: str) -> None:
    """An element of BYTES can't be missing."""
    records = [{**RECORDS[0]}, {**RECORDS[1], "s": None}]
    with pytest.raises(InvalidArgumentError, match=r"'s' has a null at \[1\], and a text can't be missing"):
        tensors({name: records}, BY_COLUMN, signature(COLUMNS))


@pytest.mark.parametrize(
    ("datatype", "value"),
    [("FP32", 1e39), ("FP32", -3.5e38), ("FP16", 65520), ("FP16", 10**6), ("INT8", 128)],
)
def test_a_number_beyond_its_type_is_refused(datatype: str, value: float) -> None:
    model, of = spec(TensorSpec("x", datatype, (-1,))), signature([{"type": "double", "name": "x"}])
    bodies: list[Any] = [{"inputs": {"x": [1, value]}}, {"inputs": [1, value]}]
    for body in bodies:
        with pytest.raises(InvalidArgumentError, match=f"'x' must have numbers of type {datatype}, without"):
            tensors(body, model, of)


def test_infinity_stays_infinity() -> None:
    model, of = spec(TensorSpec("x", "FP16", (-1,))), signature([{"type": "double", "name": "x"}])
    assert tensors(b"x\ninf\n-inf\n", model, of, "text/csv") == {"x": [np.inf, -np.inf]}


def test_a_table_in_parquet() -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {name: [row[name] for row in RECORDS] for name in "abns"}
    body = io.BytesIO()
    parquet.write_table(arrow.table({**columns, "__index_level_0__": [0, 1]}), body)
    found = tensors(body.getvalue(), BY_COLUMN, signature(COLUMNS), "application/vnd.apache.parquet")
    a = found.pop("a")
    assert a[0] == 2.5 and np.isnan(a[1])
    assert found == {"n": [[1], [-3]], "s": [b"x", "ü".encode()], "b": [True, False]}
    with pytest.raises(InvalidArgumentError, match="the body is not Parquet"):
        tensors(b"PAR1", BY_COLUMN, signature(COLUMNS), "application/vnd.apache.parquet")


def test_an_engine_with_one_input_gets_the_columns_in_the_signatures_order() -> None:
    model = spec(TensorSpec("input", "FP32", (-1, 2)))
    of = signature([{"type": "double", "name": "a"}, {"type": "double", "name": "b"}])
    split = {"dataframe_split": {"columns": ["more", "b", "a"], "data": [["x", 2, 1], ["y", 4, 3]]}}
    assert tensors(split, model, of) == {"input": [[1, 2], [3, 4]]}
    assert tensors({"inputs": {"a": [1], "b": [2]}}, model, of) == {"input": [[1, 2]]}
    # Rows without names are taken as they are.
    assert tensors({"inputs": [[1, 2], [3, 4]]}, model, of) == {"input": [[1, 2], [3, 4]]}
    assert tensors({"dataframe_split": {"data": [[1, 2]]}}, model, of) == {"input": [[1, 2]]}
    with pytest.raises(InvalidArgumentError, match="no column 'b'"):
        tensors({"dataframe_records": [{"a": 1}]}, model, of)


def test_params_are_inputs_and_others_are_refused() -> None:
    model = spec(
        TensorSpec("x", "FP64", (-1,)),
        TensorSpec("k", "INT64", (1,), optional=True),
        TensorSpec("stop", "BYTES", (-1,), optional=True),
    )
    params = [
        {"name": "k", "type": "long", "default": 1, "shape": None},
        {"name": "stop", "type": "string", "default": [], "shape": [-1]},
    ]
    of = signature([{"type": "double", "name": "x"}], params=params)
    found = tensors({"instances": [1.0], "params": {"k": 3, "stop": ["a", "b"]}}, model, of)
    assert found == {"x": [1.0], "k": [3], "stop": [b"a", b"b"]}
    with pytest.raises(InvalidArgumentError, match="has no param 'temperature'"):
        tensors({"instances": [1.0], "params": {"temperature": 1}}, model, of)


@pytest.mark.parametrize(
    ("body", "kind", "reason"),
    [
        (b"{", "application/json", "the body is not JSON"),
        ({"instances": [1], "inputs": [1]}, "application/json", "it has instances and inputs"),
        ([1], "application/json", "exactly one of"),
        ({"dataframe_split": {"data": [[1], [1, 2]]}}, "application/json", "data\\[1\\]' has 2 values"),
        ({"dataframe_split": {"columns": ["a", "a"], "data": []}}, "application/json", "name twice"),
        ({"instances": [{"a": 1}, {"b": 1}]}, "application/json", "instances\\[1\\]"),
        ({"dataframe_records": RECORDS[:1], "params": [1]}, "application/json", "'params' must be"),
        (
            {"dataframe_records": [{"a": "x", "n": 1, "s": "", "b": True}]},
            "application/json",
            "'a' must have",
        ),
        ({"dataframe_records": [{"a": 1, "n": 1.5, "s": "", "b": True}]}, "application/json", "without loss"),
        ({"dataframe_records": [{"a": 1, "n": 1, "s": 5, "b": True}]}, "application/json", "texts, not 5"),
        (
            {"dataframe_records": [{"a": 1, "n": 1, "s": "", "b": 1}]},
            "application/json",
            "true or false, not 1",
        ),
        ({"dataframe_records": [{"a": 1}]}, "application/json", "has no 'n'"),
        ({"inputs": {"s": None, "a": [], "n": [], "b": []}}, "application/json", r"'s' has a null at \[\]"),
        ({"inputs": [{"a": 1}, 2]}, "application/json", "'inputs' must be a list of objects"),
        ({"inputs": [1]}, "application/json", "several inputs"),
        ({"inputs": {"a": [[1], [1, 2]]}}, "application/json", "'a' is no regular array"),
        (b"a,n\n1\n", "text/csv", "row 1 of the CSV has 1 values"),
        (b"a,n,s,b\n1,2.5,x,true\n", "text/csv", "type INT64"),
        (b"", "text/csv", "the body is empty"),
        (b"", "text/plain", "expected application/json"),
        (b"", "text/csv; charset=latin-1", "only charset=utf-8"),
        (b"", "application/vnd.apache.parquet", "pyarrow"),
    ],
)
def test_wrong_requests_name_what_is_wrong(body: Any, kind: str, reason: str) -> None:
    if "parquet" in kind and _has_pyarrow():
        pytest.skip("pyarrow is installed")
    with pytest.raises(ConchError, match=reason) as caught:
        tensors(body, BY_COLUMN, signature(COLUMNS), kind)
    wanted = 415 if isinstance(caught.value, ContentTypeError) else 400
    assert caught.value.http_status == wanted


def _has_pyarrow() -> bool:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        return False
    return True


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=5))
def test_numbers_come_back_as_they_went(values: list[float]) -> None:
    of = signature([{"type": "float", "name": "x"}], [{"type": "float"}])
    body = json.dumps({"inputs": {"x": values}}).encode()
    found = request_tensors(read_body(body, ""), spec(TensorSpec("x", "FP32", (-1,))), of)
    assert json.loads(predictions(list(found.values()), of)) == {"predictions": values}


@given(st.integers(1, 9), st.integers(0, 4))
def test_rows_are_split_by_the_batch_and_joined_again(count: int, most: int) -> None:
    texts = Tensor.from_array("t", np.array([str(each).encode() for each in range(count)], object))
    numbers = Tensor.from_array("n", np.arange(2 * count, dtype=np.int32).reshape(count, 2))
    parts = split_rows({"t": texts, "n": numbers}, most)
    assert len(parts) == (-(-count // most) if most else 1)
    joined = joined_rows([list(part.values()) for part in parts])
    assert [each.numpy().tolist() for each in joined] == [texts.numpy().tolist(), numbers.numpy().tolist()]


def test_predictions_are_records_arrays_or_arrays_by_name() -> None:
    numbers = Tensor.from_array("y", np.array([[1.5], [2.5]]))
    texts = Tensor.from_array("t", np.array([b"x", b"\xff"], object))

    def answered(outputs: list[Tensor], entries: list[dict[str, Any]]) -> Any:
        return json.loads(predictions(outputs, signature([{"type": "double"}], entries)))["predictions"]

    tensor = {"type": "tensor", "tensor-spec": {"dtype": "float64", "shape": [-1, 1]}}
    assert answered([numbers], [tensor]) == [[1.5], [2.5]]
    assert answered([numbers], [{"type": "double"}]) == [1.5, 2.5]
    assert answered([numbers], [{"type": "double", "name": "other"}]) == [{"other": 1.5}, {"other": 2.5}]
    columns = [{"type": "double", "name": "y"}, {"type": "binary", "name": "t"}]
    assert answered([numbers, texts], columns) == [
        {"y": 1.5, "t": base64.b64encode(b"x").decode()},
        {"y": 2.5, "t": base64.b64encode(b"\xff").decode()},
    ]
    named = [
        {**tensor, "name": "y"},
        {"type": "tensor", "tensor-spec": {"dtype": "str", "shape": [-1]}, "name": "t"},
    ]
    assert answered([numbers, texts], named) == {"y": [[1.5], [2.5]], "t": ["x", "\ufffd"]}


def test_the_signature_says_which_outputs_are_predictions() -> None:
    model = spec(TensorSpec("x", "FP64", (-1,)), outputs=("leaf", "predict", "margin"))
    entry = {"type": "double"}
    assert wanted_outputs(model, signature([entry], [entry])) == ("predict",)
    assert wanted_outputs(model, signature([entry], [{**entry, "name": "margin"}])) == ("margin",)
    assert wanted_outputs(model, signature([entry], [{**entry, "name": n} for n in "ab"])) == (
        "leaf",
        "predict",
        "margin",
    )


def test_the_input_example_of_a_model_with_batches_is_its_first_row() -> None:
    entries = [{"type": "tensor", "tensor-spec": {"dtype": "float32", "shape": [-1, 2]}}]
    of = json.dumps({"inputs": json.dumps(entries)}).encode()
    body = b'{"inputs": [[1, 2], [3, 4]]}'
    for batch, dims in ((0, (2, 2)), (8, (2,))):
        rule = TensorSpec("x", "FP32", (2,) if batch else (-1, 2))
        sample = example_sample(spec(rule, batch=batch), body, of)
        assert sample.optional and [each.dims for each in sample.inputs] == [dims]
        assert np.frombuffer(sample.inputs[0].data, np.float32)[:2].tolist() == [1, 2]
