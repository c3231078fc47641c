"""However a request ends that uses regions, nothing of it stays in use."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.raw_http import raw_http, request
from tests.support.server_fixtures import LOAD_ALL, server_fixture
from tests.support.servers import (
    EXAMPLES,
    WAIT_S,
    RawClient,
    ServerProcess,
    client_of,
    eventually,
    past_deadline,
    serving_process,
    write_probe,
    write_steps,
)
from tests.support.sharing import SharedObject, in_region, mapped, shared_object
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

# pytest keeps logged exceptions, and with them requests and their regions, in its own process.
pytestmark = pytest.mark.process

SIZE = 64 * 1024
Client: TypeAlias = triton.InferenceServerClient


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("ends")
    write_probe(repository)
    write_probe(
        repository,
        "batched",
        "dynamic_batching { preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 500000 }",
    )
    write_steps(repository)
    return repository


server = server_fixture(EXAMPLES, flags=LOAD_ALL, process=True)


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with client_of(server) as client:
        yield client
        client.unregister_system_shared_memory()


@pytest.fixture
def memory(client: Client, server: ServerProcess) -> Iterator[SharedObject]:
    """An object that is registered as region `r`, and must not be in use after the test."""
    with shared_object(SIZE) as memory:
        client.register_system_shared_memory("r", memory.key, SIZE)
        yield memory
        client.unregister_system_shared_memory("r")
        eventually(lambda: not mapped(server, memory), "the server has let go")


def lying(name: str = "IN", datatype: str = "FP32") -> triton.InferInput:
    made = triton.InferInput(name, [1, 4] if datatype == "FP32" else [1], datatype)
    made.set_shared_memory("r", 16 if datatype == "FP32" else 4)
    return made


def placed(name: str = "OUT", offset: int = 4096) -> triton.InferRequestedOutput:
    made = triton.InferRequestedOutput(name)
    made.set_shared_memory("r", 16, offset)
    return made


def refusal(call: Any, *arguments: Any, **more: Any) -> str:
    with pytest.raises(InferenceServerException) as raised:
        call(*arguments, **more)
    return str(raised.value.status()).removeprefix("StatusCode.")


@pytest.mark.parametrize(
    "order",
    [{"error": "NOT_FOUND"}, {"do": "raise"}, {"do": "too few"}, {"do": "no list"}, {"do": "no response"}],
)
def test_a_model_that_fails(client: Client, memory: SharedObject, order: dict[str, str]) -> None:
    assert refusal(client.infer, "probe", [lying()], outputs=[placed()], parameters=order)


def test_a_deadline(client: Client, memory: SharedObject, tmp_path: Path) -> None:
    begun, cancelled = tmp_path / "begun", tmp_path / "cancelled"
    order = {"started": str(begun), "until_cancelled": str(cancelled)}

    def late(seconds: float) -> None:
        with suppress(InferenceServerException):  # or the model's answer comes a moment before it
            client.infer("probe", [lying()], outputs=[placed()], parameters=order, client_timeout=seconds)

    past_deadline(late, begun.exists)
    eventually(cancelled.exists, "the model learns of it")


def test_requests_that_are_cancelled_in_the_queue(client: Client, memory: SharedObject) -> None:
    calls = [
        client.async_infer("batched", [lying()], lambda result, error: None, outputs=[placed()])
        for _ in range(3)
    ]
    for call in calls:
        call.cancel()


def test_a_model_that_is_unloaded_while_requests_wait(
    client: Client, memory: SharedObject, tmp_path: Path
) -> None:
    started, go = tmp_path / "started", tmp_path / "go"
    order = {"started": str(started), "wait_for": str(go)}
    with ThreadPoolExecutor(2) as pool:
        ask = partial(client.infer, "probe", [lying()], outputs=[placed()], client_timeout=WAIT_S)
        running = pool.submit(ask, parameters=order)
        eventually(started.exists, "the model runs")
        waiting = pool.submit(ask)
        client.unload_model("probe")
        go.touch()
        running.result()
        try:
            waiting.result()
        except InferenceServerException as error:
            assert "UNAVAILABLE" in str(error.status()) or "NOT_FOUND" in str(error.status())
    eventually(lambda: not client.is_model_ready("probe"), "it is unloaded")
    assert refusal(client.infer, "probe", [lying()], outputs=[placed()]) in ("UNAVAILABLE", "NOT_FOUND")
    client.load_model("probe")
    client.infer("probe", [lying()], outputs=[placed()])


def test_a_stream_that_is_left(memory: SharedObject, tmp_path: Path, server: ServerProcess) -> None:
    cancelled = tmp_path / "cancelled"
    message = service_pb2.ModelInferRequest(model_name="steps")
    message.parameters["steps"].string_param = f"generate:{cancelled}"
    in_region(message.inputs.add(name="IN", datatype="INT32", shape=[1]).parameters, "r", 4)
    in_region(message.outputs.add(name="OUT").parameters, "r", 16, 4096)
    with closing(RawClient(server.address)) as leaving:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(leaving.channel)
        stream = stub.ModelStreamInfer(iter([message, message]))
        for _ in range(3):
            assert not next(stream).error_message
        stream.cancel()
    eventually(cancelled.exists, "the model learns of it")


@pytest.mark.parametrize("steps", ["ok okfinal", "final", "errfinal", "empty ok final"])
def test_decoupled_answers_that_do_not_fit_the_protocol(
    client: Client, memory: SharedObject, server: ServerProcess, steps: str
) -> None:
    assert refusal(
        client.infer, "steps", [lying(datatype="INT32")], outputs=[placed()], parameters={"steps": steps}
    )
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 4}
    body = {
        "inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "parameters": place}],
        "outputs": [{"name": "OUT", "parameters": {**place, "shared_memory_offset": 64}}],
        "parameters": {"steps": steps},
    }
    with raw_http(server.http_address) as raw:
        raw.send(request("POST", "/v2/models/steps/infer", json.dumps(body).encode()))
        answer = raw.response()
    assert answer is not None and answer.status >= 400


def test_a_server_that_stops_answers_first(repository: Path, tmp_path: Path) -> None:
    """Responses in flight are written to their places, over both protocols; then the server ends as ever."""
    go = tmp_path / "go"
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
    body = {
        "inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 4], "parameters": place}],
        "outputs": [{"name": "OUT", "parameters": {**place, "shared_memory_offset": 8192}}],
        "parameters": {"started": str(tmp_path / "rest"), "wait_for": str(go)},
    }
    with shared_object(SIZE) as memory, serving_process(repository) as server:
        memory.write(np.full(4, 9, np.float32))
        with client_of(server) as client, raw_http(server.http_address) as raw, ThreadPoolExecutor(1) as pool:
            client.register_system_shared_memory("r", memory.key, SIZE)
            running = pool.submit(
                client.infer,
                "probe",
                [lying()],
                outputs=[placed()],
                parameters={"started": str(tmp_path / "grpc"), "wait_for": str(go)},
                client_timeout=WAIT_S,
            )
            eventually((tmp_path / "grpc").exists, "the model runs")
            raw.send(request("POST", "/v2/models/batched/infer", json.dumps(body).encode()))
            eventually((tmp_path / "rest").exists, "the other model runs")
            server.signal(signal.SIGTERM)
            eventually(lambda: not ready(client), "the server drains")
            go.touch()
            running.result()
            answer = raw.response()
        assert answer is not None and answer.status == 200
        assert server.wait() == 0
        for offset in (4096, 8192):
            assert memory.read(4, offset).tolist() == [9] * 4


def ready(client: Client) -> bool:
    try:
        return bool(client.is_server_ready())
    except InferenceServerException:
        return False
