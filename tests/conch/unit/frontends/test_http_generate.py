"""The mapper of the generate extension, and its responses: pure functions."""

from __future__ import annotations

import json
import math
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.cases.http_cases import GENERATE, GENERATE_REFUSED
from tests.support.core import make_spec

from conch.core.errors import ConchError
from conch.core.request import InferenceResponse
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.tensor import ELEMENT_SIZES, Tensor, encode_bytes
from conch.frontends.http.generate.generate_request import Mapped, map_request, parse_document, shape_for
from conch.frontends.http.generate.generate_route import answer_object

TYPES = (*(kind for kind in ELEMENT_SIZES), "BYTES")
MOST = 1 << 20
SPEC = make_spec(
    inputs=(
        *(TensorSpec(kind, kind, (-1,)) for kind in TYPES),
        TensorSpec("PAIR", "INT32", (2,)),
        TensorSpec("ROWS", "INT32", (-1, 2)),
    )
)
BATCHING = make_spec(4, inputs=(TensorSpec("IN", "INT32", (-1,)), TensorSpec("ONE", "FP32", (1,))))


def mapped(body: Any, spec: ModelSpec = SPEC, most: int = MOST) -> Mapped:
    return map_request(
        parse_document(body if isinstance(body, bytes) else json.dumps(body).encode()), spec, most
    )


@pytest.mark.parametrize(("body", "shape", "values"), GENERATE)
def test_members_with_the_name_of_an_input_become_tensors(
    body: Any, shape: tuple[int, ...], values: list[Any]
) -> None:
    result = mapped(body)
    (tensor,) = result.inputs.values()
    assert (tensor.shape, result.parameters) == (shape, {})
    np.testing.assert_array_equal(tensor.numpy(), np.array(values, tensor.numpy().dtype))


def test_everything_else_becomes_a_parameter() -> None:
    result = mapped(
        {
            "INT32": 1,
            "s": "x",
            "id": "q",
            "parameters": {"n": 2, "FP32": 2.5},
            "sequence_id": -1,
            "triton_x": True,
        }
    )
    assert result.id == "q"
    assert list(result.inputs) == ["INT32", "FP32"]
    assert result.parameters == {"s": "x", "id": "q", "n": 2, "sequence_id": -1, "triton_x": True}


def test_the_first_of_several_parameters_of_one_name_counts() -> None:
    assert mapped(b'{"a": 1, "a": 2}').parameters == {"a": 1}


def test_the_batch_dimension_is_one() -> None:
    result = mapped({"IN": [1, 2, 3], "ONE": 0.5}, BATCHING)
    assert {name: tensor.shape for name, tensor in result.inputs.items()} == {"IN": (1, 3), "ONE": (1, 1)}


@pytest.mark.parametrize(("body", "status", "text"), GENERATE_REFUSED)
def test_what_cannot_be_mapped_gets_the_text_of_triton(body: Any, status: int, text: str) -> None:
    with pytest.raises(ConchError) as caught:
        mapped(body)
    assert caught.value.http_status == status
    assert text in caught.value.message


def test_an_input_with_the_name_of_the_nested_schema_is_refused() -> None:
    with pytest.raises(ConchError, match="also given as input tensor name"):
        mapped({"parameters": {}}, make_spec(inputs=(TensorSpec("parameters", "INT32", (1,)),)))


def test_tensors_have_no_more_bytes_than_a_body_may() -> None:
    most = 8 * 16
    assert mapped({"FP64": [0] * 16}, most=most).inputs["FP64"].nbytes == most
    with pytest.raises(ConchError) as caught:
        mapped({"INT8": 0, "FP64": [0] * 16}, most=most)
    assert caught.value.message == (
        "request size of 129 bytes with input 'FP64' of size 128 bytes exceeds the maximum allowed input "
        "size of 128. Use --http-max-input-size to increase the limit."
    )
    with pytest.raises(ConchError, match="request size of 132 bytes with input 'BYTES'"):
        mapped({"BYTES": ["a" * 4] * 16 + [""]}, most=most)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
NAMES = st.sampled_from([*TYPES, "PAIR", "ROWS", "id", "parameters", "a", "b:"])


@given(st.lists(st.tuples(NAMES, JSON), max_size=6))
def test_a_document_becomes_fitting_tensors_or_an_error_of_ours(members: list[tuple[str, Any]]) -> None:
    body = "{" + ",".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in members) + "}"
    try:
        result = mapped(body.encode())
    except ConchError:
        return
    for tensor in result.inputs.values():
        size = ELEMENT_SIZES.get(tensor.datatype)
        assert size is None or tensor.nbytes == size * prod(tensor.shape)
        assert tensor.numpy().shape == tensor.shape
    names = [key for key, _ in members]
    assert set(result.inputs) >= set(names) & set(TYPES)
    assert all(isinstance(value, bool | int | float | str) for value in result.parameters.values())


@given(st.binary(max_size=64))
def test_no_body_is_worse_than_an_error_of_ours(body: bytes) -> None:
    try:
        mapped(body)
    except ConchError:
        pass


@given(
    st.lists(
        st.tuples(st.sampled_from("ab:"), st.integers(0, 9) | st.text(":\\u003a", max_size=3)), max_size=5
    )
)
def test_no_member_of_one_name_is_lost(members: list[tuple[str, Any]]) -> None:
    body = "{" + ", ".join(f"{json.dumps(key)} : {json.dumps(value)}" for key, value in members) + "}"
    assert list(parse_document(body.encode())) == members


@given(st.integers(0, 10_000), st.lists(st.just(-1) | st.integers(1, 5), max_size=4))
def test_a_shape_holds_all_elements_or_there_is_none(count: int, dims: list[int]) -> None:
    shape = shape_for(count, dims)
    if shape is None:
        fixed = prod(dim for dim in dims if dim > 0)
        assert count % fixed or (-1 not in dims and count != fixed)
        return
    assert prod(shape) == count
    assert all(want in (-1, got) for want, got in zip(dims, shape, strict=True))
    variable = [got for want, got in zip(dims, shape, strict=True) if want == -1]
    assert all(got == 1 for got in variable[:-1])


def answer(*outputs: Tensor, request_id: str = "", **parameters: Any) -> bytes:
    return answer_object("m", "3", request_id, InferenceResponse(list(outputs), None, parameters))


def out(array: Any, dtype: Any, name: str = "OUT") -> Tensor:
    return Tensor.from_array(name, np.array(array, dtype))


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (out([[1, 2], [3, 4]], np.int32), b"[1,2,3,4]"),
        (out([5], np.int64), b"5"),
        (out(5, np.int64), b"5"),
        (out([], np.float32), b"[]"),
        (out([1, 0.5], np.float32), b"[1.0,0.5]"),
        (out([0.1], np.float32), b"0.10000000149011612"),
        (out([math.nan, math.inf, -math.inf], np.float32), b"[NaN,Infinity,-Infinity]"),
        (out([True, False], np.bool_), b"[true,false]"),
        (out([2**64 - 1], np.uint64), b"18446744073709551615"),
        (out([b"a", "ä".encode()], np.object_), '["a","ä"]'.encode()),
        (out([b"\xff\"\n"], np.object_), b'"\xff\\"\\n"'),
        (Tensor("OUT", "BYTES", (0,), b""), b"[]"),
        (Tensor("OUT", "BYTES", (1,), encode_bytes([b"x"])), b'"x"'),
    ],
)  # fmt: skip
def test_an_output_is_a_scalar_or_a_flat_array(output: Tensor, text: bytes) -> None:
    assert answer(output) == b'{"OUT":' + text + b',"model_name":"m","model_version":"3"}'


def test_members_of_an_answer_are_in_order() -> None:
    body = answer(out([1], np.int32, "z"), out([2], np.int32, "A"), request_id="q", n=1, yes=True, r=math.inf)
    assert body == (
        b'{"A":2,"id":"q","model_name":"m","model_version":"3","n":1,"r":Infinity,"yes":true,"z":1}'
    )


def test_an_answer_without_a_form_in_json_is_an_error() -> None:
    with pytest.raises(ConchError, match="sending FP16 data via JSON is not supported") as caught:
        answer(out([1], np.float16))
    assert caught.value.http_status == 400
    with pytest.raises(ConchError, match="response parameter 'n'"):
        answer(n=2**64)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)), st.lists(st.text()))
def test_answers_can_be_asked_again(numbers: list[int], strings: list[str]) -> None:
    """Outputs of one model can be inputs of another."""
    elements = [each.encode() for each in strings]
    body = answer(out(numbers, np.int32, "INT32"), out(elements, np.object_, "BYTES"))
    result = mapped(json.loads(body))
    assert result.inputs["INT32"].numpy().tolist() == numbers
    assert result.inputs["BYTES"].numpy().tolist() == elements
    assert result.parameters == {"model_name": "m", "model_version": "3"}
