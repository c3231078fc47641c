"""Requests as they come from the wire: tensors, parameters, and Triton's texts for what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.core import Answers
from tests.support.profiles import scaled
from tritonclient.grpc import InferInput, InferRequestedOutput
from tritonclient.grpc._utils import _get_inference_request

from conch.core.errors import ConchError, InvalidArgumentError
from conch.core.request import InferenceRequest
from conch.core.tensor import Array, decode_bytes
from conch.frontends.grpc import request_decoder, request_layouts
from conch.frontends.grpc.request_decoder import RequestDecoder
from conch.frontends.grpc.wire_format import length_header
from conch.protocol import inference_pb2 as pb

Request = pb.ModelInferRequest
Input = pb.ModelInferRequest.InferInputTensor
Output = pb.ModelInferRequest.InferRequestedOutputTensor
Contents = pb.InferTensorContents
Value = pb.InferParameter


def decoded(message: Any) -> InferenceRequest:
    data: bytes = message.SerializeToString()
    return RequestDecoder()(data, Answers(), 17)


def one_input(datatype: str = "FP32", shape: tuple[int, ...] = (1,), **fields: Any) -> Any:
    return Input(name="x", datatype=datatype, shape=shape, **fields)


def with_parameter(key: str, **value: Any) -> Any:
    return Request(model_name="m", parameters={key: Value(**value)})


def with_region(**parameters: Any) -> Any:
    return Request(model_name="m", inputs=[one_input(parameters=parameters)])


def with_output(**parameters: Any) -> Any:
    return Request(model_name="m", outputs=[Output(name="o", parameters=parameters)])


REGION = Value(string_param="region")
SIZE = Value(int64_param=4)
RESERVED = (
    "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting "
    "with 'triton_' are allowed: triton_enable_empty_final_response"
)


@pytest.mark.parametrize(
    ("message", "kind", "text"),
    [
        pytest.param(
            Request(
                model_name="m",
                inputs=[one_input(contents=Contents(fp32_contents=[1]))],
                raw_input_contents=[bytes(4)],
            ),
            InvalidArgumentError,
            "contents field must not be specified when using raw_input_contents for 'x' for model 'm'",
            id="contents-with-raw",
        ),
        pytest.param(
            Request(model_name="m", inputs=[one_input()]),
            InvalidArgumentError,
            "unable to find data for input tensor 'x' for model 'm' in request.",
            id="no-data",
        ),
        pytest.param(
            Request(model_name="m", inputs=[Input(name="w"), one_input()], raw_input_contents=[b""]),
            InvalidArgumentError,
            "unable to find data for input tensor 'x' for model 'm' in request.",
            id="too-few-raw",
        ),
        pytest.param(
            Request(model_name="m", inputs=[one_input(contents=Contents(int_contents=[1]))]),
            InvalidArgumentError,
            "unexpected explicit tensor data for input tensor 'x' for model 'm' of type 'INT32', expected "
            "datatype 'FP32'",
            id="wrong-contents",
        ),
        pytest.param(
            Request(
                model_name="m",
                inputs=[one_input(contents=Contents(fp32_contents=[1], int_contents=[1]))],
            ),
            InvalidArgumentError,
            "unexpected explicit tensor data for input tensor 'x' for model 'm', binary data was already "
            "supplied.",
            id="two-kinds-of-contents",
        ),
        *(
            pytest.param(
                Request(model_name="m", inputs=[one_input(datatype, contents=Contents(fp32_contents=[1]))]),
                InvalidArgumentError,
                "unexpected explicit tensor data for input tensor 'x' for model 'm' of type 'FP32', expected "
                f"datatype '{datatype}'",
                id=f"{datatype}-is-raw-only",
            )
            for datatype in ("FP16", "BF16")
        ),
        pytest.param(
            Request(model_name="m", inputs=[one_input(), one_input()], raw_input_contents=[b"", b""]),
            InvalidArgumentError,
            "input 'x' already exists in request",
            id="input-twice-raw",
        ),
        pytest.param(
            Request(model_name="m", inputs=[one_input(contents=Contents(fp32_contents=[1]))] * 2),
            InvalidArgumentError,
            "input 'x' already exists in request",
            id="input-twice",
        ),
        pytest.param(
            with_parameter("sequence_id", bool_param=True),
            InvalidArgumentError,
            "invalid value type for 'sequence_id' parameter, expected int64_param or string_param.",
            id="sequence_id",
        ),
        *(
            pytest.param(
                with_parameter(key, int64_param=1),
                InvalidArgumentError,
                f"invalid value type for '{key}' parameter, expected bool_param.",
                id=key,
            )
            for key in ("sequence_start", "sequence_end", "triton_enable_empty_final_response")
        ),
        pytest.param(
            with_parameter("priority", string_param="1"),
            InvalidArgumentError,
            "invalid value type for 'priority' parameter, expected int64_param or uint64_param.",
            id="priority-type",
        ),
        pytest.param(
            with_parameter("priority", int64_param=-1),
            InvalidArgumentError,
            "invalid value for 'priority', expected value >= 0.",
            id="priority-value",
        ),
        pytest.param(
            with_parameter("timeout", uint64_param=1),
            InvalidArgumentError,
            "invalid value type for 'timeout' parameter, expected int64_param.",
            id="timeout",
        ),
        pytest.param(
            with_parameter("triton_other", bool_param=True), InvalidArgumentError, RESERVED, id="reserved"
        ),
        *(
            pytest.param(
                with_parameter("x", **value),
                InvalidArgumentError,
                "invalid value type for 'x' parameter, expected int64_param, bool_param, or string_param.",
                id=f"custom-{name}",
            )
            for name, value in (("uint64", {"uint64_param": 1}), ("unset", {}))
        ),
        pytest.param(
            with_region(shared_memory_region=REGION),
            InvalidArgumentError,
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for "
            "tensor 'x'",
            id="region-without-size",
        ),
        pytest.param(
            with_region(shared_memory_offset=SIZE),
            InvalidArgumentError,
            "'shared_memory_offset' can not be specified without 'shared_memory_region' parameter for tensor "
            "'x'",
            id="offset-without-region",
        ),
        pytest.param(
            with_region(shared_memory_region=SIZE),
            InvalidArgumentError,
            "invalid value type for 'shared_memory_region' parameter for tensor 'x', expected string_param.",
            id="region-type",
        ),
        *(
            pytest.param(
                with_region(shared_memory_region=REGION, **{key: REGION}),
                InvalidArgumentError,
                f"invalid value type for '{key}' parameter for tensor 'x', expected int64_param.",
                id=f"{key}-type",
            )
            for key in ("shared_memory_offset", "shared_memory_byte_size")
        ),
        pytest.param(
            with_output(classification=Value(string_param="1")),
            InvalidArgumentError,
            "invalid value type for 'classification' parameter, expected int64_param",
            id="classification-type",
        ),
        pytest.param(
            with_output(classification=Value(int64_param=-1)),
            InvalidArgumentError,
            "invalid value for 'classification' parameter, expected >= 0",
            id="classification-value",
        ),
        pytest.param(
            with_output(classification=Value(int64_param=1), shared_memory_region=REGION),
            InvalidArgumentError,
            "output can't set both 'shared_memory_region' and 'classification'",
            id="classification-into-a-region",
        ),
    ],
)
def test_texts(message: Any, kind: type[ConchError], text: str) -> None:
    with pytest.raises(ConchError) as caught:
        decoded(message)
    assert (type(caught.value), caught.value.message) == (kind, text)


ARRAYS = [
    np.array([[True, False]]),
    np.array([1.5, -2], np.float32),
    np.array([[1.5], [-2]], np.float64),
    np.array([1, 2], np.float16),
    np.array([-1], np.int8),
    np.array([2**63], np.uint64),
    np.array([[b"a", b"\xff\0"]], object),
    np.zeros((0, 4), np.float32),
    np.zeros((200, 200), np.float32),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{list(array.shape)}")
def test_what_tritonclient_sends(array: Array) -> None:
    from tritonclient.utils import np_to_triton_dtype

    client_input = InferInput("x", list(array.shape), np_to_triton_dtype(array.dtype))
    client_input.set_data_from_numpy(array)
    request = decoded(
        _get_inference_request(
            model_name="m",
            inputs=[client_input],
            model_version="2",
            request_id="id",
            outputs=[InferRequestedOutput("o"), InferRequestedOutput("p", class_count=3)],
            sequence_id=7,
            sequence_start=True,
            sequence_end=True,
            priority=2,
            timeout=1000,
            parameters={"a": 1, "b": "text", "c": True},
        )
    )
    tensor = request.inputs["x"]
    np.testing.assert_array_equal(tensor.numpy(), array)
    assert (request.model_name, request.model_version, request.id) == ("m", "2", "id")
    assert request.requested == ("o", "p")
    assert request.classes == {"p": 3}
    assert (request.correlation_id, request.sequence_start, request.sequence_end) == (7, True, True)
    assert (request.priority, request.timeout_us) == (2, 1000)
    assert request.parameters == {"a": 1, "b": "text", "c": True}
    assert request.received_ns == 17


def test_a_request_of_nothing() -> None:
    request = decoded(Request())
    assert (request.model_name, request.model_version, request.id, request.inputs) == ("", "", "", {})
    assert [request.requested, request.parameters, request.classes] == [None, None, None]
    assert request.correlation_id == request.priority == request.timeout_us == 0
    assert not (request.sequence_start or request.sequence_end or request.empty_final)


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("sequence_id", {"string_param": "s"}, lambda request: request.correlation_id == "s"),
        ("sequence_id", {"int64_param": -1}, lambda request: request.correlation_id == 2**64 - 1),
        ("priority", {"uint64_param": 3}, lambda request: request.priority == 3),
        ("priority", {"int64_param": 3}, lambda request: request.priority == 3),
        ("triton_enable_empty_final_response", {"bool_param": True}, lambda request: request.empty_final),
        ("headers", {"string_param": "h"}, lambda request: request.parameters == {"headers": "h"}),
        (
            "binary_data_output",
            {"bool_param": False},
            lambda r: r.parameters == {"binary_data_output": False},
        ),
        ("d", {"double_param": 0.5}, lambda request: request.parameters == {"d": 0.5}),
    ],
)
def test_parameters(key: str, value: dict[str, Any], read: Callable[[InferenceRequest], bool]) -> None:
    assert read(decoded(with_parameter(key, **value)))


@pytest.mark.parametrize(
    ("datatype", "contents", "expected"),
    [
        ("BOOL", {"bool_contents": [True, False]}, np.array([True, False])),
        ("INT8", {"int_contents": [-1, 300]}, np.array([-1, 44], np.int8)),
        ("INT16", {"int_contents": [-1, 70_000]}, np.array([-1, 4464], np.int16)),
        ("INT32", {"int_contents": [-1, 2**31 - 1]}, np.array([-1, 2**31 - 1], np.int32)),
        ("INT64", {"int64_contents": [-1, 2**63 - 1]}, np.array([-1, 2**63 - 1], np.int64)),
        ("UINT8", {"uint_contents": [1, 257]}, np.array([1, 1], np.uint8)),
        ("UINT16", {"uint_contents": [1, 65_537]}, np.array([1, 1], np.uint16)),
        ("UINT32", {"uint_contents": [1, 2**32 - 1]}, np.array([1, 2**32 - 1], np.uint32)),
        ("UINT64", {"uint64_contents": [1, 2**64 - 1]}, np.array([1, 2**64 - 1], np.uint64)),
        ("FP32", {"fp32_contents": [0.5, float("inf")]}, np.array([0.5, np.inf], np.float32)),
        ("FP64", {"fp64_contents": [0.1, -0.0]}, np.array([0.1, -0.0])),
        ("BYTES", {"bytes_contents": [b"", b"\xff"]}, np.array([b"", b"\xff"], object)),
    ],
)
def test_typed_contents(datatype: str, contents: dict[str, Any], expected: Array) -> None:
    message = Request(inputs=[one_input(datatype, (2,), contents=Contents(**contents))])
    tensor = decoded(message).inputs["x"]
    assert tensor.datatype == datatype
    np.testing.assert_array_equal(tensor.numpy(), expected)


@pytest.mark.parametrize("raw", [True, False])
def test_an_output_asked_for_twice_is_refused(raw: bool) -> None:
    outputs = [Output(name="o"), Output(name="p"), Output(name="o")]
    tensor = one_input() if raw else one_input(contents=Contents(fp32_contents=[1]))
    message = Request(
        id="7",
        model_name="m",
        inputs=[tensor],
        outputs=outputs,
        raw_input_contents=[b"\0" * 4] if raw else [],
    )
    decoder = RequestDecoder()
    for _ in range(ENOUGH):  # a decoder may treat what it has seen before in another way
        with pytest.raises(InvalidArgumentError) as raised:
            decoder(message.SerializeToString(), Answers(), 17)
        assert raised.value.message == "[request id: 7] output 'o' already exists in request"


def test_many_strings_in_typed_contents() -> None:
    elements = [str(number).encode() for number in range(100_000)]
    message = Request(inputs=[one_input("BYTES", (100_000,), contents=Contents(bytes_contents=elements))])
    assert decode_bytes(decoded(message).inputs["x"].data).tolist() == elements


def test_an_empty_tensor_needs_no_contents() -> None:
    assert decoded(Request(inputs=[one_input(shape=(0, 4))])).inputs["x"].numpy().shape == (0, 4)


def test_raw_contents_belong_to_the_inputs_in_order_and_extra_ones_are_ignored() -> None:
    message = Request(
        inputs=[Input(name=name, datatype="UINT8", shape=[1]) for name in "ba"],
        raw_input_contents=[b"1", b"2", b"3"],
    )
    inputs = decoded(message).inputs
    assert [(name, bytes(tensor.data)) for name, tensor in inputs.items()] == [("b", b"1"), ("a", b"2")]


def test_the_tensors_of_a_large_message_share_its_memory() -> None:
    arrays = [np.arange(1 << 18, dtype=np.float32), np.arange(10, dtype=np.float32)]
    message = Request(
        model_name="m",
        inputs=[
            Input(name=str(index), datatype="FP32", shape=array.shape) for index, array in enumerate(arrays)
        ],
        raw_input_contents=[array.tobytes() for array in arrays],
    ).SerializeToString()
    request = RequestDecoder()(message, Answers(), 0)
    memory = np.frombuffer(message, np.uint8)
    for index, array in enumerate(arrays):
        got = request.inputs[str(index)].numpy()
        assert np.shares_memory(got, memory)
        np.testing.assert_array_equal(got, array)


ENOUGH = 3
"""Number of times a message has to be seen to be recognised."""


def parse_all(message: bytes, responder: Answers, received_ns: int) -> InferenceRequest:
    """Reads a request without remembering anything."""
    return request_decoder.parse_request(message, responder, received_ns)


def outcome(decoder: Callable[[bytes, Answers, int], InferenceRequest], message: bytes) -> object:
    try:
        request = decoder(message, Answers(), 0)
    except ConchError as error:
        return type(error), error.message.partition("malformed")[0]
    return (
        request.model_name,
        request.id,
        request.requested,
        request.parameters,
        {name: (one.datatype, one.shape, bytes(one.data)) for name, one in request.inputs.items()},
    )


typed_contents = st.one_of(
    st.builds(lambda values: Contents(bool_contents=values), st.lists(st.booleans(), max_size=4)),
    st.builds(lambda values: Contents(int_contents=values), st.lists(st.integers(-(2**31), 2**31 - 1))),
    st.builds(lambda values: Contents(int64_contents=values), st.lists(st.integers(-(2**63), 2**63 - 1))),
    st.builds(lambda values: Contents(uint_contents=values), st.lists(st.integers(0, 2**32 - 1))),
    st.builds(lambda values: Contents(uint64_contents=values), st.lists(st.integers(0, 2**64 - 1))),
    st.builds(lambda values: Contents(fp32_contents=values), st.lists(st.floats(width=32))),
    st.builds(lambda values: Contents(fp64_contents=values), st.lists(st.floats())),
    st.builds(lambda values: Contents(bytes_contents=values), st.lists(st.binary(max_size=5))),
    st.builds(lambda values: Contents(bytes_contents=values, fp32_contents=[1]), st.lists(st.just(b""))),
)
datatypes = st.sampled_from(
    ["FP32", "FP64", "BOOL", "INT8", "INT32", "INT64", "UINT16", "UINT64", "BYTES", "X"]
)


@given(st.lists(st.tuples(st.text(max_size=2), datatypes, st.none() | typed_contents), max_size=3))
def test_typed_contents_are_read_as_protobuf_reads_them(inputs: list[tuple[str, str, Any]]) -> None:
    # As many strings are looked at as the shape has elements, and one more.
    made = [Input(name=name, datatype=kind, shape=[100], contents=one) for name, kind, one in inputs]
    first, *others = every_way(Request(model_name="m", inputs=made).SerializeToString())
    assert others == [first] * (ENOUGH + 2)


@pytest.mark.parametrize(
    ("datatype", "field", "packed"),
    [("INT32", 2, False), ("INT8", 2, True), ("BOOL", 1, True), ("INT64", 3, True), ("FP32", 6, False)],
)
@given(st.binary(max_size=60))
def test_contents_of_any_bytes_are_read_as_protobuf_reads_them(
    datatype: str, field: int, packed: bool, data: bytes
) -> None:
    contents = length_header(field, len(data)) + data if packed else data
    made = Input(name="x", datatype=datatype, shape=[4]).SerializeToString()
    made += length_header(5, len(contents)) + contents
    message = b"\x0a\x01m" + length_header(5, len(made)) + made
    first, *others = every_way(message)
    refused = (InvalidArgumentError, "the request message is ")
    # Groups of old protobuf are refused in long messages.
    assert first == refused or others in ([first] * (ENOUGH + 2), [first] * ENOUGH + [refused] * 2)


def test_strings_behind_those_that_the_shape_has_are_not_looked_at() -> None:
    contents = Contents(bytes_contents=[b"ab"] * 9000)
    request = decoded(Request(model_name="m", inputs=[one_input("BYTES", (2, 3), contents=contents)]))
    assert decode_bytes(request.inputs["x"].data).tolist() == [b"ab"] * 7


@pytest.mark.parametrize("number", [2, 4, 5, 6, 7])
def test_millions_of_fields_are_refused_before_anything_is_made_of_them(number: int) -> None:
    message = b"\x0a\x01m" + length_header(number, 0) * 1_000_000
    with pytest.raises(InvalidArgumentError, match="request message"):
        RequestDecoder()(message, Answers(), 0)
    assert RequestDecoder().is_long(message)


whole_requests = st.builds(
    lambda name, inputs, outputs, raw, parameters: Request(
        model_name=name,
        inputs=[Input(name=one, datatype="FP32", shape=shape) for one, shape in inputs],
        outputs=[Output(name=one) for one in outputs],
        raw_input_contents=raw,
        parameters={key: Value(int64_param=value) for key, value in parameters.items()},
    ),
    st.text(max_size=5),
    st.lists(st.tuples(st.text(max_size=3), st.lists(st.integers(-1, 4), max_size=3)), max_size=3),
    st.lists(st.text(max_size=3), max_size=2),
    st.lists(st.binary(max_size=50), max_size=4),
    st.dictionaries(st.text(max_size=5), st.integers(-5, 5), max_size=2),
)


def every_way(message: bytes) -> list[object]:
    """A message parsed as a small one, taken apart by hand, and recognised; and as a large one."""
    decoder = RequestDecoder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_decoder, "SCAN_FROM", len(message) + 1)
        outcomes = [outcome(parse_all, message), *(outcome(decoder, message) for _ in range(ENOUGH))]
        patch.setattr(request_decoder, "SCAN_FROM", 0)
        return [*outcomes, outcome(parse_all, message), outcome(decoder, message)]


@given(whole_requests)
def test_all_ways_to_read_a_message_agree(message: Any) -> None:
    first, *others = every_way(message.SerializeToString())
    assert others == [first] * (ENOUGH + 2)


@given(whole_requests, st.data())
@settings(max_examples=scaled(200))
def test_broken_messages_are_read_or_refused_alike(message: Any, data: st.DataObject) -> None:
    whole = bytearray(message.SerializeToString())
    whole = whole[: data.draw(st.integers(0, len(whole)))]
    for _ in range(data.draw(st.integers(0, 2)) if whole else 0):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    # Anything but a ConchError would come out. A scan does not read the groups of old protobuf.
    outcomes = every_way(bytes(whole))
    assert outcomes[: ENOUGH + 1] == outcomes[:1] * (ENOUGH + 1)


@given(st.binary(max_size=100))
@settings(max_examples=scaled(300))
def test_garbage(data: bytes) -> None:
    parsed = every_way(data)[0]
    try:
        pb.ModelInferRequest.FromString(data)
    except DecodeError:
        assert parsed == (InvalidArgumentError, "the request message is ")


plain_requests = st.builds(
    lambda name, version, count, outputs, raw, request_id: Request(
        model_name=name,
        model_version=version,
        id=request_id,
        inputs=[Input(name=f"i{index}", datatype="UINT8", shape=[3, index]) for index in range(count)],
        outputs=[Output(name=f"o{index}") for index in range(outputs)],
        raw_input_contents=raw[:count],
    ),
    st.sampled_from(["", "m", "n"]),
    st.sampled_from(["", "1"]),
    st.integers(0, 3),
    st.integers(0, 2),
    st.lists(st.binary(max_size=200), min_size=3, max_size=3),
    st.text(max_size=5),
)


@given(st.lists(plain_requests, min_size=1, max_size=12))
def test_a_decoder_that_has_seen_others_reads_each_as_a_fresh_one(messages: list[Any]) -> None:
    decoder = RequestDecoder()
    for message in messages:
        data = message.SerializeToString()
        assert outcome(decoder, data) == outcome(parse_all, data)


def test_signatures_are_equal_exactly_for_requests_that_differ_in_id_and_bytes_only() -> None:
    decoder = RequestDecoder()

    def signature(name: str, request_id: str, shape: int, data: bytes) -> object:
        message = Request(
            model_name=name, id=request_id, inputs=[one_input(shape=(shape,))], raw_input_contents=[data]
        )
        return decoder(message.SerializeToString(), Answers(), 0).signature

    first = signature("m", "", 1, b"1234")
    assert first is not None
    assert signature("m", "other", 1, b"5") is first
    assert signature("n", "", 1, b"1234") is not first
    assert signature("m", "", 2, b"1234") is not first


def test_an_id_that_is_no_text() -> None:
    with pytest.raises(InvalidArgumentError, match="the request message is malformed"):
        RequestDecoder()(b"\x0a\x01m\x1a\x01\xff", Answers(), 0)


def test_requests_that_never_repeat_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_layouts, "MAX_TEMPLATES", 8)
    decoder = RequestDecoder()
    for index in range(50):
        message = Request(model_name=f"m{index}").SerializeToString()
        assert decoder(message, Answers(), 0).model_name == f"m{index}"
    assert len(decoder.layouts.templates) <= 8
