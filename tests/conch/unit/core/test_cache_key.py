"""Keys: everything that matters makes another one, everything else does not."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.core import Answers, make_spec

from conch.core.request import InferenceRequest
from conch.core.response_cache.cache_key import KeyMaker
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.tensor import Tensor

OUTPUTS = (TensorSpec("A", "FP32", (1,)), TensorSpec("B", "FP32", (1,)), TensorSpec("C", "FP32", (1,)))
SPEC = make_spec(outputs=OUTPUTS)
DATA = bytes(range(24))


def request(**changes: Any) -> InferenceRequest:
    inputs = changes.pop("inputs", {"X": ("FP32", (2, 3), DATA), "Y": ("BYTES", (1,), b"\1\0\0\0y")})
    tensors = {name: Tensor(name, *rest) for name, rest in inputs.items()}
    made = InferenceRequest("m", "", tensors, Answers(), 0)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def key(made: InferenceRequest, spec: ModelSpec = SPEC, identity: bytes = b"") -> bytes:
    return KeyMaker(spec, identity, hashlib.sha256)(made)


X, Y = ("FP32", (2, 3), DATA), ("BYTES", (1,), b"\1\0\0\0y")
DIFFERENT: dict[str, InferenceRequest] = {
    "as it is": request(),
    "other bytes": request(inputs={"X": ("FP32", (2, 3), DATA[::-1]), "Y": Y}),
    "other shape": request(inputs={"X": ("FP32", (3, 2), DATA), "Y": Y}),
    "other rank": request(inputs={"X": ("FP32", (6,), DATA), "Y": Y}),
    "other datatype": request(inputs={"X": ("INT32", (2, 3), DATA), "Y": Y}),
    "other name": request(inputs={"Z": X, "Y": Y}),
    "names swapped": request(inputs={"Y": X, "X": Y}),
    "one input less": request(inputs={"X": X}),
    "bytes moved": request(inputs={"X": ("FP32", (2, 3), DATA + b"\1"), "Y": ("BYTES", (1,), b"\0\0\0y")}),
    "a parameter": request(parameters={"p": 1}),
    "a parameter of another type": request(parameters={"p": True}),
    "a parameter as a float": request(parameters={"p": 1.0}),
    "a parameter as text": request(parameters={"p": "1"}),
    "another parameter": request(parameters={"q": 1}),
    "one output": request(requested=("A",)),
    "another output": request(requested=("B",)),
    "two outputs": request(requested=("A", "B")),
    "classes": request(requested=("A",), classes={"A": 1}),
    "other classes": request(requested=("A",), classes={"A": 2}),
    "a sequence": request(correlation_id=1),
    "a sequence by name": request(correlation_id="1"),
    "its start": request(sequence_start=True),
    "its end": request(sequence_end=True),
}


def test_what_matters_makes_another_key() -> None:
    keys = {key(made): name for name, made in DIFFERENT.items()}
    keys |= {
        key(request(), identity=b"1"): "another load",
        key(request(), make_spec(outputs=OUTPUTS, name="n")): "another model",
        key(request(), make_spec(outputs=OUTPUTS, version=2)): "another version",
    }
    assert len(keys) == len(DIFFERENT) + 3, sorted(keys.values())


@pytest.mark.parametrize(
    "same",
    [
        request(id="x"),
        request(priority=2, timeout_us=5, deadline_ns=7, received_ns=9, empty_final=True),
        request(inputs={"Y": Y, "X": X}),
        request(inputs={"X": ("FP32", (2, 3), memoryview(DATA)), "Y": Y}),
        request(requested=("C", "A", "B")),
        request(parameters={}),
        request(parameters={"conch_cache": "refresh"}),
        request(signature=object(), model_version="1"),
    ],
)
def test_what_does_not_matter_makes_no_other(same: InferenceRequest) -> None:
    assert key(same) == key(request())


def test_a_load_whose_answers_change_by_themselves() -> None:
    """As those of an ensemble do when one of its models is replaced."""
    now = b"1"
    keys = KeyMaker(SPEC, lambda: now, hashlib.sha256)
    before = keys(request())
    assert keys(request()) == before != key(request(), identity=b"1")
    now = b"2"
    assert keys(request()) != before
    now = b"1"
    assert keys(request()) == before


def test_order_of_names_does_not_matter() -> None:
    one = request(
        requested=("B", "A"), classes={"A": 1, "B": 2}, parameters={"p": 1, "conch_cache": "x", "q": ""}
    )
    two = request(requested=("A", "B"), classes={"B": 2, "A": 1}, parameters={"q": "", "p": 1})
    assert key(one) == key(two)


def test_an_array_has_the_key_of_its_bytes() -> None:
    array = np.frombuffer(DATA, "<f4").reshape(2, 3)
    made = request()
    made.inputs["X"] = Tensor.from_array("X", array)
    assert key(made) == key(request())


inputs = st.dictionaries(
    st.text(max_size=2),
    st.tuples(
        st.sampled_from(["FP32", "INT32", "BYTES"]),
        st.lists(st.integers(0, 9), max_size=2).map(tuple),
        st.binary(max_size=4),
    ),
    max_size=3,
)


@given(inputs, inputs)
def test_keys_are_equal_exactly_for_equal_inputs(one: Any, two: Any) -> None:
    assert (key(request(inputs=one)) == key(request(inputs=two))) == (one == two)
