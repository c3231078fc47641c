"""Shared memory over REST, with tritonclient and its utilities: tensors in regions, and who lets go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.utils.shared_memory as shm
from tests.support.names import new_name
from tests.support.raw_http import raw_http, request
from tests.support.servers import (
    EXAMPLES,
    WAIT_S,
    ServerProcess,
    client_of,
    eventually,
    serving_process,
    write_model,
    write_probe,
    write_steps,
)
from tests.support.sharing import SharedObject, mapped, shared_object
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.process

SIZE = 4 << 20
TWO = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor(name, request.inputs()[0].as_numpy())
                for name in ("ONE", "TWO")]) for request in requests]
"""
TWO_CONFIG = """
    backend: "python"
    input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
    output [
      { name: "ONE" data_type: TYPE_FP32 dims: [ -1 ] },
      { name: "TWO" data_type: TYPE_FP32 dims: [ -1 ] }
    ]
"""
Client: TypeAlias = triton.InferenceServerClient


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("sharing")
    write_probe(repository)
    write_probe(repository, "cached", "response_cache { enable: true }")
    write_steps(repository)
    write_model(repository, "two", TWO_CONFIG, {"model.py": TWO})
    with serving_process(EXAMPLES, repository, flags=["--cache-config=local,size=1000000"]) as server:
        with client_of(server) as grpc, closing(Client(server.http_address)) as client:
            assert grpc.is_server_ready() and client.is_server_ready()
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with closing(Client(server.http_address, network_timeout=WAIT_S)) as client:
        yield client
        client.unregister_system_shared_memory()


@pytest.fixture
def memory(client: Client) -> Iterator[SharedObject]:
    """An object that is registered as region `r`."""
    with shared_object(SIZE) as memory:
        client.register_system_shared_memory("r", memory.key, SIZE)
        yield memory


def given(name: str, shape: list[int], size: int, offset: int = 0, datatype: str = "FP32") -> Any:
    made = triton.InferInput(name, shape, datatype)
    made.set_shared_memory("r", size, offset)
    return made


def wanted(name: str, size: int, offset: int = 0) -> Any:
    made = triton.InferRequestedOutput(name)
    made.set_shared_memory("r", size, offset)
    return made


def check_let_go(client: Client, server: ServerProcess, memory: SharedObject) -> None:
    """Checks that no request holds the region any more."""
    client.unregister_system_shared_memory("r")
    eventually(lambda: not mapped(server, memory), "the server has let go")


def body(model_input: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": [model_input], **more}).encode()


def lying(name: str = "IN", shape: tuple[int, ...] = (1, 4), size: int = 16, **more: Any) -> dict[str, Any]:
    """An input that lies in the region."""
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": size, **more}
    return {"name": name, "datatype": "FP32", "shape": shape, "parameters": parameters}


def test_the_utilities_of_the_client(client: Client) -> None:
    numbers = np.arange(16, dtype=np.int32).reshape(1, 16)
    key = new_name()
    with ExitStack() as stack:
        regions = {}
        for name in ("in", "out"):
            regions[name] = shm.create_shared_memory_region(name, f"{key}-{name}", 128)
            stack.callback(shm.destroy_shared_memory_region, regions[name])
            client.register_system_shared_memory(name, f"{key}-{name}", 128)
        shm.set_shared_memory_region(regions["in"], [numbers, numbers])
        inputs, outputs = [], []
        for place in range(2):
            inputs.append(triton.InferInput(f"INPUT{place}", [1, 16], "INT32"))
            inputs[-1].set_shared_memory("in", 64, place * 64)
            outputs.append(triton.InferRequestedOutput(f"OUTPUT{place}"))
            outputs[-1].set_shared_memory("out", 64, place * 64)
        result = client.infer("simple", inputs, outputs=outputs)
        assert result.get_output("OUTPUT0") == {"name": "OUTPUT0", "datatype": "INT32", "shape": [1, 16]}
        got = shm.get_contents_as_numpy(regions["out"], np.int32, [2, 16])
        assert got.tolist() == [[2 * number for number in range(16)], [0] * 16]
        assert [region["name"] for region in client.get_system_shared_memory_status()] == ["in", "out"]


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("count", [4, 60_000])
def test_an_output_in_a_region_beside_one_in_the_body(
    client: Client, memory: SharedObject, count: int, binary: bool
) -> None:
    values = np.arange(count, dtype=np.float32)
    memory.write(values)
    outputs = [triton.InferRequestedOutput("ONE", binary_data=binary), wanted("TWO", 4 * count, SIZE // 2)]
    result = client.infer("two", [given("IN", [count], 4 * count)], outputs=outputs)
    assert (result.as_numpy("ONE") == values).all()
    assert result.get_output("TWO") == {"name": "TWO", "datatype": "FP32", "shape": [count]}
    assert (memory.read(count, SIZE // 2) == values).all()


def test_a_request_may_be_all_in_regions_and_compressed(client: Client, memory: SharedObject) -> None:
    memory.write(np.full(4, 3, np.float32))
    for algorithm in ("gzip", "deflate"):
        client.infer(
            "probe",
            [given("IN", [1, 4], 16)],
            outputs=[wanted("OUT", 16, 64)],
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )
        assert memory.read(4, 64).tolist() == [3] * 4
        memory.write(np.zeros(4, np.float32), 64)


def test_a_region_may_go_during_inference(
    client: Client, memory: SharedObject, server: ServerProcess, tmp_path: Path
) -> None:
    started, go = tmp_path / "started", tmp_path / "go"
    memory.write(np.full(4, 6, np.float32))
    message = body(
        lying(),
        outputs=[
            {
                "name": "OUT",
                "parameters": {
                    "shared_memory_region": "r",
                    "shared_memory_byte_size": 16,
                    "shared_memory_offset": 4096,
                },
            }
        ],
        parameters={"started": str(started), "wait_for": str(go)},
    )
    with raw_http(server.http_address) as running:
        running.send(request("POST", "/v2/models/probe/infer", message))
        eventually(started.exists, "the model runs")
        client.unregister_system_shared_memory("r")
        assert client.get_system_shared_memory_status() == []
        with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'r'"):
            client.infer("probe", [given("IN", [1, 4], 16)])
        assert mapped(server, memory)
        # The name can be had again at once.
        client.register_system_shared_memory("r", memory.key, SIZE)
        client.unregister_system_shared_memory("r")
        go.touch()
        answer = running.response()
    assert answer is not None and answer.status == 200
    assert memory.read(4, 4096).tolist() == [6] * 4
    eventually(lambda: not mapped(server, memory), "the server has let go")


REFUSED: dict[str, tuple[str, bytes]] = {
    "a model that is not there": ("nope", body(lying())),
    "an input of another name": ("probe", body(lying("NO"))),
    "too many bytes": ("probe", body(lying(size=20))),
    "a region that is not there": (
        "probe",
        body(lying(), outputs=[{"name": "OUT", "parameters": {"shared_memory_region": "no"}}]),
    ),
    "an output that is not there": ("probe", body(lying(), outputs=[{"name": "NO"}])),
    "an output behind the region": (
        "probe",
        body(
            lying(),
            outputs=[
                {
                    "name": "OUT",
                    "parameters": {"shared_memory_region": "r", "shared_memory_offset": 2**64 - 1},
                }
            ],
        ),
    ),
    "an output that is too small": (
        "probe",
        body(
            lying(),
            outputs=[
                {"name": "OUT", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 15}}
            ],
        ),
    ),
    "an input that comes twice": (
        "probe",
        json.dumps({"inputs": [lying(), lying()]}).encode(),
    ),
    "a parameter of ours": ("probe", body(lying(), parameters={"triton_x": 1})),
    "outputs that are none": ("probe", body(lying(), outputs=7)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_request_that_is_refused_holds_nothing(
    client: Client, memory: SharedObject, server: ServerProcess, what: str
) -> None:
    model, message = REFUSED[what]
    with raw_http(server.http_address) as raw:
        for _ in range(2):
            raw.send(request("POST", f"/v2/models/{model}/infer", message))
            answer = raw.response()
            assert answer is not None and answer.status >= 400, answer
    check_let_go(client, server, memory)


def test_a_client_that_goes_away_holds_nothing(
    client: Client, memory: SharedObject, server: ServerProcess, tmp_path: Path
) -> None:
    started, cancelled = tmp_path / "started", tmp_path / "cancelled"
    message = body(lying(), parameters={"started": str(started), "until_cancelled": str(cancelled)})
    with raw_http(server.http_address) as raw:
        raw.send(request("POST", "/v2/models/probe/infer", message))
        eventually(started.exists, "the model runs")
        # Another waits behind it, and one has not sent all of its body.
        with raw_http(server.http_address) as queued, raw_http(server.http_address) as half:
            queued.send(request("POST", "/v2/models/probe/infer", body(lying())))
            half.send(request("POST", "/v2/models/probe/infer", body(lying()))[:-1])
    eventually(cancelled.exists, "the model learns of it")
    check_let_go(client, server, memory)


def test_cached_answers_are_written_too(client: Client, memory: SharedObject, server: ServerProcess) -> None:
    memory.write(np.full(4, 5, np.float32))
    for place in range(64, 256, 64):
        client.infer("cached", [given("IN", [1, 4], 16)], outputs=[wanted("OUT", 16, place)])
        assert memory.read(4, place).tolist() == [5] * 4
    check_let_go(client, server, memory)


def test_a_thousand_regions_come_and_go(client: Client, server: ServerProcess) -> None:
    process = Path(f"/proc/{server.process.pid}")
    with shared_object(4096) as memory:
        memory.write(np.full(4, 2, np.float32))

        def cycle() -> None:
            client.register_system_shared_memory("r", memory.key, 4096)
            client.infer("probe", [given("IN", [1, 4], 16)], outputs=[wanted("OUT", 16, 64)])
            client.unregister_system_shared_memory("r")

        for _ in range(10):
            cycle()
        before = len(list((process / "fd").iterdir()))
        for _ in range(1000):
            cycle()
        eventually(lambda: not mapped(server, memory), "the server has let go")
        eventually(lambda: len(list((process / "fd").iterdir())) <= before, "no descriptor is left")
