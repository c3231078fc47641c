"""A model that has always been fast takes long once: no other model may have to wait for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from tests.support.calls import INFER, STREAM, probe_request
from tests.support.servers import (
    WAIT_S,
    RawClient,
    ServerProcess,
    eventually,
    serving_process,
    write_model,
)
from tritonclient.grpc import service_pb2

SPIKE_S = 3 * WAIT_S
"""The time limit of a spike; what waited for it would be too late."""
_CONFIG = """
    backend: "python"
    input { name: "IN" data_type: TYPE_FP32 dims: [ -1, -1 ] }
    output { name: "OUT" data_type: TYPE_FP32 dims: [ -1, -1 ] }
"""
_MODEL = """
import json
import time
from pathlib import Path
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            if request.parameters() != "{}":
                orders = json.loads(request.parameters())
                Path(orders["started"]).touch()
                deadline = time.monotonic() + 600
                while not Path(orders["wait_for"]).exists() and time.monotonic() < deadline:
                    time.sleep(0.002)
            responses.append(
                pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])
            )
        return responses
"""


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory, grpc_is_warm: None) -> Iterator[ServerProcess]:
    """A server with fast models, of which one has two instances."""
    repository = tmp_path_factory.mktemp("fast")
    for name in ("a", "b"):
        write_model(repository, name, _CONFIG, {"model.py": _MODEL})
    write_model(repository, "two", _CONFIG + "instance_group { count: 2 }", {"model.py": _MODEL})
    with serving_process(repository) as server:
        yield server


def request_for(model: str, **orders: str) -> bytes:
    request = service_pb2.ModelInferRequest.FromString(probe_request(**orders))
    request.model_name = model
    return bytes(request.SerializeToString())


def warm(raw: RawClient, *models: str) -> None:
    """Lets the server find out that models are fast."""
    call = raw.channel.unary_unary(INFER)
    for _ in range(100):
        for model in models:
            call(request_for(model), timeout=WAIT_S)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("spikes", [["a"], ["a", "two"]], ids=["one", "two"])
def test_others_do_not_wait_for_a_spike(
    fast: ServerProcess, tmp_path: Path, spikes: list[str], together: bool
) -> None:
    go = tmp_path / "go"
    with closing(RawClient(fast.address)) as raw:
        call = raw.channel.unary_unary(INFER)
        warm(raw, "a", "b", "two")
        slow = []
        try:
            for model in spikes:
                orders = {"started": str(tmp_path / model), "wait_for": str(go)}
                slow.append(call.future(request_for(model, **orders), timeout=SPIKE_S))
                if not together:
                    eventually((tmp_path / model).exists, "it runs")
            # One after the other, at once, from elsewhere and by other means.
            others = [call.future(request_for("b"), timeout=WAIT_S) for _ in range(20)]
            for future in others:
                assert future.result()
            for _ in range(20):
                assert call(request_for("b"), timeout=WAIT_S)
            live = raw.channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
            assert service_pb2.ServerLiveResponse.FromString(live(b"", timeout=WAIT_S)).live
            with closing(RawClient(fast.address)) as other:
                assert other.channel.unary_unary(INFER)(request_for("b"), timeout=WAIT_S)
                answers = other.channel.stream_stream(STREAM)(iter([request_for("b")] * 5), timeout=WAIT_S)
                assert len(list(answers)) == 5
            assert not any(future.done() for future in slow)
        finally:
            go.touch()
        for future in slow:
            assert future.result(WAIT_S)
        warm(raw, "a", "b", "two")


def test_requests_behind_a_spike_run_on_another_instance(fast: ServerProcess, tmp_path: Path) -> None:
    go, started = tmp_path / "go", tmp_path / "started"
    with closing(RawClient(fast.address)) as raw:
        warm(raw, "two")
        call = raw.channel.unary_unary(INFER)
        try:
            spike = call.future(request_for("two", started=str(started), wait_for=str(go)), timeout=SPIKE_S)
            behind = [call.future(request_for("two"), timeout=WAIT_S) for _ in range(20)]
            for future in behind:
                assert future.result()
            assert not spike.done()
        finally:
            go.touch()
        assert spike.result(WAIT_S)


def test_spikes_again_and_again(fast: ServerProcess, tmp_path: Path) -> None:
    """Under load from several connections, whose requests must each be answered soon."""
    stop = threading.Event()
    failures: list[BaseException] = []
    answered = [0, 0]

    def load(number: int) -> None:
        with closing(RawClient(fast.address)) as raw:
            call = raw.channel.unary_unary(INFER)
            try:
                while not stop.is_set():
                    call(request_for("b"), timeout=WAIT_S)
                    answered[number] += 1
            except BaseException as error:
                failures.append(error)

    def went_on(before: int) -> bool:
        return bool(failures) or sum(answered) >= before + 20

    threads = [threading.Thread(target=load, args=(number,)) for number in range(2)]
    with closing(RawClient(fast.address)) as raw:
        warm(raw, "a", "b", "two")
        for thread in threads:
            thread.start()
        try:
            for number in range(10):
                go = tmp_path / f"go{number}"
                futures = []
                for model in ("a", "two"):
                    started = tmp_path / f"{model}{number}"
                    order = request_for(model, started=str(started), wait_for=str(go))
                    futures.append(raw.channel.unary_unary(INFER).future(order, timeout=SPIKE_S))
                    eventually(started.exists, "it runs")
                before = sum(answered)
                eventually(partial(went_on, before), "load goes on")
                go.touch()
                assert all(future.result(WAIT_S) for future in futures)
        finally:
            stop.set()
            for thread in threads:
                thread.join(WAIT_S)
    assert failures == []
