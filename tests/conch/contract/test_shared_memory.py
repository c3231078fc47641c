"""System shared memory as clients use it: tensors in regions, regions that come, go and shrink."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from queue import Queue
from typing import Any, TypeAlias

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm
from PIL import Image
from tests.support.calls import refused
from tests.support.cases import Case, check
from tests.support.cases.region_cases import CALLS, REQUESTS, SIZE, part, request_of, write_adding
from tests.support.names import new_name
from tests.support.server_fixtures import server_fixture
from tests.support.servers import (
    EXAMPLES,
    ROOT,
    WAIT_S,
    AnyServer,
    RawClient,
    client_of,
    eventually,
    probe,
    serving,
    tensor,
    write_model,
    write_probe,
    write_steps,
)
from tests.support.sharing import SharedObject, register_request, shared_object
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

Client: TypeAlias = triton.InferenceServerClient
RETURNING = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([r.inputs()[0]]) for r in requests]
"""
RETURNING_CONFIG = """
    backend: "python"
    input { name: "T" data_type: TYPE_FP32 dims: [ -1 ] }
    output { name: "T" data_type: TYPE_FP32 dims: [ -1 ] }
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("sharing")
    write_probe(repository)
    write_probe(
        repository,
        "four",
        "dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 600000000 }",
    )
    write_probe(repository, "cached", "response_cache { enable: true }")
    write_steps(repository)
    write_adding(repository)
    write_model(repository, "returning", RETURNING_CONFIG, {"model.py": RETURNING})
    return repository


server = server_fixture(EXAMPLES, flags=["--cache-config=local,size=1000000"])


@pytest.fixture
def client(server: AnyServer) -> Iterator[Client]:
    with client_of(server) as client:
        yield client
        client.unregister_system_shared_memory()


@pytest.fixture
def raw(server: AnyServer) -> Iterator[RawClient]:
    with closing(RawClient(server.address)) as raw:
        yield raw
        raw("SystemSharedMemoryUnregister", service_pb2.SystemSharedMemoryUnregisterRequest())


@pytest.fixture
def memory(client: Client) -> Iterator[SharedObject]:
    """An object that is registered as region `r`."""
    with shared_object(SIZE) as memory:
        client.register_system_shared_memory("r", memory.key, SIZE)
        yield memory


def given(
    name: str, shape: list[int], byte_size: int, offset: int = 0, datatype: str = "FP32"
) -> triton.InferInput:
    made = triton.InferInput(name, shape, datatype)
    made.set_shared_memory("r", byte_size, offset)
    return made


def wanted(name: str, byte_size: int, offset: int = 0) -> triton.InferRequestedOutput:
    made = triton.InferRequestedOutput(name)
    made.set_shared_memory("r", byte_size, offset)
    return made


def mapped(server: AnyServer, memory: SharedObject) -> bool:
    """True if the server has an object mapped or open."""
    process = Path("/proc/self")
    if memory.key in (process / "maps").read_text():
        return True
    opened = 0
    for link in (process / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            opened += memory.key in str(link.readlink())
    return opened > 1  # the client is in this process too, and has one descriptor


def test_the_utilities_of_the_client(client: Client) -> None:
    """As the examples of the client library go."""
    numbers = np.arange(16, dtype=np.int32).reshape(1, 16)
    key = new_name()
    with ExitStack() as stack:
        regions = {}
        for name, size in (("in", 128), ("out", 128)):
            regions[name] = shm.create_shared_memory_region(name, f"{key}-{name}", size)
            stack.callback(shm.destroy_shared_memory_region, regions[name])
            client.register_system_shared_memory(name, f"{key}-{name}", size)
        shm.set_shared_memory_region(regions["in"], [numbers, numbers])
        inputs, outputs = [], []
        for place in range(2):
            inputs.append(triton.InferInput(f"INPUT{place}", [1, 16], "INT32"))
            inputs[-1].set_shared_memory("in", 64, place * 64)
            outputs.append(triton.InferRequestedOutput(f"OUTPUT{place}"))
            outputs[-1].set_shared_memory("out", 64, place * 64)
        result = client.infer("simple", inputs, outputs=outputs)
        answer = result.get_output("OUTPUT0")
        assert (answer.datatype, list(answer.shape), dict(answer.parameters)) == ("INT32", [1, 16], {})
        assert list(result.get_response().raw_output_contents) == [b"", b""]
        got = shm.get_contents_as_numpy(regions["out"], np.int32, [2, 16])
        assert got.tolist() == [[2 * number for number in range(16)], [0] * 16]
        status = client.get_system_shared_memory_status(as_json=True)["regions"]
        assert status["in"] == {"name": "in", "key": f"{key}-in", "byte_size": "128"}
        assert sorted(status) == ["in", "out"]
        client.unregister_system_shared_memory("in")
        assert [*client.get_system_shared_memory_status("out").regions] == ["out"]
        assert refused(client.get_system_shared_memory_status, "in") == (
            "NOT_FOUND",
            "Unable to find system shared memory region: 'in'",
        )
        client.unregister_system_shared_memory()
        assert not client.get_system_shared_memory_status().regions


def test_the_example_of_the_docs(server: AnyServer, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "shared-memory.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    assert "localhost:8001" in code
    names: dict[str, Any] = {}
    exec(code.replace("localhost:8001", server.address).replace("my_data", new_name()), names)
    names["client"].close()
    sums, differences = np.fromstring(
        capsys.readouterr().out.replace("[", " ").replace("]", " "), np.int64, sep=" "
    ).reshape(2, 16)
    assert sums.tolist() == [2 * number for number in range(16)]
    assert not differences.any()


def test_cuda_without_a_gpu(client: Client, memory: SharedObject) -> None:
    assert refused(client.register_cuda_shared_memory, "c", b"1" * 64, 0, 8) == (
        "INVALID_ARGUMENT",
        "failed to register CUDA shared memory region: 'c', GPUs not supported",
    )
    client.unregister_cuda_shared_memory()
    assert [*client.get_system_shared_memory_status().regions] == ["r"]


def test_nothing_is_shared_where_that_is_not_allowed() -> None:
    text = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
    with (
        shared_object(SIZE) as memory,
        serving(EXAMPLES, flags=["--allow-client-shm=false"]) as server,
        client_of(server) as client,
    ):
        assert refused(client.register_system_shared_memory, "r", memory.key, 1) == ("UNIMPLEMENTED", text)
        assert refused(client.unregister_system_shared_memory) == ("UNIMPLEMENTED", text)
        assert refused(client.register_cuda_shared_memory, "r", b"", 0, 1) == ("UNIMPLEMENTED", text)
        assert refused(client.unregister_cuda_shared_memory, "r") == ("UNIMPLEMENTED", text)
        assert not client.get_system_shared_memory_status().regions


@pytest.mark.parametrize("repeats", [1, 4])  # what is seen again is read in another way
def test_regions_and_messages_mix(client: Client, memory: SharedObject, repeats: int) -> None:
    numbers = np.arange(16, dtype=np.int32).reshape(1, 16)
    for round_ in range(repeats):
        memory.write(numbers + round_)
        inputs = [given("INPUT0", [1, 16], 64, datatype="INT32"), tensor("INPUT1", numbers, "INT32")]
        outputs = [triton.InferRequestedOutput("OUTPUT0"), wanted("OUTPUT1", 100, 4096)]
        result = client.infer("simple", inputs, outputs=outputs, request_id=str(round_))
        assert result.as_numpy("OUTPUT0").tolist() == (2 * numbers + round_).tolist()
        assert memory.read(16, 4096, np.int32).tolist() == [round_] * 16
        reverse = client.infer("simple", [inputs[1], inputs[0]], outputs=outputs[::-1])
        assert reverse.as_numpy("OUTPUT0").tolist() == (2 * numbers + round_).tolist()


def test_one_region_is_input_and_output(client: Client, memory: SharedObject) -> None:
    """Models that return their inputs, too, see the bytes that were there when the request began."""
    values = np.arange(1000, dtype=np.float32)
    for offset in (0, 400, 8000):
        memory.write(values)
        client.infer("returning", [given("T", [1000], 4000)], outputs=[wanted("T", 4000, offset)])
        assert memory.read(1000, offset).tolist() == values.tolist()


def test_strings_and_ensembles(client: Client, memory: SharedObject) -> None:
    file = io.BytesIO()
    Image.fromarray(np.kron(np.eye(8), np.full((20, 20), 255)).astype(np.uint8)).save(file, "PNG")
    image = file.getvalue()
    data = len(image).to_bytes(4, "little") + image
    memory.write(np.frombuffer(data, np.uint8))
    expected = client.infer("digit_reader", [tensor("file", np.array([[image]], object), "BYTES")])
    outputs = [wanted("probabilities", 64, 32 * 1024), wanted("digit", 8, 40 * 1024)]
    client.infer("digit_reader", [given("file", [1, 1], len(data), datatype="BYTES")], outputs=outputs)
    assert memory.read(10, 32 * 1024).tolist() == expected.as_numpy("probabilities")[0].tolist()
    assert memory.read(1, 40 * 1024, np.int64).tolist() == expected.as_numpy("digit")[0].tolist()


def test_sequences_keep_nothing_of_a_region(client: Client, memory: SharedObject, server: AnyServer) -> None:
    scores = []
    for place, value in enumerate((1.0, 2.0, 30.0)):
        memory.write(np.array([value], np.float32))
        client.infer(
            "anomaly",
            [given("value", [1, 1], 4)],
            outputs=[wanted("score", 4, 4096), wanted("expected", 4, 8192)],
            sequence_id=7,
            sequence_start=place == 0,
        )
        scores.append(float(memory.read(1, 4096)[0]))
    client.unregister_system_shared_memory("r")
    eventually(lambda: not mapped(server, memory), "the server has let go")
    direct = []
    for place, value in enumerate((1.0, 2.0, 30.0)):
        result = client.infer(
            "anomaly",
            [tensor("value", np.array([[value]], np.float32))],
            sequence_id=8,
            sequence_start=place == 0,
            sequence_end=place == 2,
        )
        direct.append(float(result.as_numpy("score")[0, 0]))
    assert scores == direct
    client.infer("anomaly", [tensor("value", np.ones((1, 1), np.float32))], sequence_id=7, sequence_end=True)


def test_a_batch_of_requests_with_and_without_regions(client: Client, memory: SharedObject) -> None:
    for number in range(3):
        memory.write(np.full(4, number, np.float32), 16 * number)

    def ask(number: int) -> Any:
        if number == 3:
            return client.infer("four", [tensor("IN", np.full((1, 4), 3, np.float32))], client_timeout=WAIT_S)
        outputs = [wanted("OUT", 16, 4096 + 16 * number), triton.InferRequestedOutput("SEEN")]
        return client.infer(
            "four", [given("IN", [1, 4], 16, 16 * number)], outputs=outputs, client_timeout=WAIT_S
        )

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(ask, range(4)))
    assert results[3].as_numpy("OUT").tolist() == [[3.0] * 4]
    assert [len(json.loads(result.as_numpy("SEEN")[0, 0])["ids"]) for result in results] == [4] * 4
    assert memory.read(12, 4096).tolist() == [number for number in range(3) for _ in range(4)]


@pytest.mark.parametrize("model", ["probe", "steps"])
def test_streams(client: Client, memory: SharedObject, model: str) -> None:
    answers: Queue[Any] = Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    if model == "probe":
        memory.write(np.full(4, 5, np.float32))
        client.async_stream_infer(model, [given("IN", [1, 4], 16)], outputs=[wanted("OUT", 16, 4096)])
        result, error = answers.get(timeout=WAIT_S)
        assert error is None
        assert list(result.get_response().raw_output_contents) == [b""]
        assert memory.read(4, 4096).tolist() == [5] * 4
    else:
        memory.write(np.zeros(1, np.int32))
        client.async_stream_infer(
            model,
            [given("IN", [1], 4, datatype="INT32")],
            outputs=[wanted("OUT", 4, 4096)],
            parameters={"steps": "ok ok okfinal"},
        )
        for _ in range(3):
            result, error = answers.get(timeout=WAIT_S)
            assert error is None
            assert list(result.get_response().raw_output_contents) == [b""]
        assert memory.read(1, 4096, np.int32).tolist() == [2]
    # One that never reaches a model gives up what it holds as well.
    client.async_stream_infer("nope", [given("IN", [1, 4], 16)], outputs=[wanted("OUT", 16, 4096)])
    _, error = answers.get(timeout=WAIT_S)
    assert "unknown model: 'nope'" in str(error)
    client.stop_stream()


def test_a_decoupled_model_that_answers_once(client: Client, memory: SharedObject) -> None:
    memory.write(np.array([7], np.int32), 4096)
    client.infer(
        "steps",
        [given("IN", [1], 4, datatype="INT32")],
        outputs=[wanted("OUT", 4, 4096)],
        parameters={"steps": "later ok final"},
    )
    assert memory.read(1, 4096, np.int32).tolist() == [0]


def test_a_region_may_go_during_inference(
    client: Client, memory: SharedObject, server: AnyServer, tmp_path: Path
) -> None:
    started, go = tmp_path / "started", tmp_path / "go"
    memory.write(np.full(4, 6, np.float32))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            client.infer,
            "probe",
            [given("IN", [1, 4], 16)],
            outputs=[wanted("OUT", 16, 4096)],
            parameters={"started": str(started), "wait_for": str(go)},
            client_timeout=WAIT_S,
        )
        eventually(started.exists, "the model runs")
        client.unregister_system_shared_memory("r")
        assert not client.get_system_shared_memory_status().regions
        assert refused(client.infer, "probe", [given("IN", [1, 4], 16)]) == (
            "NOT_FOUND",
            "Unable to find shared memory region: 'r'",
        )
        memory.write(np.full(4, 7, np.float32))  # read when the model reads it, as in Triton
        go.touch()
        running.result()
    assert memory.read(4, 4096).tolist() == [7] * 4
    eventually(lambda: not mapped(server, memory), "the server has let go")


@pytest.mark.parametrize("part", ["input", "output"])
def test_a_region_that_shrinks_during_inference(
    client: Client, memory: SharedObject, server: AnyServer, tmp_path: Path, part: str
) -> None:
    started, go = tmp_path / "started", tmp_path / "go"
    values = tensor("IN", np.ones((1, 4), np.float32))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            client.infer,
            "probe",
            [given("IN", [1, 4], 16, 4096)] if part == "input" else [values],
            outputs=[wanted("OUT", 16, 8192)] if part == "output" else None,
            parameters={"started": str(started), "wait_for": str(go)},
            client_timeout=WAIT_S,
        )
        eventually(started.exists, "the model runs")
        memory.resize(0)
        go.touch()
        code, text = refused(running.result)
    assert (code, text) == (
        "INVALID_ARGUMENT",
        f"shared memory region 'r' has shrunk since it was registered: it needs {SIZE} bytes of "
        f"'{memory.key}', which has 0",
    )
    # It has been touched, so it is lost for good, until it is registered again.
    memory.resize(SIZE)
    code, text = refused(client.infer, "probe", [given("IN", [1, 4], 16)])
    assert code == "INVALID_ARGUMENT"
    assert "has lost its memory" in text
    client.unregister_system_shared_memory("r")
    client.register_system_shared_memory("r", memory.key, SIZE)
    client.infer("probe", [given("IN", [1, 4], 16)])
    probe(client)


@pytest.mark.slow
def test_onnx_runtime_with_regions_that_shrink_all_the_time(client: Client, server: AnyServer) -> None:
    with shared_object(SIZE) as memory, ThreadPoolExecutor(4) as pool:
        never = threading.Event()
        over = threading.Event()
        outputs = [wanted("OUTPUT0", 64, 4096), wanted("OUTPUT1", 64, 8192)]
        inputs = [given(f"INPUT{place}", [1, 16], 64, 12288 * place, "INT32") for place in range(2)]
        codes: set[str] = set()

        def ask() -> None:
            while not over.is_set():
                try:
                    client.infer("simple", inputs, outputs=outputs, client_timeout=WAIT_S)
                except InferenceServerException as error:
                    codes.add(str(error.status()))

        asking = [pool.submit(ask) for _ in range(4)]
        for _ in range(100):
            client.register_system_shared_memory("r", memory.key, SIZE)
            never.wait(0.002)
            memory.resize(0)
            client.unregister_system_shared_memory("r")
            memory.resize(SIZE)
        over.set()
        for each in asking:
            each.result()
    assert codes <= {"StatusCode.NOT_FOUND", "StatusCode.INVALID_ARGUMENT"}
    probe(client)
    eventually(lambda: not mapped(server, memory), "the server has let go")


def test_cached_answers_are_for_the_bytes_that_were_there(
    client: Client, memory: SharedObject, server: AnyServer
) -> None:
    for value in (1.0, 2.0, 1.0):
        memory.write(np.full(4, value, np.float32))
        client.infer("cached", [given("IN", [1, 4], 16)], outputs=[wanted("OUT", 16, 4096)])
        assert memory.read(4, 4096).tolist() == [value] * 4
        memory.write(np.zeros(4, np.float32), 4096)
    statistics = client.get_inference_statistics("cached").model_stats[0].inference_stats
    assert statistics.cache_hit.count >= 1
    client.unregister_system_shared_memory("r")
    eventually(lambda: not mapped(server, memory), "the server has let go")


def test_inputs_of_cached_models_are_copied_before_they_are_looked_up(
    client: Client, memory: SharedObject, tmp_path: Path
) -> None:
    """Or a client that changes one meanwhile could have a wrong answer kept for others."""
    started, go = tmp_path / "started", tmp_path / "go"
    memory.write(np.full(4, 3, np.float32))
    orders = {"started": str(started), "wait_for": str(go)}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            client.infer, "cached", [given("IN", [1, 4], 16)], parameters=orders, client_timeout=WAIT_S
        )
        eventually(started.exists, "the model runs")
        memory.write(np.full(4, 4, np.float32))
        go.touch()
        assert running.result().as_numpy("OUT").tolist() == [[3.0] * 4]


@pytest.mark.parametrize("repeats", [1, 2])  # what is seen again is read in another way
@pytest.mark.parametrize("name", REQUESTS)
def test_requests(raw: RawClient, memory: SharedObject, name: str, repeats: int) -> None:
    for _ in range(repeats):
        check(raw, REQUESTS[name])


@pytest.mark.parametrize("name", CALLS)
def test_calls(client: Client, raw: RawClient, memory: SharedObject, name: str) -> None:
    check(raw, CALLS[name])
    assert [*client.get_system_shared_memory_status().regions] == ["r"]


def test_an_input_in_a_region_and_an_output_in_the_response(raw: RawClient, memory: SharedObject) -> None:
    assert len(raw.infer(request_of(part(), None, b"surplus")).raw_output_contents[0]) == 64


def test_contents_beside_a_region(raw: RawClient, memory: SharedObject) -> None:
    message = request_of(part(), None)
    message.inputs[0].contents.fp32_contents.append(1)
    text = "unexpected 'content' provided when using shared memory for input tensor 'IN' for model 'adding'"
    check(raw, Case(message, ("INVALID_ARGUMENT", text)))


def test_requests_that_fail_hold_nothing(raw: RawClient, memory: SharedObject, server: AnyServer) -> None:
    wrong, lost = request_of(part(byte_size=128), None), request_of(part(), part("nope"))
    for message, model in ((wrong, "adding"), (wrong, "nope"), (lost, "nope")):
        message.model_name = model
        with pytest.raises(grpc.RpcError):
            raw.infer(message)
    raw("SystemSharedMemoryUnregister", service_pb2.SystemSharedMemoryUnregisterRequest(name="r"))
    eventually(lambda: not mapped(server, memory), "the server has let go")


def test_registering_from_many_clients_at_once(client: Client, raw: RawClient) -> None:
    with shared_object(SIZE) as memory, ThreadPoolExecutor(8) as pool:

        def register(number: int) -> str:
            try:
                raw("SystemSharedMemoryRegister", register_request(f"n{number % 4}", memory.key, 64))
            except grpc.RpcError as error:
                return str(error.code().name)
            return "OK"

        assert sorted(pool.map(register, range(16))) == ["ALREADY_EXISTS"] * 12 + ["OK"] * 4
