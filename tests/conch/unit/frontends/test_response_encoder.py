"""Responses written by hand are what protobuf would have written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.core import make_request
from tritonclient.grpc import service_pb2 as their_pb

from conch.core.errors import InternalError, InvalidArgumentError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.tensor import ELEMENT_SIZES, Tensor
from conch.frontends.grpc import response_encoder
from conch.frontends.grpc.response_encoder import ResponseEncoder, encode_parameters, joined
from conch.protocol import inference_pb2 as pb


class Served:
    """Attributes of a model that the encoder reads."""

    def __init__(self, name: str, version: str) -> None:
        self.spec = self
        self.name = name
        self.version_text = version


def request_for(name: str = "m", version: str = "1", request_id: str = "") -> InferenceRequest:
    served: Any = Served(name, version)
    return make_request(model=served, id=request_id)


def as_view(data: bytes) -> memoryview:
    return memoryview(data)


tensors = st.builds(
    lambda name, datatype, shape, data: Tensor(name, datatype, tuple(shape), data),
    st.text(max_size=6),
    st.sampled_from([*ELEMENT_SIZES, "BYTES"]),
    st.lists(st.integers(-1, 2**40), max_size=4),
    st.one_of(st.binary(max_size=300), st.binary(max_size=20).map(as_view)),
)
parameters = st.dictionaries(
    st.text(max_size=6),
    st.one_of(
        st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text(max_size=6)
    ),
    max_size=3,
)

ENCODER = ResponseEncoder()
"""One for all examples, as in a server, so that what it remembers is tested too."""


@given(
    name=st.text(max_size=6),
    version=st.integers(1, 99).map(str),
    request_id=st.text(max_size=200),
    outputs=st.lists(tensors, max_size=4),
    values=parameters,
)
def test_responses_parse_as_what_they_were_made_of(
    name: str,
    version: str,
    request_id: str,
    outputs: list[Tensor],
    values: dict[str, bool | int | float | str],
) -> None:
    request = request_for(name, version, request_id)
    response = InferenceResponse(outputs, None, values)
    message = joined(ENCODER.parts(request, response))
    assert [ENCODER.message(request, response) for _ in range(2)] == [message] * 2
    expected = pb.ModelInferResponse(
        model_name=name,
        model_version=version,
        id=request_id,
        outputs=[
            pb.ModelInferResponse.InferOutputTensor(
                name=tensor.name, datatype=tensor.datatype, shape=tensor.shape
            )
            for tensor in outputs
        ],
        raw_output_contents=[bytes(tensor.data) for tensor in outputs],
    )
    for key, value in values.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[
            type(value)
        ]
        setattr(expected.parameters[key], kind, value)
    assert pb.ModelInferResponse.FromString(message) == expected
    theirs = their_pb.ModelInferResponse.FromString(message)
    assert theirs.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152])
def test_sizes_at_which_the_length_grows_by_a_byte(size: int) -> None:
    tensor = Tensor("x", "UINT8", (size,), bytes(size))
    message = joined(ENCODER.parts(request_for(), InferenceResponse([tensor])))
    assert [len(raw) for raw in pb.ModelInferResponse.FromString(message).raw_output_contents] == [size]


@pytest.mark.parametrize(
    ("name", "datatype", "shape"),
    [("y", "INT32", (2, 3)), ("x", "FP32", (2, 3)), ("x", "INT32", (3, 2)), ("x", "INT32", (6,))],
)
def test_a_remembered_head_is_not_taken_for_another_output(
    name: str, datatype: str, shape: tuple[int, ...]
) -> None:
    encoder = ResponseEncoder()
    for tensor in (Tensor("x", "INT32", (2, 3), bytes(24)), Tensor(name, datatype, shape, bytes(24))):
        message = encoder.message(request_for(), InferenceResponse([tensor]))
        (output,) = pb.ModelInferResponse.FromString(message).outputs
        assert (output.name, output.datatype, tuple(output.shape)) == (
            tensor.name,
            tensor.datatype,
            tensor.shape,
        )


def test_every_output_has_its_entry_even_where_it_is_empty() -> None:
    outputs = [Tensor.from_array("a", np.zeros((0, 4), np.float32)), Tensor("b", "INT8", (1,), b"\1")]
    message = pb.ModelInferResponse.FromString(
        joined(ENCODER.parts(request_for(), InferenceResponse(outputs)))
    )
    assert list(message.raw_output_contents) == [b"", b"\1"]
    assert not message.outputs[0].HasField("contents")


def test_a_response_of_nothing_names_its_request() -> None:
    """With the version it asked for, which may be none, and not with the one that served it."""
    for asked in ("", "3"):
        request = request_for("m", "3", "7")
        request.model_version = asked
        message = pb.ModelInferResponse.FromString(ENCODER.message(request, None))
        assert message == pb.ModelInferResponse(model_name="m", model_version=asked, id="7")


def test_the_join_is_the_only_copy() -> None:
    array = np.zeros(1 << 16, np.uint8)
    parts = ENCODER.parts(request_for(), InferenceResponse([Tensor.from_array("x", array)]))
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), array) for part in parts)


@given(
    st.sampled_from(["m", "n"]),
    st.sampled_from(["1", "2"]),
    st.sampled_from(["", "id"]),
    st.sampled_from([{}, {"p": 1}]),
    st.lists(
        st.builds(
            Tensor,
            st.sampled_from("xy"),
            st.sampled_from(["UINT8", "BYTES"]),
            st.sampled_from([(1, 2), (2, 1), (2,)]),
            st.sampled_from([b"", b"1", b"2", b"12", memoryview(b"21")]),
        ),
        max_size=2,
    ),
)
def test_responses_that_differ_in_little_only(
    name: str, version: str, request_id: str, values: dict[str, Any], outputs: list[Tensor]
) -> None:
    request, response = request_for(name, version, request_id), InferenceResponse(outputs, None, values)
    expected = joined(ResponseEncoder().parts(request, response))
    assert joined(ENCODER.parts(request, response)) == ENCODER.message(request, response) == expected


def test_shapes_that_never_repeat_do_not_fill_the_memory() -> None:
    encoder = ResponseEncoder(8)
    for size in range(50):
        tensor = Tensor("x", "UINT8", (size,), bytes(size))
        message = encoder.message(request_for(f"m{size}"), InferenceResponse([tensor]))
        assert pb.ModelInferResponse.FromString(message).outputs[0].shape == [size]
    assert encoder.largest_cache <= 8


@pytest.mark.pure("counts the calls of a function that compiled code calls itself")
def test_large_bytes_are_copied_as_only_a_join_copies_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so without the interpreter's lock: no other thread has to wait for it."""
    joins: list[int] = []

    def counted(parts: list[Any]) -> bytes:
        joins.append(len(parts))
        return joined(parts)

    monkeypatch.setattr(response_encoder, "joined", counted)
    for size in (1, 2 << 20):
        tensor = Tensor("x", "UINT8", (size,), bytes(size))
        message = ENCODER.message(request_for(), InferenceResponse([tensor]))
        assert pb.ModelInferResponse.FromString(message).raw_output_contents == [bytes(size)]
    assert joins == [2]


def test_two_versions_of_a_model_are_told_apart() -> None:
    for version in ("1", "2", "1"):
        message = joined(ENCODER.parts(request_for("twice", version), InferenceResponse([])))
        assert pb.ModelInferResponse.FromString(message).model_version == version


def test_a_parameter_of_another_type_is_refused() -> None:
    with pytest.raises(InternalError) as caught:
        encode_parameters({"x": None}, "m")
    text = "response parameter 'x' of model 'm' must be a bool, int, float or str, not NoneType"
    assert caught.value.message == text


def test_a_response_that_grpc_can_not_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_encoder, "MAX_BYTES", 10)
    assert joined([b"12345", b"67890"]) == b"1234567890"
    with pytest.raises(InvalidArgumentError) as caught:
        joined([b"12345", b"678901"])
    assert caught.value.message == "Response has byte size 11 which exceeds gRPC's byte size limit 10."
    monkeypatch.setattr(response_encoder, "LARGE_BYTES", 4)  # shorter ones can't exceed the limit
    for size in (4, 5):
        with pytest.raises(InvalidArgumentError, match="exceeds gRPC's byte size limit 10"):
            ENCODER.message(request_for(), InferenceResponse([Tensor("x", "UINT8", (size,), bytes(size))]))


def test_a_request_that_was_never_submitted_is_not_answered() -> None:
    request = make_request()
    model: object = request.model
    assert model is None
    tensor = Tensor("x", "UINT8", (1,), b"1")
    for response in (None, InferenceResponse([tensor])):
        with pytest.raises(AssertionError):
            ENCODER.message(request, response)
