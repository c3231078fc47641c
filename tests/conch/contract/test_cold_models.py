"""Requests for models that are not in memory, on every way in, while models are evicted under them."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import queue
import random
import signal
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.calling import run, write_callers, write_script
from tests.support.onnx_graphs import ADD_SUB
from tests.support.server_fixtures import server_fixture
from tests.support.servers import WAIT_S, LocalServer, client_of, eventually, tensor, write_model
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.servers import AnyServer

CONFIG = """
    backend: "python"
    input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
    output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
"""
ECHO = """
import time
from pathlib import Path
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        directory = Path(args["model_repository"])
        with (directory / "loads").open("a") as loads:
            loads.write("x")
        while (directory / "held").exists():
            time.sleep(0.005)

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])
            for request in requests
        ]
"""
CHAIN = """
    platform: "ensemble"
    input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
    output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
    ensemble_scheduling {
        step {
            model_name: "one" model_version: -1
            input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "MIDDLE" }
        }
        step {
            model_name: "two" model_version: -1
            input_map { key: "IN" value: "MIDDLE" } output_map { key: "OUT" value: "OUT" }
        }
    }
"""
COMPLETE = """
    backend: "onnxruntime"
    input { name: "A" data_type: TYPE_FP32 dims: [ -1, 2 ] }
    input { name: "B" data_type: TYPE_FP32 dims: [ -1, 2 ] }
    output { name: "SUM" data_type: TYPE_FP32 dims: [ -1, 2 ] }
"""
INPUTS = [tensor("IN", np.array([7], np.float32))]
BODY: dict[str, Any] = {"inputs": [{"name": "IN", "shape": [1], "datatype": "FP32", "data": [7]}]}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cold")
    for name in ("one", "two", "three"):
        write_model(directory, name, CONFIG, {"model.py": ECHO})
    write_model(directory, "chain", CHAIN, {})
    patient = "sequence_batching { max_sequence_idle_microseconds: 600000000 }"
    write_model(directory, "sequences", CONFIG + patient, {"model.py": ECHO})
    write_callers(directory)
    worker = 'parameters { key: "CONCH_PLACEMENT" value { string_value: "worker" } }'
    write_script(directory, "worker", worker)
    return directory


server = server_fixture(
    flags=(
        "--model-control-mode=on-demand",
        "--resident-models=4",
        "--min-resident-secs=0.2",
        "--cold-start-timeout=300",  # many wait for their turn, perhaps on a busy machine
    )
)


def loads_of(repository: Path, name: str) -> int:
    path = repository / name / "loads"
    return len(path.read_text()) if path.exists() else 0


def index_of(client: triton.InferenceServerClient) -> list[dict[str, str]]:
    index: list[dict[str, str]] = client.get_model_repository_index(as_json=True)["models"]
    return index


def make_cold(client: triton.InferenceServerClient, *names: str) -> None:
    for name in names:
        client.unload_model(name)

    def cold() -> bool:
        reasons = {line["name"]: line.get("reason") for line in index_of(client)}
        return all(reasons[name] == "not resident" for name in names)

    eventually(cold, "the models have left memory")


def unary(server: AnyServer, name: str) -> float:
    with client_of(server) as client:
        return float(client.infer(name, INPUTS, client_timeout=WAIT_S).as_numpy("OUT")[0])


def stream(server: AnyServer, name: str) -> float:
    """Three requests, of which the last are for another model: the order stays."""
    answers: queue.Queue[Any] = queue.Queue()
    with client_of(server) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        for number, each in enumerate((name, "three", name)):
            client.async_stream_infer(each, INPUTS, request_id=str(number))
        found = [answers.get(timeout=WAIT_S) for _ in range(3)]
        client.stop_stream()
    assert [each.get_response().id for each in found] == ["0", "1", "2"]
    return float(found[0].as_numpy("OUT")[0])


def ensemble(server: AnyServer, name: str) -> float:
    return unary(server, "chain")


def sequence(server: AnyServer, name: str) -> float:
    """Three requests of a sequence, with one for another model between them: its model stays."""
    number = next(_sequences)
    with client_of(server) as client:
        for place in range(3):
            answer = client.infer(
                "sequences",
                INPUTS,
                sequence_id=number,
                sequence_start=place == 0,
                sequence_end=place == 2,
                client_timeout=WAIT_S,
            )
            unary(server, name)
    return float(answer.as_numpy("OUT")[0])


_sequences = itertools.count(1)


def over_http(server: AnyServer, path: str, body: Any = None) -> httpx.Response:
    url = f"http://{server.http_address}/v2/models/{path}"
    answer = httpx.get(url, timeout=WAIT_S) if body is None else httpx.post(url, json=body, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    return answer


def http(server: AnyServer, name: str) -> float:
    return float(over_http(server, f"{name}/infer", BODY).json()["outputs"][0]["data"][0])


def version(server: AnyServer, name: str) -> float:
    return float(over_http(server, f"{name}/versions/1/infer", BODY).json()["outputs"][0]["data"][0])


def generate(server: AnyServer, name: str) -> float:
    return float(over_http(server, f"{name}/generate", {"IN": 7}).json()["OUT"])


def metadata(server: AnyServer, name: str) -> float:
    with client_of(server) as client:
        make_cold(client, name)
        assert client.get_model_metadata(name).versions == ["1"]
        make_cold(client, name)
        assert client.get_model_config(name).config.name == name
        make_cold(client, name)
    assert over_http(server, name).json()["versions"] == ["1"]
    return http(server, name)


def bls(server: AnyServer, name: str, model: str = "script") -> float:
    with client_of(server) as client:
        return float(run(client, f"result = shown(call('{name}', 7).exec())", model)[2:-2])


def bls_of_a_worker(server: AnyServer, name: str) -> float:
    return bls(server, name, "worker")


def bls_of_a_coroutine(server: AnyServer, name: str) -> float:
    with client_of(server) as client:
        code = f"return shown(await call('{name}', 7).async_exec())"
        return float(run(client, code, "coroutine")[2:-2])


def program(server: AnyServer, name: str) -> float:
    assert isinstance(server, LocalServer)
    return float(server.server.infer(name, {"IN": [7]}, timeout=WAIT_S)["OUT"][0])


def program_stream(server: AnyServer, name: str) -> float:
    assert isinstance(server, LocalServer)
    (result,) = server.server.stream(name, {"IN": [7]}, timeout=WAIT_S)
    return float(result["OUT"][0])


def program_async(server: AnyServer, name: str) -> float:
    assert isinstance(server, LocalServer)
    embedded = server.server

    async def ask() -> float:
        return float((await embedded.infer_async(name, {"IN": [7]}, timeout=WAIT_S))["OUT"][0])

    return asyncio.run(ask())


def test_a_complete_config_answers_without_a_load(server: AnyServer, repository: Path) -> None:
    write_model(repository, "added", COMPLETE, {"model.onnx": ADD_SUB})

    def answers_of(client: triton.InferenceServerClient) -> list[Any]:
        return [
            client.get_model_metadata("added"),
            client.get_model_config("added"),
            over_http(server, "added").json(),
            over_http(server, "added/versions/1/config").json(),
        ]

    with client_of(server) as client:
        client.get_model_repository_index()  # a listing finds it
        cold = answers_of(client)
        (line,) = (each for each in index_of(client) if each["name"] == "added")
        assert line["reason"] == "not resident"
        inputs = [tensor(name, np.ones((1, 2), np.float32)) for name in "AB"]
        assert client.infer("added", inputs, client_timeout=WAIT_S).as_numpy("SUM")[0][0] == 2.0
        assert answers_of(client) == cold


WAYS = (
    unary,
    stream,
    http,
    version,
    generate,
    metadata,
    bls,
    pytest.param(bls_of_a_worker, marks=pytest.mark.process),
    bls_of_a_coroutine,
    program,
    program_stream,
    program_async,
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["one", "chain"])
def test_a_cold_model_answers_on_every_way_in(
    server: AnyServer, way: Callable[[AnyServer, str], float], name: str
) -> None:
    with client_of(server) as client:
        make_cold(client, "chain", "one", "two")
        assert client.is_model_ready(name), "clients look before they send a request"
        assert way(server, name) == 7.0
        assert client.is_model_ready(name)


@pytest.mark.parametrize(("path", "body"), [("one/infer", BODY), ("one/generate", {"IN": 7})])
def test_a_model_evicted_between_headers_and_body_is_loaded_again(
    server: AnyServer, path: str, body: Any
) -> None:
    content = json.dumps(body).encode()
    host, _, port = server.http_address.rpartition(":")
    head = f"POST /v2/models/{path} HTTP/1.1\r\nHost: {host}\r\nExpect: 100-continue\r\n"
    with client_of(server) as client, socket.create_connection((host, int(port)), WAIT_S) as peer:
        assert unary(server, "one") == 7.0
        peer.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode())
        assert peer.recv(1000).startswith(b"HTTP/1.1 100 ")
        make_cold(client, "chain", "one")
        peer.sendall(content)
        assert peer.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_500_requests_for_a_cold_model_are_one_load(server: AnyServer, repository: Path) -> None:
    held = repository / "one" / "held"
    with client_of(server) as client:
        make_cold(client, "chain", "one")
        before = loads_of(repository, "one")
        held.touch()
        asked: list[Future[Any]] = []
        for _ in range(500):
            future: Future[Any] = Future()
            asked.append(future)
            client.async_infer(
                "one", INPUTS, lambda result, error, future=future: future.set_result(error or result)
            )
        eventually(lambda: metric(server, "conch_cold_requests") == 500, "all wait")
        try:
            # The second where the last load took longer.
            with pytest.raises(InferenceServerException, match=r"Deadline Exceeded|deadline of the request"):
                client.infer("one", INPUTS, client_timeout=0.2)
        finally:
            held.unlink()
        assert all(each.result(WAIT_S).as_numpy("OUT")[0] == 7.0 for each in asked)
    assert loads_of(repository, "one") == before + 1
    eventually(lambda: metric(server, "conch_cold_requests") == 0, "nothing waits")


def metric(server: AnyServer, name: str) -> float:
    text = httpx.get(server.metrics_url, timeout=WAIT_S).text
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))


def test_a_failed_load_fails_all_that_wait(server: AnyServer, repository: Path) -> None:
    write_model(repository, "broken", CONFIG, {"model.py": "raise ValueError('no such file')"})
    with client_of(server) as client:
        with pytest.raises(InferenceServerException, match="unknown model: 'broken' is not found"):
            client.infer("broken", INPUTS)
        client.get_model_repository_index()  # a listing finds it
        with ThreadPoolExecutor(8) as pool:
            for each in [pool.submit(unary, server, "broken") for _ in range(8)]:
                with pytest.raises(InferenceServerException, match="no such file"):
                    each.result()
        assert not client.is_model_ready("broken")
        assert client.is_server_ready()


@pytest.mark.process
@pytest.mark.slow
def test_a_worker_that_is_killed_while_it_loads(server: AnyServer, repository: Path) -> None:
    """The requests that wait get an error; a later one has the model loaded again."""
    worker = 'parameters { key: "CONCH_PLACEMENT" value { string_value: "worker" } }'
    code = ECHO.replace(
        "        while (", '        (directory / "pid").write_text(str(os.getpid()))\n        while (', 1
    )
    model = write_model(repository, "killed", CONFIG + worker, {"model.py": f"import os\n{code}"})
    (model / "held").touch()
    with client_of(server) as client, ThreadPoolExecutor(4) as pool:
        client.get_model_repository_index()  # a listing finds it
        asked = [pool.submit(unary, server, "killed") for _ in range(4)]
        eventually(lambda: metric(server, "conch_cold_requests") == 4, "all wait")
        pid = eventually(lambda: (model / "pid").exists() and (model / "pid").read_text(), "it loads")
        os.kill(int(pid), signal.SIGKILL)
        for each in asked:
            with pytest.raises(InferenceServerException, match="killed by signal 9"):
                each.result(WAIT_S)
    (model / "held").unlink()
    eventually(lambda: answers(server, "killed"), "it is loaded again")


def answers(server: AnyServer, name: str) -> bool:
    try:
        return unary(server, name) == 7.0
    except InferenceServerException:
        return False


def test_evictions_fail_no_request(server: AnyServer) -> None:
    """Clients of seven models, of which four fit, each with requests, streams or sequences that run."""
    ways = (unary, http, stream, generate, program, bls, ensemble, sequence)
    failures: list[BaseException] = []

    def send(number: int) -> None:
        chance = random.Random(number)
        try:
            for _ in range(8):
                name = chance.choice(("one", "two", "three", "echo"))
                assert ways[number % len(ways)](server, name) == 7.0
        except BaseException as error:  # shown below
            failures.append(error)

    before = metric(server, 'conch_evictions_total{reason="room"}')
    threads = [threading.Thread(target=send, args=(number,)) for number in range(2 * len(ways))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(map(str, failures)) == []
    assert metric(server, 'conch_evictions_total{reason="room"}') > before
