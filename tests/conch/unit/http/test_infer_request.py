"""Bodies of infer requests: whatever comes, it is read or refused with an error of ours."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.errors import ConchError, InternalError, InvalidArgumentError, ResourceExhaustedError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.tensor import NUMPY_DTYPES, Buffer, Tensor
from conch.frontends.http.infer.compression import accepted, decompressed
from conch.frontends.http.infer.infer_request import RequestDecoder, head_length
from conch.frontends.http.infer.infer_response import BinaryOutputs, failure, write_elements
from conch.frontends.http.infer.json_elements import json_tensor
from conch.frontends.http.jsontext.json_loader import load
from conch.frontends.http.jsontext.json_values import WINDOW, BulkArray, flattened

MOST = 1 << 26


def json_text(tensor: Tensor) -> bytes:
    """A tensor's elements as JSON."""
    parts: list[bytes] = []
    write_elements(tensor, parts)
    return b"".join(parts)


def tensor_bytes(name: str, given: Any, datatype: str, count: int) -> Buffer:
    return json_tensor(name, datatype, (count,), given, MOST).data


def nobody(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
    """A responder that is never called."""


def decode(
    body: bytes, head: int | None = None, decoder: RequestDecoder | None = None
) -> tuple[InferenceRequest, BinaryOutputs]:
    decoder = decoder or RequestDecoder(MOST)
    return decoder(("m", ""), memoryview(body), head, nobody, 0)


def binary(size: int = 8, **more: Any) -> dict[str, Any]:
    return {
        "inputs": [{"name": "A", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": size}}],
        **more,
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = (
    *("binary_data_size", "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"),
    *("classification", "binary_data", "binary_data_output", "sequence_id", "priority", "timeout", "x"),
)
PARAMETERS = st.dictionaries(
    st.sampled_from(NAMES),
    JSON | st.just(4),
    max_size=3,
)
INPUT = st.fixed_dictionaries(
    {},
    optional={
        "name": JSON | st.just("A"),
        "datatype": JSON | st.sampled_from([*NUMPY_DTYPES, "BF16"]),
        "shape": JSON | st.lists(st.integers(0, 3), max_size=3) | st.just([2**62, 9]),
        "data": JSON | st.lists(st.integers(-300, 300), max_size=9),
        "parameters": JSON | PARAMETERS,
    },
)
OUTPUT = st.fixed_dictionaries({}, optional={"name": JSON, "parameters": JSON | PARAMETERS})
DOCUMENT = st.fixed_dictionaries(
    {},
    optional={
        "id": JSON,
        "inputs": JSON | st.lists(INPUT, max_size=3),
        "outputs": JSON | st.lists(OUTPUT),
        "parameters": JSON | PARAMETERS,
    },
)


@given(DOCUMENT, st.binary(max_size=16), st.none() | st.integers(0, 400))
def test_no_document_does_harm(document: Any, tail: bytes, head: int | None) -> None:
    body = json.dumps(document).encode()
    try:
        request, _ = decode(body + tail, len(body) if head == 0 else head)
    except ConchError as error:
        assert error.http_status in (400, 404, 500)
    else:
        for tensor in request.inputs.values():
            assert tensor.nbytes == len(tensor.data)


@given(st.binary(max_size=300), st.none() | st.integers(0, 300))
def test_no_bytes_do_harm(body: bytes, head: int | None) -> None:
    try:
        decode(body, head)
    except ConchError:
        pass


def test_binary_tensors_are_views_and_repeat() -> None:
    decoder = RequestDecoder(MOST)
    text = json.dumps(binary(parameters={"priority": 2, "x": 1.5, "binary_data_output": True})).encode()
    signatures = []
    for _ in range(3):
        body = bytearray(text + np.array([1, 2], np.float32).tobytes())
        request, wanted = decode(body, len(text), decoder)  # type: ignore[arg-type]
        assert request.inputs["A"].numpy().tolist() == [1, 2]
        body[-4:] = np.array([3], np.float32).tobytes()
        assert request.inputs["A"].numpy().tolist() == [1, 3], "it shares the body's memory"
        assert wanted.binary and request.priority == 2 and request.parameters == {"x": 1.5}
        signatures.append(request.signature)
    assert signatures[0] is None and signatures[1] is signatures[2] is not None


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_sizes_must_add_up_also_where_the_json_is_known(cut: int) -> None:
    decoder = RequestDecoder(MOST)
    text = json.dumps(binary()).encode()
    decode(text + bytes(8), len(text), decoder)
    with pytest.raises(InvalidArgumentError) as caught:
        decode(text + bytes(8 - cut), len(text), decoder)
    assert caught.value.message == (
        f"unexpected size for input 'A', expecting {cut} additional bytes for model 'm'"
    )
    with pytest.raises(InvalidArgumentError, match="unexpected additional input data for model 'm'"):
        decode(text + bytes(8 + cut), len(text), decoder)


def test_requests_of_sequences_are_not_mixed_up() -> None:
    decoder = RequestDecoder(MOST)
    for number in (5, 6, 5):
        text = json.dumps(binary(parameters={"sequence_id": number, "sequence_start": True})).encode()
        request, _ = decode(text + bytes(8), len(text), decoder)
        assert (request.correlation_id, request.sequence_start, request.signature) == (number, True, None)


def test_parameters_of_the_protocol_are_read_into_attributes() -> None:
    given = {
        "sequence_id": 5,
        "sequence_start": True,
        "sequence_end": True,
        "priority": 2,
        "timeout": 3,
        "x": 4,
    }
    text = json.dumps(binary(parameters=given)).encode()
    request, _ = decode(text + bytes(8), len(text))
    assert (request.correlation_id, request.sequence_start, request.sequence_end) == (5, True, True)
    assert (request.priority, request.timeout_us, request.parameters) == (2, 3, {"x": 4})


@pytest.mark.parametrize(("after_ms", "seconds"), [(1, b"1"), (1000, b"1"), (1001, b"2")])
def test_the_time_to_retry_is_rounded_up(after_ms: int, seconds: bytes) -> None:
    error = ResourceExhaustedError("full")
    error.retry_after_ms = after_ms
    assert dict(failure(error).headers)[b"retry-after"] == seconds


NUMBERS = {
    "INT8": st.integers(-(2**63), 2**63 - 1),
    "UINT16": st.integers(0, 2**64 - 1),
    "INT64": st.integers(-(2**63), 2**63 - 1),
    "UINT64": st.integers(0, 2**64 - 1),
    "FP32": st.floats(width=32) | st.integers(-1000, 1000),
    "FP64": st.floats(),
    "BOOL": st.booleans(),
}


@given(st.data(), st.sampled_from(sorted(NUMBERS)))
def test_numbers_there_and_back(data: st.DataObject, datatype: str) -> None:
    values = data.draw(st.lists(NUMBERS[datatype], min_size=1))
    text = json.dumps(values).encode()
    raw = tensor_bytes("A", load(text), datatype, len(values))
    array = np.frombuffer(raw, NUMPY_DTYPES[datatype])
    if datatype in ("INT8", "UINT16"):
        bits = array.dtype.itemsize * 8
        assert all((int(got) - sent) % 2**bits == 0 for got, sent in zip(array, values, strict=True))
    else:
        np.testing.assert_array_equal(array, np.array(values, array.dtype))
    written = load(b"[%b]" % json_text(Tensor("x", datatype, (len(values),), raw)))
    np.testing.assert_array_equal(np.array(flattened(written)[0], array.dtype), array)


@given(st.lists(st.binary(max_size=6) | st.text(st.characters(exclude_categories=["Cs"])).map(str.encode)))
def test_strings_there_and_back(elements: list[bytes]) -> None:
    tensor = Tensor.from_array("x", np.array([*elements, b""], object)[:-1])
    given_back = load(b"[%b]" % json_text(tensor))
    assert tensor_bytes("A", given_back, "BYTES", len(elements)) == tensor.data


@pytest.mark.parametrize(
    ("values", "datatype", "text"),
    [
        ([1, True], "FP32", "non-number as double: input 'A' expects FP32, got a boolean"),
        ([1, None], "FP64", "non-number as double: input 'A' expects FP64, got null"),
        ([1, 1.0], "INT32", "as signed-integer: input 'A' expects INT32, got a number with a fraction"),
        ([1, True], "INT8", "attempt to access JSON non-signed-integer as signed-integer"),
        ([2**63, 1], "INT64", "as signed-integer: input 'A' expects INT64, got an integer that is too large"),
        ([-1, 1], "UINT8", "non-unsigned-integer as unsigned-integer: .*, got a negative integer"),
        ([1, False], "BOOL", "attempt to access JSON non-boolean as boolean"),
        ([1, 2, 3], "FP32", "true shape of 'data' field: input 'A' expects [0-9]+ elements, got more"),
    ],
)
@pytest.mark.parametrize("copies", [1, 20000])
def test_elements_that_do_not_fit(values: list[Any], datatype: str, text: str, copies: int) -> None:
    parsed = load(json.dumps(values * copies).encode())
    with pytest.raises(InternalError, match=text):
        tensor_bytes("A", parsed, datatype, 2 * copies)


def test_nesting() -> None:
    for depth, fits in ((100, True), (101, False)):
        parsed = load(b"[" * depth + b"1,2" + b"]" * depth)
        if fits:
            assert bytes(tensor_bytes("A", parsed, "UINT8", 2)) == b"\x01\x02"
        else:
            with pytest.raises(InvalidArgumentError, match=r"exceeds maximum allowed limit \(100\)"):
                tensor_bytes("A", parsed, "UINT8", 2)


@pytest.mark.parametrize(
    ("header", "encoding"),
    [
        (b"gzip", b"gzip"),
        (b"deflate, gzip", b"deflate"),
        (b"gzip;q=0.5, deflate;q=0.8", b"deflate"),
        (b"gzip;q=0", None),
        (b"*", None),
        (b"br, gzip", b"gzip"),
        (b"identity,gzip", None),
        (b"gzip;q=0.5,identity", None),
        (b"gzip;q=x", None),
        (b"GZIP", None),
        (b"", None),
    ],
)
def test_accepted_encodings(header: bytes, encoding: bytes | None) -> None:
    assert accepted(header) == encoding


@given(st.binary(max_size=100))
def test_any_accept_header(header: bytes) -> None:
    assert accepted(header) in (None, b"gzip", b"deflate")


def plain(packed: bytes, most_bytes: int) -> memoryview:
    return decompressed(memoryview(packed), most_bytes, lambda size: None)


@given(st.binary(max_size=3000))
def test_decompression(data: bytes) -> None:
    for packed in (gzip.compress(data), zlib.compress(data)):
        assert plain(packed, MOST) == data
        with pytest.raises(InvalidArgumentError):
            plain(packed[:-9], MOST)
    if data:
        with pytest.raises(InvalidArgumentError):
            plain(zlib.compress(data), len(data) - 1)


def test_a_bomb_is_not_unpacked() -> None:
    with pytest.raises(InvalidArgumentError, match="Decompressed data size exceeds the maximum"):
        plain(zlib.compress(bytes(1 << 24)), 1 << 20)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"x", "Unable to parse Inference-Header-Content-Length, got: x"),
        (b"", "Unable to parse Inference-Header-Content-Length, got: "),
        (b"12x", "Unable to parse Inference-Header-Content-Length, got: 12x"),
        (
            b"9" * 5000,
            "Unable to parse Inference-Header-Content-Length, value is out of range "
            f"[ -2147483648, 2147483647 ], got: {'9' * 5000}",
        ),
    ],
)
def test_header_lengths(value: bytes, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        head_length(value)
    assert caught.value.message == text


@pytest.mark.parametrize(
    ("datatype", "text"), [("FP32", b"1.5,"), ("BYTES", b'"abc",'), ("FP32", b"[2.5],"), ("BOOL", b"true,")]
)
def test_long_arrays_are_given_up_bit_by_bit(datatype: str, text: bytes) -> None:
    """To free millions of elements at once holds up all other threads."""
    count = 2 * WINDOW
    array = load(b"[" + text * (count - 1) + text[:-1] + b"]")
    assert isinstance(array, BulkArray) and len(array) == count
    assert len(tensor_bytes("A", array, datatype, count)) > count - 1
    assert not array.taken
