"""Requests that are wrong: each is answered with Triton's code and text, and harms no other request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.cases.requests_without_batch import BATCH_NOTE
from tests.support.contract_server import MOST_BYTES
from tests.support.grpc_transports import each_transport
from tests.support.servers import (
    WAIT_S,
    AnyServer,
    RawClient,
    check_simple,
    client_of,
    eventually,
    probe,
    simple_inputs,
    simple_request,
)
from tritonclient.grpc import service_pb2

RID = "[request id: r] "
ROW = np.arange(16, dtype=np.int32).tobytes()
Input = service_pb2.ModelInferRequest.InferInputTensor
Output = service_pb2.ModelInferRequest.InferRequestedOutputTensor
Contents = service_pb2.InferTensorContents

grpc_transport = each_transport()


@pytest.fixture(scope="module")
def in_flight(server: AnyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """A good request that runs all the while the bad ones come; it must be answered at the end."""
    directory = tmp_path_factory.mktemp("in-flight")
    started, go = directory / "started", directory / "go"
    said: list[Any] = []

    def ask() -> None:
        with client_of(server) as client:
            orders = {"started": str(started), "wait_for": str(go)}
            said.append(probe(client, model="versions", parameters=orders))

    thread = threading.Thread(target=ask)
    thread.start()
    eventually(started.exists, "the good request runs")
    yield said
    go.touch()
    thread.join(WAIT_S)
    assert said and said[0]["config"] == "versions"


def ints(name: str, **more: Any) -> Any:
    """An input of `simple`, some of its fields replaced."""
    return Input(**{"name": name, "datatype": "INT32", "shape": [1, 16], **more})


def typed(name: str, **more: Any) -> Any:
    """An input of `simple` with its elements in it."""
    return ints(name, contents=Contents(int_contents=range(16)), **more)


def parameter(key: str, kind: str, value: Any) -> dict[str, Any]:
    """Request parameters with one key."""
    return {key: service_pb2.InferParameter(**{kind: value})}


CASES: dict[str, tuple[dict[str, Any], grpc.StatusCode, str]] = {}


def case(name: str, text: str, code: str = "INVALID_ARGUMENT", **changes: Any) -> None:
    """Adds a bad request: what of a good one is changed, and what the server says to it."""
    CASES[name] = (changes, grpc.StatusCode[code], text)


case("unknown model", "Request for unknown model: 'nope' is not found", "NOT_FOUND", model_name="nope")
case("no model", "Request for unknown model: '' is not found", "NOT_FOUND", model_name="")
case(
    "unknown version",
    "Request for unknown model: 'simple' version 99 is not found",
    "NOT_FOUND",
    model_version="99",
)
case(
    "version is no number",
    "failed to get model version from specified version string 'one' (details: stol), version should be an "
    "integral value > 0",
    model_version="one",
)
case(
    "version is negative",
    "invalid model version specified '-3' , version should be an integral value > 0",
    model_version="-3",
)
case(
    "wrong datatype",
    RID + "inference input 'INPUT0' data-type is 'FP32', but model 'simple' expects 'INT32'",
    inputs=[ints("INPUT0", datatype="FP32"), ints("INPUT1")],
)
case(
    "unknown datatype",
    RID + "inference input 'INPUT0' data-type is 'INT7', but model 'simple' expects 'INT32'",
    inputs=[ints("INPUT0", datatype="INT7"), ints("INPUT1")],
)
case(
    "wrong shape",
    RID
    + "unexpected shape for input 'INPUT1' for model 'simple'. Expected [-1,16], got [1,8]. "
    + BATCH_NOTE,
    inputs=[ints("INPUT0"), ints("INPUT1", shape=[1, 8])],
    raw_input_contents=[ROW, ROW[:32]],
)
case(
    "wrong rank",
    RID
    + "unexpected shape for input 'INPUT0' for model 'simple'. Expected [-1,16], got [1,1,16]. "
    + BATCH_NOTE,
    inputs=[ints("INPUT0", shape=[1, 1, 16]), ints("INPUT1")],
)
case(
    "no shape",
    RID + "input 'INPUT0' has no shape but model requires batch dimension for 'simple'. Expected [-1,16], "
    "got []",
    inputs=[ints("INPUT0", shape=[]), ints("INPUT1")],
)
case(
    "negative dimension",
    RID + "All input dimensions should be specified for input 'INPUT0' for model 'simple', got [1,-1]",
    inputs=[ints("INPUT0", shape=[1, -1]), ints("INPUT1")],
)
case(
    "batches of different sizes",
    RID + "input 'INPUT0' batch size does not match other inputs for 'simple'. Expected 2, got 1",
    inputs=[ints("INPUT0"), ints("INPUT1", shape=[2, 16])],
    raw_input_contents=[ROW, ROW * 2],
)
case(
    "batch too large",
    RID + "inference request batch-size must be <= 8 for 'simple', got 9",
    inputs=[ints("INPUT0", shape=[9, 16]), ints("INPUT1", shape=[9, 16])],
    raw_input_contents=[ROW * 9, ROW * 9],
)
case(
    "missing input",
    RID
    + "expected 2 inputs but got 1 inputs for model 'simple'. Got input(s) ['INPUT0'], but missing required "
    "input(s) ['INPUT1']. Please provide all required input(s).",
    inputs=[ints("INPUT0")],
)
case(
    "no input",
    RID
    + "expected 2 inputs but got 0 inputs for model 'simple'. Got input(s) [], but missing required input(s) "
    "['INPUT0','INPUT1']. Please provide all required input(s).",
    inputs=[],
    raw_input_contents=[],
)
case(
    "extra input",
    "unexpected inference input 'INPUT2' for model 'simple', allowed inputs are: INPUT0, INPUT1",
    inputs=[ints("INPUT0"), ints("INPUT1"), ints("INPUT2")],
    raw_input_contents=[ROW] * 3,
)
case(
    "another input",
    "unexpected inference input 'INPUT2' for model 'simple', allowed inputs are: INPUT0, INPUT1",
    inputs=[ints("INPUT0"), ints("INPUT2")],
)
case(
    "duplicate input",
    RID + "input 'INPUT0' already exists in request",
    inputs=[ints("INPUT0"), ints("INPUT1"), ints("INPUT0")],
    raw_input_contents=[ROW] * 3,
)
case(
    "raw contents too short",
    RID + "input byte size mismatch for input 'INPUT0' for model 'simple'. Expected 64, got 60",
    raw_input_contents=[ROW[:60], ROW],
)
case(
    "raw contents too long",
    RID + "input byte size mismatch for input 'INPUT1' for model 'simple'. Expected 64, got 128",
    raw_input_contents=[ROW, ROW * 2],
)
case(
    "too few raw contents",
    "unable to find data for input tensor 'INPUT1' for model 'simple' in request.",
    raw_input_contents=[ROW],
)
case(
    "no contents at all",
    "unable to find data for input tensor 'INPUT0' for model 'simple' in request.",
    raw_input_contents=[],
)
case(
    "typed and raw contents",
    "contents field must not be specified when using raw_input_contents for 'INPUT0' for model 'simple'",
    inputs=[typed("INPUT0"), ints("INPUT1")],
)
case(
    "typed contents in the wrong field",
    "unexpected explicit tensor data for input tensor 'INPUT0' for model 'simple' of type 'FP32', expected "
    "datatype 'INT32'",
    inputs=[ints("INPUT0", contents=Contents(fp32_contents=[0.0] * 16)), typed("INPUT1")],
    raw_input_contents=[],
)
case(
    "typed contents in two fields",
    "unexpected explicit tensor data for input tensor 'INPUT0' for model 'simple', binary data was already "
    "supplied.",
    inputs=[
        ints("INPUT0", contents=Contents(int_contents=range(16), int64_contents=range(16))),
        typed("INPUT1"),
    ],
    raw_input_contents=[],
)
case(
    "too few typed contents",
    RID + "input byte size mismatch for input 'INPUT0' for model 'simple'. Expected 64, got 8",
    inputs=[ints("INPUT0", contents=Contents(int_contents=[1, 2])), typed("INPUT1")],
    raw_input_contents=[],
)
case(
    "unknown output",
    "unexpected inference output 'OUTPUT9' for model 'simple', allowed outputs are: OUTPUT0, OUTPUT1",
    outputs=[Output(name="OUTPUT9")],
)
case(
    "classification of the wrong type",
    "invalid value type for 'classification' parameter, expected int64_param",
    outputs=[Output(name="OUTPUT0", parameters=parameter("classification", "string_param", "3"))],
)
case(
    "classification below zero",
    "invalid value for 'classification' parameter, expected >= 0",
    outputs=[Output(name="OUTPUT0", parameters=parameter("classification", "int64_param", -1))],
)
case(
    "unknown region",
    "Unable to find shared memory region: 'sea'",
    "NOT_FOUND",
    inputs=[
        ints(
            "INPUT0",
            parameters={
                **parameter("shared_memory_region", "string_param", "sea"),
                **parameter("shared_memory_byte_size", "int64_param", 64),
            },
        ),
        ints("INPUT1"),
    ],
    raw_input_contents=[ROW],
)
case(
    "reserved parameter",
    "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting "
    "with 'triton_' are allowed: triton_enable_empty_final_response",
    parameters=parameter("triton_x", "bool_param", True),
)
for _key, _kind, _expected in (
    ("sequence_id", "bool_param", "int64_param or string_param"),
    ("sequence_start", "int64_param", "bool_param"),
    ("sequence_end", "int64_param", "bool_param"),
    ("priority", "bool_param", "int64_param or uint64_param"),
    ("timeout", "bool_param", "int64_param"),
    ("anything", "uint64_param", "int64_param, bool_param, or string_param"),
):
    case(
        f"{_key} of the wrong type",
        f"invalid value type for '{_key}' parameter, expected {_expected}.",
        parameters=parameter(_key, _kind, True if _kind == "bool_param" else 1),
    )
case(
    "negative priority",
    "invalid value for 'priority', expected value >= 0.",
    parameters=parameter("priority", "int64_param", -1),
)


@pytest.mark.parametrize("name", CASES)
def test_bad_request(raw: RawClient, in_flight: list[Any], name: str) -> None:
    changes, code, text = CASES[name]
    with pytest.raises(grpc.RpcError) as raised:
        raw.infer(simple_request(id="r", **changes))
    assert (raised.value.code(), raised.value.details()) == (code, text)
    assert not in_flight, "the good request should still run"
    check_simple(triton.InferResult(raw.infer(simple_request(id="good"))))


STRING_CASES = {
    "too few": (
        [b"a"],
        [1, 2],
        "expected 2 string elements for inference input 'text' for model 'strings', got 1",
    ),
    "too many": (
        [b"a", b"b"],
        [1, 1],
        "unexpected number of string elements 2 for inference input 'text' for model 'strings', expecting 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STRING_CASES)
def test_wrong_number_of_strings(raw: RawClient, name: str) -> None:
    elements, shape, text = STRING_CASES[name]
    request = service_pb2.ModelInferRequest(model_name="strings")
    request.inputs.add(name="text", datatype="BYTES", shape=shape, contents=Contents(bytes_contents=elements))
    with pytest.raises(grpc.RpcError) as raised:
        raw.infer(request)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert raised.value.details() == "" + text


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            b"\x01\x00",
            "incomplete string length indicator for inference input 'text' for model 'strings', expecting 4 "
            "bytes but only 2 bytes available. Please make sure the string length indicator is in one "
            "buffer.",
        ),
        (
            b"\x09\x00\x00\x00a",
            "expected 1 string elements for inference input 'text' for model 'strings', got 0",
        ),
    ],
)  # fmt: skip
def test_malformed_strings(raw: RawClient, data: bytes, text: str) -> None:
    request = service_pb2.ModelInferRequest(model_name="strings", id="r", raw_input_contents=[data])
    request.inputs.add(name="text", datatype="BYTES", shape=[1, 1])
    for _ in range(2):  # the second time the request's head is known
        with pytest.raises(grpc.RpcError) as raised:
            raw.infer(request)
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert raised.value.details() == RID + text


def test_same_head_other_size(raw: RawClient) -> None:
    """A bad request with the head of a good one that is remembered is refused."""
    check_simple(triton.InferResult(raw.infer(simple_request(id="r"))))
    for contents, got in (([ROW, ROW[:-4]], 60), ([ROW, ROW + b"\0"], 65)):
        with pytest.raises(grpc.RpcError) as raised:
            raw.infer(simple_request(id="r", raw_input_contents=contents))
        assert raised.value.details() == (
            f"{RID}input byte size mismatch for input 'INPUT1' for model 'simple'. Expected 64, got {got}"
        )
    check_simple(triton.InferResult(raw.infer(simple_request())))


def test_surplus_raw_contents_are_ignored(raw: RawClient) -> None:
    check_simple(triton.InferResult(raw.infer(simple_request(raw_input_contents=[ROW, ROW, ROW]))))


def test_message_over_the_limit(server: AnyServer, raw: RawClient) -> None:
    request = simple_request(raw_input_contents=[b"\0" * MOST_BYTES, ROW])
    with pytest.raises(grpc.RpcError) as raised:
        raw.infer(request)
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    size = request.ByteSize()
    assert f"Received message larger than max ({size} vs. {MOST_BYTES})" in raised.value.details()
    check_simple(triton.InferResult(raw.infer(simple_request())))


@pytest.mark.parametrize("position", [0, 1, 5, 20, 60, 100])
def test_truncated_messages(raw: RawClient, position: int) -> None:
    message = simple_request(id="r").SerializeToString()
    with pytest.raises(grpc.RpcError) as raised:
        raw.infer(message[:position])
    assert raised.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    check_simple(triton.InferResult(raw.infer(simple_request())))


def test_flipped_bits(raw: RawClient, server: AnyServer, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a message has become, it is answered, and no bug of the server shows."""
    message = bytearray(simple_request(id="r").SerializeToString())
    codes = set()
    for position in range(len(message)):
        changed = (
            bytes(message[:position]) + bytes([message[position] ^ 0x81]) + bytes(message[position + 1 :])
        )
        try:
            raw.infer(changed)
            codes.add(grpc.StatusCode.OK)
        except grpc.RpcError as error:
            codes.add(error.code())
    fine = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
    assert grpc.StatusCode.INVALID_ARGUMENT in codes
    assert codes <= fine
    with client_of(server) as client:
        check_simple(client.infer("simple", simple_inputs()))
    assert "could not be handled" not in caplog.text


def test_names_are_no_paths(raw: RawClient) -> None:
    for name in ("../simple", "simple/1", "/etc/passwd", "simple\0"):
        with pytest.raises(grpc.RpcError) as raised:
            raw.infer(simple_request(model_name=name))
        assert raised.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    "method",
    [
        "/inference.GRPCInferenceService/ModelInfer",
        "/inference.GRPCInferenceService/ServerLive",
        "/inference.GRPCInferenceService/RepositoryIndex",
        "/grpc.health.v1.Health/Check",
    ],
)
def test_a_call_without_a_message(raw: RawClient, method: str) -> None:
    """The client half-closes at once; as with grpcio's own servers it gets an error, and need not wait."""
    with pytest.raises(grpc.RpcError) as raised:
        raw.channel.stream_unary(method)(iter(()), timeout=WAIT_S)
    error: Any = raised.value
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert error.details() == "the method takes exactly one request message, none was sent"
    assert raw("ServerLive", service_pb2.ServerLiveRequest()).live
