"""Decoupled models: unary calls, cancellation, statistics, and being replaced."""

from __future__ import annotations

import queue
import signal
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.grpc_transports import each_transport
from tests.support.server_fixtures import LOAD_ALL, server_fixture
from tests.support.servers import (
    WAIT_S,
    AnyServer,
    RawClient,
    client_of,
    eventually,
    past_deadline,
    serving_process,
    write_steps,
)
from tritonclient.grpc import service_pb2

UNARY_ERROR = "ModelInfer RPC doesn't support models with decoupled transaction policy"
PARAMETERS = {"text": "ä", "yes": True}

grpc_transport = each_transport()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("decoupled")
    write_steps(repository)
    return repository


server = server_fixture(flags=[*LOAD_ALL, "--disable-auto-complete-config"], placed=True)


def steps(*names: str, model: str = "steps", **fields: Any) -> Any:
    """A request that has the model take some steps."""
    request = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[b"\0" * 4], **fields)
    request.inputs.add(name="IN", datatype="INT32", shape=[1])
    request.parameters["steps"].string_param = " ".join(names)
    return request


def unary(raw: RawClient, *names: str) -> Any:
    return raw.infer(steps(*names, id="r"))


def number(response: Any) -> int:
    return int.from_bytes(response.raw_output_contents[0], "little")


def parameters(response: Any) -> dict[str, Any]:
    return {
        key: getattr(value, value.WhichOneof("parameter_choice"))
        for key, value in response.parameters.items()
    }


def statistics(raw: RawClient, model: str = "steps") -> Any:
    (stats,) = raw("ModelStatistics", service_pb2.ModelStatisticsRequest(name=model)).model_stats
    return stats


@pytest.mark.parametrize("names", [("ok", "final"), ("okfinal",), ("later", "ok", "final")])
def test_a_unary_call_gets_the_only_response(raw: RawClient, names: tuple[str, ...]) -> None:
    response = unary(raw, *names)
    sent = next(index for index, name in enumerate(names) if name.startswith("ok"))
    sent -= names[0] == "later"
    assert (response.id, response.model_name, response.model_version) == ("r", "steps", "1")
    assert [output.name for output in response.outputs] == ["OUT"]
    assert number(response) == sent
    assert parameters(response) == {"n": sent, **PARAMETERS}


def test_a_unary_call_gets_an_empty_response_too(raw: RawClient) -> None:
    response = unary(raw, "empty", "final")
    assert (response.id, len(response.outputs)) == ("r", 0)


@pytest.mark.parametrize(
    "names",
    [("final",), ("ok", "ok", "final"), ("ok", "okfinal"), ("later", "final"), ("ok", "empty", "final")],
)
def test_a_unary_call_with_another_number_of_responses(raw: RawClient, names: tuple[str, ...]) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        unary(raw, *names)
    assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.UNIMPLEMENTED, UNARY_ERROR)


@pytest.mark.parametrize(
    "names", [("errfinal",), ("err", "final"), ("ok", "err", "final"), ("ok", "errfinal")]
)
def test_a_unary_call_whose_model_answers_with_an_error(raw: RawClient, names: tuple[str, ...]) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        unary(raw, *names)
    assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.NOT_FOUND, "told to")


@pytest.mark.parametrize("names", [("ok", "ok"), ("err",)])
def test_a_model_need_not_go_on_for_a_unary_call(
    raw: RawClient, tmp_path: Path, names: tuple[str, ...]
) -> None:
    stopped = tmp_path / "stopped"
    with pytest.raises(grpc.RpcError):
        unary(raw, *names, f"generate:{stopped}", "final")
    eventually(stopped.exists, "the model stops")
    eventually(lambda: unary(raw, "okfinal"), "it serves others")


def test_a_unary_call_that_is_cancelled(raw: RawClient, tmp_path: Path) -> None:
    begun, noticed = tmp_path / "begun", tmp_path / "noticed"
    request = steps("ok", f"touch:{begun}", f"cancelled:{noticed}", "final")
    call = raw.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    future = call.future(request.SerializeToString(), timeout=WAIT_S)
    eventually(begun.exists, "the model runs")
    future.cancel()
    eventually(noticed.exists, "the model sees it")
    unary(raw, "okfinal")


def test_a_generation_stops_when_its_stream_is_cancelled(raw: RawClient, tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    before = statistics(raw)
    call = raw.stream([steps(f"generate:{stopped}", "final")])
    for _ in range(5):
        assert next(call).error_message == ""
    assert not stopped.exists()
    call.cancel()
    eventually(stopped.exists, "the model stops")
    unary(raw, "okfinal")  # one instance: the last of the generation has been counted
    after = statistics(raw)
    assert after.inference_stats.fail.count == before.inference_stats.fail.count + 1
    assert after.inference_stats.success.count == before.inference_stats.success.count + 1
    cancelled = [sum(row.cancel.count for row in s.response_stats.values()) for s in (before, after)]
    assert cancelled[1] > cancelled[0]


def test_a_half_closed_stream_is_not_cancelled(raw: RawClient, tmp_path: Path) -> None:
    go = tmp_path / "go"
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    call = raw.stream(iter(lambda: requests.get(timeout=WAIT_S), None))
    requests.put(steps("ok", f"wait:{go}", "is_cancelled", "final"))
    assert number(next(call).infer_response) == 0
    requests.put(None)
    # The half-close is on its way; a call behind it on the same connection says when it has come.
    assert raw("ServerLive", service_pb2.ServerLiveRequest()).live
    go.touch()
    assert [number(message.infer_response) for message in call] == [0]
    assert call.code() == grpc.StatusCode.OK


def test_a_model_sees_that_a_deadline_has_passed(raw: RawClient, tmp_path: Path) -> None:
    noticed = tmp_path / "noticed"
    answers: list[Any] = []

    def late(seconds: float) -> Any:
        call = raw.stream([steps("ok", f"cancelled:{noticed}", "final")], timeout_s=seconds)
        with suppress(grpc.RpcError):
            answers.append(next(call))
        return call

    call = past_deadline(late, lambda: answers)
    assert answers[0].error_message == ""
    # The model may see it first and end the request before gRPC ends the stream.
    with suppress(grpc.RpcError):
        assert list(call) == []
    assert call.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.OK)
    eventually(noticed.exists, "the model sees it")


def test_response_parameters_on_a_stream(raw: RawClient) -> None:
    messages = list(raw.stream([steps("ok", "okfinal")]))
    assert [parameters(message.infer_response) for message in messages] == [
        {"n": 0, **PARAMETERS, "triton_final_response": False},
        {"n": 1, **PARAMETERS, "triton_final_response": True},
    ]


def test_statistics(raw: RawClient, server: AnyServer, repository: Path) -> None:
    write_steps(repository, "counted")
    with client_of(server) as client:
        client.load_model("counted")
    for names in (("ok", "ok", "final"), ("okfinal",), ("empty", "err", "final"), ("final",)):
        list(raw.stream([steps(*names, model="counted")]))
    stats = eventually(
        lambda: (s := statistics(raw, "counted")).inference_stats.success.count == 3 and s, "all is counted"
    )
    assert (stats.inference_count, stats.execution_count, stats.inference_stats.fail.count) == (3, 4, 1)
    kinds = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")
    counts = {
        index: {kind: n for kind in kinds if (n := getattr(row, kind).count)}
        for index, row in stats.response_stats.items()
    }
    assert counts == {
        "0": {"compute_infer": 4, "compute_output": 2, "success": 2, "empty_response": 2},
        "1": {"compute_infer": 2, "compute_output": 2, "success": 1, "fail": 1},
        "2": {"compute_infer": 2, "empty_response": 2},
    }
    first = stats.response_stats["0"]
    assert first.compute_infer.ns > first.empty_response.ns > 0 and first.compute_output.ns > 0
    done = first.success.ns + first.empty_response.ns
    assert done == first.compute_infer.ns + first.compute_output.ns
    assert [(row.batch_size, row.compute_infer.count) for row in stats.batch_stats] == [(1, 4)]
    plain = statistics(raw)
    assert plain.name == "steps"


@pytest.mark.parametrize("reload", [True, False], ids=["reload", "unload"])
def test_a_replaced_model_goes_on_until_its_last_response(
    raw: RawClient, server: AnyServer, repository: Path, tmp_path: Path, reload: bool
) -> None:
    name, finalized, go = f"replaced{reload}", tmp_path / "finalized", tmp_path / "go"
    write_steps(repository, name, finalized)
    with client_of(server) as client:
        client.load_model(name)
        call = raw.stream([steps("ok", "later", f"wait:{go}", "ok", "final", model=name)])
        assert number(next(call).infer_response) == 0
        if reload:
            write_steps(repository, name, tmp_path / "other")
            client.load_model(name)
            assert number(raw.infer(steps("okfinal", model=name))) == 0
        else:
            client.unload_model(name)
            with pytest.raises(grpc.RpcError):
                raw.infer(steps("okfinal", model=name))
            (entry,) = [m for m in client.get_model_repository_index().models if m.name == name]
            assert entry.state == "UNLOADING"
        assert not finalized.exists()
        go.touch()
        assert [number(message.infer_response) for message in call] == [1]
        eventually(finalized.exists, "the old version is finalized")
        if reload:
            client.unload_model(name)

        def unloaded() -> bool:
            states = [(m.name, m.state) for m in client.get_model_repository_index().models]
            return (name, "UNAVAILABLE") in states

        eventually(unloaded, "it is unloaded")


@pytest.mark.process
def test_a_server_that_stops_lets_a_generation_finish(
    tmp_path: Path, placement: str, grpc_transport: str
) -> None:
    finalized, go, begun = tmp_path / "finalized", tmp_path / "go", tmp_path / "begun"
    repository = tmp_path / "models"
    write_steps(repository, finalized=finalized)
    with serving_process(repository, flags=[placement]) as server, closing(RawClient(server.address)) as raw:
        request = steps("ok", "later", f"touch:{begun}", f"wait:{go}", "ok", "final")
        call = raw.stream([request])
        assert number(next(call).infer_response) == 0
        eventually(begun.exists, "the thread runs")
        server.signal(signal.SIGTERM)
        eventually(lambda: "Waiting for in-flight" in server.errors, "it stops")
        assert not finalized.exists()
        go.touch()
        assert number(next(call).infer_response) == 2
        assert server.wait() == 0
    assert finalized.exists()


def test_tritonclient(server: AnyServer) -> None:
    tensor = triton.InferInput("IN", [1], "INT32")
    tensor.set_data_from_numpy(np.zeros(1, np.int32))
    with client_of(server) as client:
        result = client.infer("steps", [tensor], parameters={"steps": "ok final"})
        assert result.as_numpy("OUT").tolist() == [0]
