"""Requests of MLflow's scoring protocol as tensors, and outputs as predictions."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from conch.core.errors import ConchError, InvalidArgumentError
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.tensor import Tensor
from conch_frames.invocations.replies import predictions
from conch_frames.invocations.request_body import ContentTypeError, read_request
from conch_frames.invocations.request_inputs import request_tensors
from conch_mlflow.scoring.scoring_warmup import example_sample
from conch_mlflow.scoring.signature_interface import signature_interface
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
    interface = signature_interface(model, of)
    found = request_tensors(read_request(content, kind, 1 << 20, interface.columns.wants), interface)
    return {name: each.numpy().tolist() for name, each in found.items()}


BY_COLUMN = spec(
    TensorSpec("a", "FP64", (-1,), optional=True),
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
        ({"dataframe_records": [RECORDS[0], {name: RECORDS[1][name] for name in "nsb"}]}, ""),
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
    with pytest.raises(InvalidArgumentError, match=r"column 's', row 1: it is null, and a text can't be"):
        tensors({name: records}, BY_COLUMN, signature(COLUMNS))


@pytest.mark.parametrize(
    ("datatype", "value"),
    [("FP32", 1e39), ("FP32", -3.5e38), ("FP16", 65520), ("FP16", 10**6), ("INT8", 128)],
)
def test_a_number_beyond_its_type_is_refused(datatype: str, value: float) -> None:
    model, of = spec(TensorSpec("x", datatype, (-1,))), signature([{"type": "double", "name": "x"}])
    bodies: list[Any] = [{"inputs": {"x": [1, value]}}, {"inputs": [1, value]}]
    for body in bodies:
        with pytest.raises(InvalidArgumentError, match=f"column 'x', row 1: .* {datatype}"):
            tensors(body, model, of)


def test_infinity_stays_infinity() -> None:
    model, of = spec(TensorSpec("x", "FP16", (-1,))), signature([{"type": "double", "name": "x"}])
    assert tensors(b"x\ninf\n-inf\n", model, of, "text/csv") == {"x": [np.inf, -np.inf]}


def test_a_table_in_parquet() -> None:
    columns = {name: [row[name] for row in RECORDS] for name in "abns"}
    body = io.BytesIO()
    parquet.write_table(pa.table({**columns, "__index_level_0__": [0, 1]}), body)
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
    with pytest.raises(InvalidArgumentError, match="column 'b': model 'm' needs it"):
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
        ({"instances": [1], "inputs": [1]}, "", "it has instances and inputs"),
        ({"inputs": [1], "signature_name": ""}, "", "the body has 'signature_name' beside 'inputs'"),
        ([1], "", "exactly one of"),
        ({"dataframe_split": {"data": [[1], [1, 2]]}}, "", "data\\[1\\]' has 2 values"),
        ({"dataframe_split": {"columns": ["a", "a"], "data": []}}, "", "name twice"),
        ({"instances": [{"a": 1}, {"b": 1}]}, "", "instances\\[1\\]"),
        ({"dataframe_records": RECORDS[:1], "params": [1]}, "", "'params' must be"),
        ({"dataframe_records": [{**RECORDS[0], "a": "x"}]}, "", "'a', row 0: must have numbers"),
        ({"dataframe_records": [{**RECORDS[0], "a": True}]}, "", "'a', row 0: must have numbers"),
        ({"dataframe_records": [{**RECORDS[0], "n": 1.5}]}, "", "'n', row 0: 1.5 is no whole number"),
        ({"dataframe_records": [{**RECORDS[0], "s": 5}]}, "", "'s', row 0: must have texts, not 5"),
        ({"dataframe_records": [{**RECORDS[0], "b": 1}]}, "", "'b', row 0: must have true or false, not 1"),
        ({"dataframe_records": [*RECORDS, {"a": 1.0}]}, "", "'n', row 2: the row does not have it"),
        ({"inputs": [RECORDS[0], {"b": True}]}, "", "'n', row 1: the row does not have it: send null"),
        ({"dataframe_records": [{"a": 1}]}, "", "column 'n': model 'm' needs it, and the table has 'a'"),
        ({"inputs": {"s": None, "a": [1], "n": [1], "b": [True]}}, "", "'s', row 0: it is null"),
        ({"inputs": [{"a": 1}, 2]}, "", "'inputs' must be a list of objects"),
        ({"inputs": [1]}, "", "several inputs"),
        ({"inputs": {"a": [[1], [1, 2]], "n": [], "s": [], "b": []}}, "", "'a': its values are no regular"),
        (b"a,n\n1\n", "text/csv", "the table, row 0: it has 1 values, expected 2"),
        (b"a,n,s,b\n1,2.5,x,true\n", "text/csv", "'n', row 0: 2.5 is no whole number"),
        (b"", "text/csv", "the body is empty"),
        (b"", "text/plain", "expected application/json"),
        (b"", "text/csv; charset=latin-1", "only charset=utf-8"),
    ],
)
def test_wrong_requests_name_what_is_wrong(body: Any, kind: str, reason: str) -> None:
    with pytest.raises(ConchError, match=reason) as caught:
        tensors(body, BY_COLUMN, signature(COLUMNS), kind)
    wanted = 415 if isinstance(caught.value, ContentTypeError) else 400
    assert caught.value.http_status == wanted


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=5))
def test_numbers_come_back_as_they_went(values: list[float]) -> None:
    of = signature([{"type": "float", "name": "x"}], [{"type": "float"}])
    interface = signature_interface(spec(TensorSpec("x", "FP32", (-1,))), of)
    request = read_request(json.dumps({"inputs": {"x": values}}).encode(), "", 0, interface.columns.wants)
    found = request_tensors(request, interface)
    assert json.loads(predictions(list(found.values()), interface)) == {"predictions": values}


def test_predictions_are_records_arrays_or_arrays_by_name() -> None:
    numbers = Tensor.from_array("y", np.array([[1.5], [2.5]]))
    texts = Tensor.from_array("t", np.array([b"x", b"\xff"], object))

    def answered(outputs: list[Tensor], entries: list[dict[str, Any]]) -> Any:
        model = spec(TensorSpec("x", "FP64", (-1,)), outputs=tuple(each.name for each in outputs))
        interface = signature_interface(model, signature([{"type": "double"}], entries))
        return json.loads(predictions(outputs, interface))["predictions"]

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
    with pytest.raises(InvalidArgumentError, match="output 't' has bytes that are no UTF-8"):
        answered([numbers, texts], named)
    good = Tensor.from_array("t", np.array([b"x", b"y"], object))
    assert answered([numbers, good], named) == {"y": [[1.5], [2.5]], "t": ["x", "y"]}


def test_the_signature_says_which_outputs_are_predictions() -> None:
    model = spec(TensorSpec("x", "FP64", (-1,)), outputs=("leaf", "predict", "margin"))
    entry = {"type": "double"}
    declared: dict[tuple[str, ...], Any] = {("predict",): [entry], ("margin",): [{**entry, "name": "margin"}]}
    declared["leaf", "predict", "margin"] = [{**entry, "name": name} for name in "ab"]
    for names, entries in declared.items():
        interface = signature_interface(model, signature([entry], entries))
        assert tuple(each.output for each in interface.outputs) == names


def test_the_input_example_of_a_model_with_batches_is_its_first_row() -> None:
    entries = [{"type": "tensor", "tensor-spec": {"dtype": "float32", "shape": [-1, 2]}}]
    of = json.dumps({"inputs": json.dumps(entries)}).encode()
    body = b'{"inputs": [[1, 2], [3, 4]]}'
    for batch, dims in ((0, (2, 2)), (8, (2,))):
        rule = TensorSpec("x", "FP32", (2,) if batch else (-1, 2))
        sample = example_sample(spec(rule, batch=batch), body, of)
        assert sample.optional and [each.dims for each in sample.inputs] == [dims]
        assert np.frombuffer(sample.inputs[0].data, np.float32)[:2].tolist() == [1, 2]
