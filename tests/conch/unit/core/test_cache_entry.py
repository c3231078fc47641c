"""Responses as bytes and back."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.request import InferenceResponse
from conch.core.response_cache.cache_entry import EntryError, decode_entry, encode_entry
from conch.core.tensor import ELEMENT_SIZES, NUMPY_DTYPES, Buffer, Tensor, encode_bytes

DATATYPES = [*ELEMENT_SIZES, "BYTES"]
parameters = st.dictionaries(
    st.text(), st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text()
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    name = draw(st.text())
    datatype = draw(st.sampled_from(DATATYPES))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    count = int(np.prod(shape, dtype=int))
    if datatype == "BYTES":
        data = encode_bytes(draw(st.lists(st.binary(max_size=5), min_size=count, max_size=count)))
    else:
        size = count * ELEMENT_SIZES[datatype]
        data = draw(st.binary(min_size=size, max_size=size))
    forms: list[Buffer] = [data, memoryview(data), bytearray(data)]
    return Tensor(name, datatype, shape, draw(st.sampled_from(forms)))


def plain(response: InferenceResponse) -> Any:
    outputs = [(t.name, t.datatype, t.shape, bytes(t.data)) for t in response.outputs]
    return outputs, [(key, type(value), value) for key, value in (response.parameters or {}).items()]


@given(st.lists(tensors(), max_size=4), st.none() | parameters)
def test_what_was_written_is_read(outputs: list[Tensor], given_parameters: dict[str, Any] | None) -> None:
    response = InferenceResponse(outputs, None, given_parameters)
    read = decode_entry(encode_entry(response))
    assert plain(read) == plain(response)
    assert read.error is None


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name != "BF16"])
def test_arrays_of_every_datatype(datatype: str) -> None:
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(NUMPY_DTYPES[datatype])
    if datatype == "BYTES":
        array = np.array([[b"", b"\0\xff"], ["ä".encode(), b"x"]], dtype=object)
    entry = encode_entry(InferenceResponse([Tensor.from_array("odd", array, datatype)] * 2))
    for tensor in decode_entry(entry).outputs:
        assert (tensor.datatype, tensor.numpy().tolist()) == (datatype, array.tolist())


def test_reading_copies_nothing_and_keeps_numpy_aligned() -> None:
    odd, floats = np.ones(3, np.uint8), np.arange(5, dtype=np.float64)
    entry = encode_entry(
        InferenceResponse(
            [Tensor.from_array("a", odd), Tensor.from_array("b", floats), Tensor("c", "FP32", (0,), b"")]
        )
    )
    whole = np.frombuffer(entry, np.uint8)
    for tensor in decode_entry(entry).outputs[:2]:
        array = tensor.numpy()
        assert np.shares_memory(array, whole)
        assert array.flags.aligned
        assert not array.flags.writeable


def test_an_array_that_is_not_contiguous() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4).T
    (read,) = decode_entry(encode_entry(InferenceResponse([Tensor.from_array("x", array)]))).outputs
    assert read.numpy().tolist() == array.tolist()


@pytest.mark.parametrize("value", [None, [1], b"x", np.float32(1)])
def test_a_parameter_that_clients_can_not_be_sent(value: Any) -> None:
    with pytest.raises(EntryError, match="parameter"):
        encode_entry(InferenceResponse([], None, {"x": value}))


GOOD = encode_entry(
    InferenceResponse(
        [Tensor("a", "FP32", (2,), b"12345678"), Tensor("b", "BYTES", (1,), b"\1\0\0\0x")], None, {"p": 1}
    )
)


@pytest.mark.parametrize("length", range(len(GOOD)))
def test_an_entry_that_was_cut(length: int) -> None:
    with pytest.raises(EntryError):
        decode_entry(GOOD[:length])


def entry_of(head: Any, data: bytes = b"", magic: bytes = b"CNR1") -> bytes:
    text = json.dumps(head).encode()
    start = struct.pack("<4sI", magic, len(text)) + text
    return start + (bytes(-len(start) % 16) + data if data else b"")


@pytest.mark.parametrize(
    "entry",
    [
        GOOD + b"x",
        entry_of([[], {}], magic=b"CNR2"),
        entry_of([[], []]),
        entry_of([[]]),
        entry_of({}),
        entry_of(None),
        entry_of([[["a", "FP32", [1], 4, 5]], {}], b"1234"),
        entry_of([[["a", "FP32", [2], 4]], {}], b"1234"),
        entry_of([[["a", "FP32", [-1, -1], 4]], {}], b"1234"),
        entry_of([[["a", "FP32", [True], 4]], {}], b"1234"),
        entry_of([[["a", "FP32", 1, 4]], {}], b"1234"),
        entry_of([[["a", "FP33", [1], 4]], {}], b"1234"),
        entry_of([[["a", ["FP32"], [1], 4]], {}], b"1234"),
        entry_of([[[1, "FP32", [1], 4]], {}], b"1234"),
        entry_of([[["a", "BYTES", [1], -4]], {}], b"1234"),
        entry_of([[["a", "BYTES", [1], "4"]], {}], b"1234"),
        struct.pack("<4sI", b"CNR1", 2**32 - 1),
        struct.pack("<4sI", b"CNR1", 1) + b"\xff",
        struct.pack("<4sI", b"CNR1", 200000) + b"[" * 200000,
    ],
)
def test_bytes_that_are_no_entry(entry: bytes) -> None:
    with pytest.raises(EntryError):
        decode_entry(entry)


@given(st.binary(max_size=64))
def test_any_bytes_are_refused_or_read(data: bytes) -> None:
    for entry in (data, b"CNR1" + data):
        try:
            decode_entry(entry)
        except EntryError:
            continue
