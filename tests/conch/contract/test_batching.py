"""Dynamic batching as clients see it: order, ragged and padded requests, full queues."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.support.contract_server import REPEATER, REPEATER_CONFIG
from tests.support.onnx_graphs import MEAN, RAGGED
from tests.support.server_fixtures import server_fixture
from tests.support.servers import (
    WAIT_S,
    AnyServer,
    RawClient,
    client_of,
    eventually,
    tensor,
    write_model,
    write_probe,
)
from tritonclient.grpc import InferenceServerClient as Client
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

RAGGED_CONFIG = """
    backend: "onnxruntime"
    max_batch_size: 8
    input { name: "A" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
    output { name: "COLUMN" data_type: TYPE_FP32 dims: [ 1 ] }
    output { name: "DOUBLE" data_type: TYPE_FP32 dims: [ -1 ] }
    batch_input { kind: BATCH_ELEMENT_COUNT target_name: "COUNTS" data_type: TYPE_INT32 source_input: "A" }
    batch_output { target_name: "DOUBLE" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "A" }
    dynamic_batching { preferred_batch_size: [ 3 ] max_queue_delay_microseconds: 600000000 }
"""
PADDING = {
    "inputs": {
        "A": {
            "axis": 0,
            "to": [4, 16],
            "value": 100,
            "mask": "MASK",
            "lengths": {"name": "LENGTHS", "dims": [1]},
        }
    },
    "outputs": {"CENTRED": {"axis": 0, "like": "A"}},
}
PADDED_CONFIG = f"""
    max_batch_size: 8
    dynamic_batching {{ preferred_batch_size: [ 3 ] max_queue_delay_microseconds: 600000000 }}
    parameters {{ key: "CONCH_PADDING" value {{ string_value: '{json.dumps(PADDING)}' }} }}
"""
BOUND = 8
TWO_INSTANCES = "instance_group { count: 2 kind: KIND_CPU }"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("batching")
    write_probe(repository, "ordered", f"dynamic_batching {{ preserve_ordering: true }} {TWO_INSTANCES}")
    write_probe(repository, "eager", "dynamic_batching { } optimization { eager_batching: true }")
    for name in ("default", "fresh"):
        write_probe(repository, name)
    for name, size in (("many", 3), ("any", 0)):
        bound = f'parameters {{ key: "CONCH_MAX_QUEUE_SIZE" value {{ string_value: "{size}" }} }}'
        write_probe(repository, name, f"dynamic_batching {{ }} {bound}")
    policy = "default_queue_policy { max_queue_size: 1 }"
    write_probe(repository, "policy", f"dynamic_batching {{ {policy} }}")
    ordered = f"dynamic_batching {{ preserve_ordering: true }} {TWO_INSTANCES}"
    write_model(repository, "repeater", REPEATER_CONFIG + ordered, {"model.py": REPEATER})
    write_model(repository, "ragged", RAGGED_CONFIG, {"model.onnx": RAGGED})
    write_model(repository, "padded", PADDED_CONFIG, {"model.onnx": MEAN})
    return repository


batching = server_fixture(flags=[f"--max-queue-size={BOUND}"])
"""A server of models that batch."""


@pytest.fixture
def client(batching: AnyServer) -> Iterator[Client]:
    with client_of(batching) as client:
        yield client


@pytest.fixture
def raw(batching: AnyServer) -> Iterator[RawClient]:
    with closing(RawClient(batching.address)) as raw:
        yield raw


def inferences(client: Client, model: str) -> int:
    (stats,) = client.get_inference_statistics(model).model_stats
    return int(stats.inference_count)


def probe_request(model: str, **parameters: str) -> Any:
    """A request for a probe model."""
    request = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[b"\0" * 4])
    request.inputs.add(name="IN", datatype="FP32", shape=[1, 1])
    for key, value in parameters.items():
        request.parameters[key].string_param = value
    return request


def send(raw: RawClient, request: Any) -> Any:
    """Starts a call; its result can be waited for."""
    return raw.channel.unary_unary(
        "/inference.GRPCInferenceService/ModelInfer",
        request_serializer=service_pb2.ModelInferRequest.SerializeToString,
        response_deserializer=service_pb2.ModelInferResponse.FromString,
    ).future(request, timeout=WAIT_S)


class Blocked:
    """A model whose only instance runs a request until it is let go."""

    def __init__(self, raw: RawClient, model: str, files: tuple[Path, Path]) -> None:
        started, self._go = files
        self.call = send(raw, probe_request(model, started=str(started), wait_for=str(self._go)))
        eventually(started.exists, "the model runs")

    def let_go(self) -> None:
        self._go.touch()
        self.call.result()


@pytest.fixture
def block(raw: RawClient, signal_files: tuple[Path, Path]) -> Iterator[Callable[[str], Blocked]]:
    """Blocks a model until the test lets it go, or ends."""
    with ExitStack() as stack:

        def block(model: str) -> Blocked:
            blocked = Blocked(raw, model, signal_files)
            stack.callback(blocked.let_go)
            return blocked

        yield block


class TestOrder:
    def test_a_response_waits_for_that_of_an_earlier_request(
        self, client: Client, raw: RawClient, block: Callable[[str], Blocked]
    ) -> None:
        blocked = block("ordered")
        before = inferences(client, "ordered")
        calls = [send(raw, probe_request("ordered", **orders)) for orders in ({}, {"error": "CANCELLED"})]
        eventually(lambda: inferences(client, "ordered") > before, "the second instance has answered")
        assert not any(call.done() for call in calls)
        blocked.let_go()
        assert calls[0].result().model_name == "ordered"
        assert calls[1].code() is grpc.StatusCode.CANCELLED

    def test_a_cancelled_request_holds_nobody_up(
        self, raw: RawClient, block: Callable[[str], Blocked], tmp_path: Path
    ) -> None:
        blocked = block("ordered")
        started = tmp_path / "second"
        seen = tmp_path / "seen"
        orders = {"started": str(started), "until_cancelled": str(seen)}
        cancelled = send(raw, probe_request("ordered", **orders))
        eventually(started.exists, "both instances are busy")
        waiting = send(raw, probe_request("ordered"))
        cancelled.cancel()
        eventually(seen.exists, "the model has seen that it is cancelled")
        blocked.let_go()
        assert waiting.result().model_name == "ordered"

    def test_decoupled_responses_do_not_mix(self, client: Client) -> None:
        arrived: list[tuple[str, int]] = []
        finals: list[str] = []

        def keep(result: Any, error: Any) -> None:
            assert error is None, error
            response = result.get_response()
            if result.as_numpy("OUT") is not None:
                arrived.append((response.id, int(result.as_numpy("OUT")[0])))
            if response.parameters["triton_final_response"].bool_param:
                finals.append(response.id)

        client.start_stream(keep)
        for number in range(6):
            values = np.arange(50, dtype=np.int32)
            client.async_stream_infer(
                "repeater",
                [tensor("IN", values, "INT32")],
                request_id=str(number),
                enable_empty_final_response=True,
            )
        eventually(lambda: len(finals) == 6, "all are answered")
        client.stop_stream()
        assert arrived == [(str(number), value) for number in range(6) for value in range(50)]


def infer_three(client: Client, model: str) -> list[Any]:
    """Requests of one, two and three elements, which run as one batch."""
    answers: dict[int, Any] = {}
    for count in (1, 2, 3):
        values = np.arange(count, dtype=np.float32).reshape(1, count)

        def keep(result: Any, error: Any, count: int = count) -> None:
            answers[count] = (result, error)

        client.async_infer(model, [tensor("A", values)], keep)
    eventually(lambda: len(answers) == 3, "all are answered")
    assert not any(error for _, error in answers.values()), answers
    return [answers[count][0] for count in (1, 2, 3)]


def batches(client: Client, model: str) -> dict[int, int]:
    """Executions by batch size."""
    (stats,) = client.get_inference_statistics(model).model_stats
    return {row.batch_size: row.compute_infer.count for row in stats.batch_stats}


def test_ragged_requests_share_a_batch(client: Client) -> None:
    results = infer_three(client, "ragged")
    assert [result.as_numpy("COLUMN").tolist() for result in results] == [[[1]], [[2]], [[3]]]
    assert [result.as_numpy("DOUBLE").tolist() for result in results] == [[[0]], [[0, 2]], [[0, 2, 4]]]
    assert batches(client, "ragged") == {3: 1}
    metadata = client.get_model_metadata("ragged")
    assert [tensor.name for tensor in metadata.inputs] == ["A"]


class TestPadding:
    def test_padded_requests_share_a_batch(self, client: Client) -> None:
        results = infer_three(client, "padded")
        assert [result.as_numpy("MEAN").tolist() for result in results] == [[[0]], [[0.5]], [[1]]]
        assert [result.as_numpy("CENTRED").tolist() for result in results] == [
            [[0]],
            [[-0.5, 0.5]],
            [[-1, 0, 1]],
        ]
        assert batches(client, "padded") == {3: 1}

    def test_clients_do_not_see_what_the_server_makes(self, client: Client) -> None:
        metadata = client.get_model_metadata("padded")
        assert [(tensor.name, list(tensor.shape)) for tensor in metadata.inputs] == [("A", [-1, -1])]
        values = np.zeros((1, 2), np.float32)
        with pytest.raises(InferenceServerException, match="unexpected inference input 'MASK'"):
            client.infer("padded", [tensor("A", values), tensor("MASK", np.ones((1, 2), np.int64), "INT64")])

    def test_too_long(self, client: Client) -> None:
        with pytest.raises(InferenceServerException) as raised:
            client.infer("padded", [tensor("A", np.zeros((1, 17), np.float32))], request_id="r")
        assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
        assert raised.value.message() == (
            "[request id: r] input 'A' for model 'padded' is too long: its dimension 1 is 17, the longest "
            "the model is padded to is 16"
        )


def fill(raw: RawClient, model: str, size: int) -> tuple[list[Any], Any]:
    """Fills the queue of a model that is blocked; the calls that wait, and the one that was refused."""
    calls = [send(raw, probe_request(model)) for _ in range(size + 1)]
    eventually(lambda: any(call.done() for call in calls), "one is refused")
    (refused,) = (call for call in calls if call.done())
    return [call for call in calls if call is not refused], refused


class TestFullQueues:
    @pytest.mark.parametrize(("model", "size"), [("default", BOUND), ("many", 3)])
    def test_one_more_is_refused_and_told_when_to_come_back(
        self, raw: RawClient, block: Callable[[str], Blocked], model: str, size: int
    ) -> None:
        blocked = block(model)
        waiting, refused = fill(raw, model, size)
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.details() == (
            f"{size} requests are waiting, the most the model's queue takes; "
            f"retry after a pause, a longer one each time"
        )
        trailing = dict(refused.trailing_metadata())
        assert 1 <= int(trailing["grpc-retry-pushback-ms"]) <= 10_000
        assert 1 <= int(trailing["retry-after"]) <= 10
        blocked.let_go()
        assert all(call.result().model_name == model for call in waiting)

    def test_a_queue_policy_has_tritons_text_and_a_hint_as_well(
        self, raw: RawClient, block: Callable[[str], Blocked]
    ) -> None:
        block("policy")
        _, refused = fill(raw, "policy", 1)
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        assert refused.details() == "Exceeds maximum queue size"
        assert "grpc-retry-pushback-ms" in dict(refused.trailing_metadata())

    def test_no_bound(self, raw: RawClient, block: Callable[[str], Blocked]) -> None:
        blocked = block("any")
        waiting = [send(raw, probe_request("any")) for _ in range(50)]
        blocked.let_go()
        assert all(call.result().model_name == "any" for call in waiting)

    @pytest.mark.parametrize("real_errors", [False, True])
    def test_streams(self, raw: RawClient, block: Callable[[str], Blocked], real_errors: bool) -> None:
        block("default")
        waiting, _ = fill(raw, "default", BOUND)
        call = raw.stream(
            [probe_request("default")], metadata=(("triton_grpc_error", "true"),) if real_errors else None
        )
        if real_errors:
            with pytest.raises(grpc.RpcError):
                next(call)
            assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "grpc-retry-pushback-ms" in dict(call.trailing_metadata())
        else:
            (message,) = call
            assert f"{BOUND} requests are waiting" in message.error_message
            assert 1 <= message.infer_response.parameters["retry_after_ms"].int64_param <= 10_000
        # Also keeps them: gRPC cancels calls that are let go, which makes room in the queue.
        assert not any(call.done() for call in waiting)

    def test_a_client_with_a_retry_policy_waits_for_so_long(
        self, batching: AnyServer, raw: RawClient, block: Callable[[str], Blocked]
    ) -> None:
        """gRPC itself waits for the time that the server names, not for that of its policy."""
        block("fresh")
        waiting, refused = fill(raw, "fresh", BOUND)
        # The duration of a model's batches is not known before the first one has finished.
        assert ("grpc-retry-pushback-ms", "1000") in refused.trailing_metadata()
        policy = {
            "methodConfig": [
                {
                    "name": [{}],
                    "retryPolicy": {
                        "maxAttempts": 2,
                        "initialBackoff": "0.001s",
                        "maxBackoff": "0.001s",
                        "backoffMultiplier": 1,
                        "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
                    },
                }
            ]
        }
        options = [("grpc.service_config", json.dumps(policy)), ("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(batching.address, options) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            start = time.monotonic()
            with pytest.raises(grpc.RpcError) as raised:
                call(probe_request("fresh").SerializeToString(), timeout=WAIT_S)
            spent_s = time.monotonic() - start
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert spent_s >= 0.95
        assert not any(each.done() for each in waiting)


def test_eager_batching_is_accepted(client: Client, raw: RawClient, block: Callable[[str], Blocked]) -> None:
    blocked = block("eager")
    config = client.get_model_config("eager").config
    assert config.optimization.eager_batching
    waiting = [send(raw, probe_request("eager")) for _ in range(2)]
    blocked.let_go()
    assert all(call.result().model_name == "eager" for call in waiting)
