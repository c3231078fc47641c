"""Tensors: the wire form and arrays of each other, without copies where none are needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from conch.core.errors import InvalidArgumentError, UnsupportedError
from conch.core.tensor import (
    ELEMENT_SIZES,
    NUMPY_DTYPES,
    Array,
    Tensor,
    brain_floats,
    datatype_of,
    decode_bytes,
    encode_bytes,
    float_array,
)

FIXED = sorted(NUMPY_DTYPES.keys() - {"BYTES"})


def test_all_datatypes_of_fixed_size_have_the_size_of_their_dtype() -> None:
    assert {name: NUMPY_DTYPES[name].itemsize for name in FIXED} == {
        name: size for name, size in ELEMENT_SIZES.items() if name != "BF16"
    }


@given(st.lists(st.binary(max_size=20)))
def test_bytes_round_trip_and_are_what_tritonclient_makes_of_them(elements: list[bytes]) -> None:
    data = encode_bytes(elements)
    assert decode_bytes(data).tolist() == elements
    assert deserialize_bytes_tensor(data).tolist() == elements
    if elements:
        theirs = serialize_byte_tensor(np.array(elements, dtype=object))
        assert theirs.item() == data
    view = memoryview(bytearray(data))
    assert decode_bytes(view).tolist() == elements


def test_elements_that_are_no_bytes_are_written_as_text() -> None:
    elements = ["ü", b"\xff\0", np.str_("s"), np.bytes_(b"b"), 7, None]
    assert decode_bytes(encode_bytes(elements)).tolist() == [
        "ü".encode(),
        b"\xff\0",
        b"s",
        b"b",
        b"7",
        b"None",
    ]


def test_many_texts_have_a_size_before_they_are_encoded() -> None:
    elements = [b"x" * (number % 7) for number in range(70_000)]  # several pieces
    tensor = Tensor.from_array("x", np.array(elements, object))
    size = tensor.nbytes
    assert not tensor.has_data
    assert len(tensor.data) == size
    assert decode_bytes(memoryview(tensor.data)).tolist() == elements


@given(st.binary(max_size=40))
def test_bytes_decode_or_are_refused(data: bytes) -> None:
    try:
        elements = decode_bytes(data)
    except InvalidArgumentError:
        return
    assert encode_bytes(elements) == data


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\1\0\0", "BYTES tensor ends inside a length indicator"),
        (b"\2\0\0\0a", "BYTES tensor ends inside an element"),
        (b"\xff\xff\xff\xff", "BYTES tensor ends inside an element"),
    ],
)
def test_broken_bytes(data: bytes, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        decode_bytes(data)
    assert caught.value.message == text


@given(datatype=st.sampled_from(FIXED), data=st.data())
def test_arrays_round_trip(datatype: str, data: st.DataObject) -> None:
    shapes = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    array = data.draw(npst.arrays(NUMPY_DTYPES[datatype], shapes))
    tensor = Tensor.from_array("x", array)
    assert tensor.datatype == datatype
    assert tensor.shape == array.shape
    assert bytes(tensor.data) == array.tobytes()
    assert tensor.nbytes == array.nbytes == len(bytes(tensor.data))
    back = Tensor("x", datatype, array.shape, bytes(tensor.data)).numpy()
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_an_array_of_a_message_shares_its_memory_and_is_read_only() -> None:
    data = bytes(range(64))
    array = Tensor("x", "FP32", (4, 4), memoryview(data)).numpy()
    assert np.shares_memory(array, np.frombuffer(data, np.uint8))
    assert not array.flags.writeable


def test_the_wire_form_of_an_array_shares_its_memory() -> None:
    array = np.zeros((4, 4), np.float32)
    data = Tensor.from_array("x", array).data
    assert isinstance(data, memoryview)
    assert np.shares_memory(np.frombuffer(data, np.uint8), array)


def test_a_reshaped_tensor_shares_memory() -> None:
    array = np.arange(12, dtype=np.int32)
    tensor = Tensor.from_array("x", array).reshaped((3, 4))
    assert tensor.shape == (3, 4)
    assert np.shares_memory(tensor.numpy(), array)
    wire = Tensor("x", "INT32", (12,), array.tobytes()).reshaped((2, 6))
    np.testing.assert_array_equal(wire.numpy(), array.reshape(2, 6))


@pytest.mark.parametrize(
    "array",
    [np.arange(12, dtype=np.int32).reshape(3, 4).T, np.arange(12, dtype=np.int32)[::2]],
    ids=["transposed", "strided"],
)
def test_the_wire_form_is_row_major_whatever_the_array_is(array: Array) -> None:
    assert bytes(Tensor.from_array("x", array).data) == array.tobytes()


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
@pytest.mark.parametrize("datatype", ["FP32", "BYTES", "BOOL"])
def test_empty_tensors(datatype: str, shape: tuple[int, ...]) -> None:
    array = np.empty(shape, NUMPY_DTYPES[datatype])
    tensor = Tensor.from_array("x", array, datatype)
    assert tensor.nbytes == 0
    assert bytes(tensor.data) == b""
    assert Tensor("x", datatype, shape, b"").numpy().shape == shape


@pytest.mark.parametrize(
    ("tensor", "size"),
    [
        (Tensor("x", "FP32", (3,), bytes(12)), 12),
        (Tensor("x", "FP32", (3,), np.zeros(3, np.float32).data), 12),
        (Tensor.from_array("x", np.zeros((2, 3), np.float64)), 48),
        (Tensor.from_array("x", np.array([b"abc", b""], object)), 11),
        (Tensor("x", "BF16", (3,), bytes(6)), 6),
    ],
)
def test_nbytes(tensor: Tensor, size: int) -> None:
    assert tensor.nbytes == size


@pytest.mark.parametrize(
    ("array", "datatype"),
    [
        (np.array([True]), "BOOL"),
        (np.zeros(1, np.float16), "FP16"),
        (np.zeros(1, np.uint64), "UINT64"),
        (np.array(["text"]), "BYTES"),
        (np.array([b"text"]), "BYTES"),
        (np.array([b"text"], object), "BYTES"),
    ],
)
def test_datatype_of(array: Array, datatype: str) -> None:
    assert datatype_of(array) == datatype


@pytest.mark.parametrize("dtype", ["c8", "M8[s]", ">f4"])
def test_dtypes_without_a_datatype(dtype: str) -> None:
    with pytest.raises(UnsupportedError, match="have no datatype in the protocol"):
        datatype_of(np.zeros(1, dtype))


def test_text_arrays_are_encoded() -> None:
    tensor = Tensor.from_array("x", np.array([["a", "ü"]]))
    assert tensor.datatype == "BYTES"
    assert decode_bytes(tensor.data).tolist() == [b"a", "ü".encode()]


def test_bf16_has_no_array() -> None:
    with pytest.raises(UnsupportedError) as caught:
        Tensor("x", "BF16", (1,), bytes(2)).numpy()
    assert caught.value.message == "tensor 'x' of datatype BF16 has no numpy form"


@pytest.mark.parametrize("values", [[[1.5, 0, -2]], [], [[], []], 1.5])
def test_arrays_of_ml_dtypes_are_bf16(values: Any) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array(values, ml_dtypes.bfloat16)
    strided = array[:, ::2] if array.size > 1 else array
    for each in (array, strided):
        tensor = Tensor.from_array("x", each)
        assert (tensor.datatype, tensor.shape, tensor.nbytes) == ("BF16", each.shape, each.nbytes)
        assert float_array(tensor.data, tensor.shape).tolist() == each.tolist()
    if array.ndim and array.size:
        shared = Tensor.from_array("x", array)
        array[0, 0] = 4
        assert float_array(shared.data, shared.shape).tolist() == array.tolist()


@given(st.lists(st.integers(0, 0xFFFF), max_size=20))
def test_brain_floats_are_exact_as_floats(bits: list[int]) -> None:
    data = np.array(bits, "<u2").tobytes()
    floats = float_array(data, (len(bits), 1))
    assert floats.shape == (len(bits), 1) and floats.dtype == np.float32
    again = float_array(brain_floats(floats), (len(bits),))
    np.testing.assert_array_equal(again, floats[:, 0])  # with NaN equal to NaN


@given(st.floats(width=32, allow_nan=False))
def test_floats_are_rounded_to_the_nearest_brain_float(value: float) -> None:
    (bits,) = np.frombuffer(brain_floats(np.array([value], np.float32)), "<u2").tolist()
    (found,) = float_array(brain_floats(np.array([value], np.float32)), (1,)).tolist()
    below, above = bits - 1 if bits & 0x7FFF else bits, bits + 1
    for near in (below, above):
        other = float(float_array(np.array([near], "<u2").tobytes(), (1,))[0])
        if np.isfinite(other) and np.isfinite(found):
            assert abs(found - value) <= abs(other - value)
            assert abs(found - value) < abs(other - value) or bits % 2 == 0


@pytest.mark.parametrize(
    ("datatype", "shape", "data"), [("FP32", (3,), bytes(8)), ("BYTES", (2,), encode_bytes([b"a"]))]
)
def test_data_that_does_not_fill_the_shape(datatype: str, shape: Any, data: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="which do not fill shape"):
        Tensor("x", datatype, shape, data).numpy()
