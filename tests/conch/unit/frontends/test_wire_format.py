"""Reading and writing protobuf by hand agrees with protobuf, on anything."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.profiles import scaled
from tritonclient.grpc import service_pb2 as their_pb

from conch.core.errors import InvalidArgumentError
from conch.frontends.grpc.wire_format import cut_infer_request, length_header, read_varint, varint
from conch.protocol import inference_pb2 as pb

messages = st.builds(
    lambda name, request_id, names, raw: pb.ModelInferRequest(
        model_name=name,
        id=request_id,
        inputs=[
            pb.ModelInferRequest.InferInputTensor(name=one, datatype="FP32", shape=[-1, 3]) for one in names
        ],
        raw_input_contents=raw,
    ),
    st.text(max_size=8),
    st.text(max_size=8),
    st.lists(st.text(max_size=4), max_size=4),
    st.lists(st.binary(max_size=300), max_size=5),
)

# Fields that ModelInferRequest does not have, of every wire type but groups.
unknown_fields = st.one_of(
    st.builds(
        lambda field, value: varint(field << 3) + varint(value),
        st.integers(20, 5000),
        st.integers(0, 2**64 - 1),
    ),
    st.builds(
        lambda field, data: varint(field << 3 | 1) + data,
        st.integers(20, 5000),
        st.binary(min_size=8, max_size=8),
    ),
    st.builds(
        lambda field, data: length_header(field, len(data)) + data,
        st.integers(20, 5000),
        st.binary(max_size=200),
    ),
    st.builds(
        lambda field, data: varint(field << 3 | 5) + data,
        st.integers(20, 5000),
        st.binary(min_size=4, max_size=4),
    ),
)
fields = st.one_of(messages.map(lambda message: message.SerializeToString()), unknown_fields)


@given(st.integers(0, 2**64 - 1), st.binary(max_size=4))
def test_varints_round_trip(value: int, before: bytes) -> None:
    data = before + varint(value)
    assert read_varint(data, len(before)) == (value, len(data))


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 9, b"\xff" * 11])
def test_incomplete_and_endless_varints(data: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="the request message is malformed"):
        read_varint(data, 0)


@given(st.lists(fields, max_size=8))
def test_splitting_agrees_with_protobuf(parts: list[bytes]) -> None:
    """Also where raw contents come between other fields, as protobuf allows."""
    message = b"".join(parts)
    whole = pb.ModelInferRequest.FromString(message)
    rest, contents, _ = cut_infer_request(message)
    assert [bytes(content) for content in contents] == list(whole.raw_input_contents)
    del whole.raw_input_contents[:]
    assert pb.ModelInferRequest.FromString(rest) == whole


@given(messages, st.integers(0, 2000))
def test_truncated_messages_are_refused_exactly_where_protobuf_refuses_them(
    message: pb.ModelInferRequest, cut: int
) -> None:
    data = message.SerializeToString()[:cut]
    try:
        expected = list(pb.ModelInferRequest.FromString(data).raw_input_contents)
    except DecodeError:
        with pytest.raises((InvalidArgumentError, DecodeError)):
            pb.ModelInferRequest.FromString(cut_infer_request(data).head)
        return
    assert [bytes(one) for one in cut_infer_request(data).raw] == expected


@given(st.binary(max_size=60))
@settings(max_examples=scaled(500))
def test_garbage_is_split_or_refused(data: bytes) -> None:
    try:
        rest, contents, _ = cut_infer_request(data)
    except InvalidArgumentError:
        return
    assert len(rest) + sum(len(content) for content in contents) <= 2 * len(data)  # lengths may grow


@pytest.mark.parametrize("kind", [3, 4, 6, 7])
def test_wire_types_that_the_protocol_does_not_use(kind: int) -> None:
    with pytest.raises(InvalidArgumentError, match="the request message is malformed"):
        cut_infer_request(varint(30 << 3 | kind) + b"\0" * 8)


def test_large_contents_are_views_of_the_message() -> None:
    array = np.arange(1 << 20, dtype=np.uint8)
    request = their_pb.ModelInferRequest(model_name="m", raw_input_contents=[array.tobytes(), b"", b"x"])
    data = request.SerializeToString()
    rest, contents, _ = cut_infer_request(data)
    assert len(rest) < 10
    assert [len(content) for content in contents] == [array.size, 0, 1]
    assert np.shares_memory(np.frombuffer(contents[0], np.uint8), np.frombuffer(data, np.uint8))
    np.testing.assert_array_equal(np.frombuffer(contents[0], np.uint8), array)
