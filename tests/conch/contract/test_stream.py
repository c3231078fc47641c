"""ModelStreamInfer: order, errors, final responses, cancellation."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.grpc_transports import each_transport
from tests.support.servers import (
    WAIT_S,
    RawClient,
    check_simple,
    eventually,
    probe,
    probe_inputs,
    simple_inputs,
    simple_request,
    tensor,
)
from tritonclient.grpc import InferenceServerClient as Client
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

Answer = tuple[triton.InferResult | None, InferenceServerException | None]
Next = Callable[[], Answer]

grpc_transport = each_transport()


@pytest.fixture
def answers(client: Client) -> Iterator[Next]:
    """Opens a stream; gives what comes next on it."""
    arrived: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    client.start_stream(lambda result, error: arrived.put((result, error)))
    yield lambda: arrived.get(timeout=WAIT_S)
    client.stop_stream()


def response(answer: Answer) -> service_pb2.ModelInferResponse:
    result, error = answer
    assert error is None
    assert result is not None
    return result.get_response()


def final(answer: Answer) -> bool:
    parameter = response(answer).parameters["triton_final_response"]
    assert parameter.WhichOneof("parameter_choice") == "bool_param"
    return bool(parameter.bool_param)


def test_responses_in_order(client: Client, answers: Next) -> None:
    for number in range(50):
        client.async_stream_infer("simple", simple_inputs(number), request_id=str(number))
    for number in range(50):
        answer = answers()
        assert response(answer).id == str(number)
        assert final(answer)
        assert answer[0] is not None
        check_simple(answer[0], number)


def test_a_slow_model_holds_up_a_fast_one(
    client: Client, answers: Next, signal_files: tuple[Path, Path]
) -> None:
    started, go = signal_files
    orders = {"started": str(started), "wait_for": str(go)}
    client.async_stream_infer("probe", probe_inputs(), request_id="slow", parameters=orders)
    eventually(started.exists, "the slow model runs")
    client.async_stream_infer("simple", simple_inputs(), request_id="fast")
    client.async_stream_infer("nope", simple_inputs(), request_id="wrong")
    # Counted before it is sent, so that the fast one has been answered when this holds.
    fast = client.get_inference_statistics("simple").model_stats[0].inference_stats.success.count
    client.infer("simple", simple_inputs())
    after = client.get_inference_statistics("simple").model_stats[0].inference_stats.success.count
    assert after > fast
    go.touch()
    assert [response(answers()).id, response(answers()).id] == ["slow", "fast"]
    assert "unknown model: 'nope' is not found" in str(answers()[1])


def test_errors_leave_the_stream_open(client: Client, answers: Next) -> None:
    wrong = [tensor(name, np.zeros((1, 8), np.int32), "INT32") for name in ("INPUT0", "INPUT1")]
    client.async_stream_infer("simple", simple_inputs(1))
    client.async_stream_infer("nope", simple_inputs())
    client.async_stream_infer("simple", wrong, request_id="w")
    client.async_stream_infer("probe", probe_inputs(), parameters={"error": "NOT_FOUND"})
    client.async_stream_infer("simple", simple_inputs(2), request_id="last")
    assert final(answers())
    errors = [str(answers()[1]) for _ in range(3)]
    assert errors[0] == "Request for unknown model: 'nope' is not found"
    assert errors[1].startswith(
        "[request id: w] unexpected shape for input 'INPUT1' for model 'simple'. Expected [-1,16], got [1,8]."
    )
    assert errors[2] == "told to"
    answer = answers()
    assert response(answer).id == "last"
    assert final(answer)


def test_errors_carry_the_id_and_no_final_flag_before_the_model(raw: RawClient) -> None:
    messages = stream(raw, [simple_request(model_name="nope", id="a"), simple_request(id="b")])
    assert messages[0].error_message == "Request for unknown model: 'nope' is not found"
    assert messages[0].infer_response == service_pb2.ModelInferResponse(id="a")
    assert (messages[1].error_message, messages[1].infer_response.id) == ("", "b")


def test_error_of_a_model_carries_the_final_flag(raw: RawClient) -> None:
    (message,) = stream(raw, [probe_request(error="UNAVAILABLE")])
    assert message.error_message == "told to"
    assert message.infer_response.id == "a"
    assert message.infer_response.model_name == "probe"
    assert message.infer_response.parameters["triton_final_response"].bool_param
    assert not message.infer_response.outputs


def test_decoupled(client: Client, answers: Next) -> None:
    numbers = [tensor("IN", np.array([5, 6, 7], np.int32), "INT32")]
    client.async_stream_infer("repeater", numbers, request_id="r")
    for value in (5, 6, 7):
        answer = answers()
        assert not final(answer)
        assert response(answer).id == "r"
        assert answer[0] is not None
        assert answer[0].as_numpy("OUT").tolist() == [value]
    # The flags-only end above was swallowed: what comes next is the next request's.
    client.async_stream_infer("simple", simple_inputs(1))
    assert response(answers()).model_name == "simple"


def test_decoupled_with_empty_final_response(client: Client, answers: Next) -> None:
    numbers = [tensor("IN", np.array([5], np.int32), "INT32")]
    for identity, count in (("one", 1), ("none", 0)):
        client.async_stream_infer(
            "repeater",
            numbers if count else [tensor("IN", np.array([], np.int32), "INT32")],
            request_id=identity,
            enable_empty_final_response=True,
        )
        assert [final(answers()) for _ in range(count)] == [False] * count
        answer = answers()
        assert final(answer)
        end = response(answer)
        assert (end.id, end.model_name, len(end.outputs)) == (identity, "repeater", 0)


def test_decoupled_in_a_unary_call(client: Client) -> None:
    result = client.infer("repeater", [tensor("IN", np.array([1], np.int32), "INT32")])
    assert result.as_numpy("OUT").tolist() == [1]
    with pytest.raises(InferenceServerException) as raised:
        client.infer("repeater", [tensor("IN", np.array([1, 2], np.int32), "INT32")])
    assert raised.value.status() == "StatusCode.UNIMPLEMENTED"
    assert raised.value.message() == "ModelInfer RPC doesn't support models with decoupled transaction policy"


def test_empty_final_response_means_nothing_to_a_unary_call(raw: RawClient) -> None:
    request = simple_request()
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    assert len(raw.infer(request).outputs) == 2


def test_half_close_waits_for_what_is_in_flight(raw: RawClient, signal_files: tuple[Path, Path]) -> None:
    started, go = signal_files
    call = raw.stream([probe_request(started=str(started), wait_for=str(go))])
    eventually(started.exists, "the model runs")
    go.touch()
    assert [message.infer_response.id for message in call] == ["a"]
    assert call.code() == grpc.StatusCode.OK


def test_real_grpc_errors(raw: RawClient) -> None:
    requests: queue.SimpleQueue[object] = queue.SimpleQueue()
    call = raw.stream(
        iter(lambda: requests.get(timeout=WAIT_S), None), metadata=[("triton_grpc_error", "true")]
    )
    requests.put(simple_request(id="good"))
    assert next(call).infer_response.id == "good"
    requests.put(simple_request(model_name="nope"))
    with pytest.raises(grpc.RpcError):
        next(call)
    requests.put(None)
    assert call.code() == grpc.StatusCode.NOT_FOUND
    assert call.details() == "Request for unknown model: 'nope' is not found"


def test_cancelling_a_stream_cancels_its_requests(client: Client, raw: RawClient, tmp_path: Path) -> None:
    started, noticed = tmp_path / "started", tmp_path / "noticed"
    request = probe_request(started=str(started), until_cancelled=str(noticed))
    call = raw.stream([request])
    eventually(started.exists, "the model runs")
    call.cancel()
    eventually(noticed.exists, "the model sees that its request is cancelled")
    probe(client)


def test_garbage_on_a_stream(raw: RawClient) -> None:
    call = raw.stream([b"\xff\xff\xff", simple_request(id="good").SerializeToString()])
    first, second = call
    assert first.error_message.startswith("the request message is malformed")
    assert (second.error_message, second.infer_response.id) == ("", "good")


def probe_request(**orders: str) -> service_pb2.ModelInferRequest:
    """A request for the probe model."""
    request = service_pb2.ModelInferRequest(model_name="probe", id="a", raw_input_contents=[b"\0" * 4])
    request.inputs.add(name="IN", datatype="FP32", shape=[1, 1])
    for key, value in orders.items():
        request.parameters[key].string_param = value
    return request


def stream(raw: RawClient, requests: list[object]) -> list[service_pb2.ModelStreamInferResponse]:
    """Sends requests on a stream, half-closes it and gives everything that came."""
    return list(raw.stream(requests))
