"""Clients that read more slowly than a decoupled model sends: it waits, and memory is bounded."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from tests.support.calls import STREAM
from tests.support.hazards import blocks_of, workers_of
from tests.support.servers import (
    FRONT_ENDS,
    IN_PROCESS,
    WAIT_S,
    RawClient,
    ServerProcess,
    check_simple,
    client_of,
    eventually,
    serving,
    serving_process,
    simple_inputs,
    write_model,
)
from tests.support.waiting import given_time
from tritonclient.grpc import service_pb2

from conch.frontends import unread_bytes
from conch.ipc.blocks import MOST_IDLE, MOST_LENT

BLOCK = 1 << 20
BLOCKS = 400
BOUND = 64 << 20
SLACK = 48 << 20
"""For what gRPC and the allocator hold besides."""
MODEL = """
import json
from pathlib import Path
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self._how = parameters["how"]["string_value"]
        self._log = Path(parameters["log"]["string_value"])

    {sync}def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
            if self._how == "thread":
                threading.Thread(target=self._send, args=(sender, count)).start()
            else:
                self._send(sender, count)

    def _send(self, sender, count):
        with self._log.open("a", buffering=1) as log:
            for number in range(count):
                if sender.is_cancelled():
                    log.write("c\\n")
                    break
                block = np.full(BLOCK, number % 251, np.uint8)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", block)]))
                log.write(".\\n")
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
""".replace("BLOCK", str(BLOCK))
CONFIG = """
    backend: "python"
    input {{ name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }}
    output {{ name: "OUT" data_type: TYPE_UINT8 dims: [ -1 ] }}
    model_transaction_policy {{ decoupled: true }}
    parameters {{ key: "how" value {{ string_value: "{how}" }} }}
    parameters {{ key: "log" value {{ string_value: "{log}" }} }}
"""
WAYS = ("execute", "thread", "async")


def request(count: int, model: str = "flood") -> Any:
    made = service_pb2.ModelInferRequest(
        model_name=model, raw_input_contents=[np.array([count], np.int32).tobytes()]
    )
    made.inputs.add(name="COUNT", datatype="INT32", shape=[1])
    return made


class FloodingModel:
    """Record of a model that floods; `address` is its server's."""

    def __init__(self, address: str, log: Path) -> None:
        self.address = address
        self._log = log

    @property
    def sent(self) -> int:
        """Number of blocks it has sent, all in all."""
        return self._log.read_text().count(".") if self._log.exists() else 0

    @property
    def cancelled(self) -> int:
        """Number of times it has seen that its request was cancelled."""
        return self._log.read_text().count("c") if self._log.exists() else 0

    def wait_until_it_waits(self) -> None:
        """Returns when it has sent something, and then nothing for half a second."""
        eventually(lambda: self.sent > BOUND // BLOCK - 8, "it sends")
        last, quiet = self.sent, 0
        while quiet < 10:
            threading.Event().wait(0.05)
            now = self.sent
            quiet = quiet + 1 if now == last else 0
            last = now


class Flood(FloodingModel):
    """A server with a model that floods, and what the model has done."""

    def __init__(self, server: ServerProcess, log: Path) -> None:
        super().__init__(server.address, log)
        self.server = server
        self.memory: Callable[[], int] = lambda: psutil.Process(server.process.pid).memory_info().rss


@contextmanager
def flooding(repository: Path, directory: Path, how: str, *flags: str) -> Iterator[Flood]:
    log = directory / "log"
    model = MODEL.replace("{sync}", "async " if how == "async" else "")
    config = CONFIG.format(how=how, log=log)
    write_model(directory / "models", "flood", config, {"model.py": model})
    with serving_process(repository, directory / "models", flags=flags) as server:
        yield Flood(server, log)


@contextmanager
def stream(flood: FloodingModel, *requests: Any) -> Iterator[Any]:
    """A stream whose client has read one message, and takes in few more."""
    # Else gRPC enlarges the window of a client that does not read, at times by tens of MiB.
    with closing(RawClient(flood.address, ("grpc.http2.bdp_probe", 0))) as raw:
        call = raw.channel.stream_stream(
            STREAM,
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )(iter(requests), timeout=2 * WAIT_S)
        next(call)
        yield call


@pytest.mark.parametrize("how", WAYS)
def test_a_model_waits_for_its_reader(repository: Path, tmp_path: Path, how: str) -> None:
    with flooding(repository, tmp_path, how) as flood, client_of(flood.server) as client:
        check_simple(client.infer("simple", simple_inputs()))
        before = flood.memory()
        with stream(flood, request(BLOCKS)) as call:
            flood.wait_until_it_waits()
            assert flood.sent < BLOCKS
            assert flood.memory() - before < BOUND + SLACK
            for start in range(20):
                check_simple(client.infer("simple", simple_inputs(start)), start)  # no other client waits
            numbers = [m.infer_response.raw_output_contents[0][0] for m in call]
        assert numbers == [number % 251 for number in range(1, BLOCKS)]
        assert flood.memory() - before < BOUND + SLACK


def test_requests_of_one_stream_share_the_bound(repository: Path, tmp_path: Path) -> None:
    with flooding(repository, tmp_path, "thread") as flood:
        before = flood.memory()
        with stream(flood, *[request(100) for _ in range(4)]) as call:
            flood.wait_until_it_waits()
            # Besides what waits, windows and sockets' buffers hold some, the more the slower the machine is.
            assert flood.sent <= (BOUND + SLACK) // BLOCK
            assert flood.memory() - before < BOUND + SLACK
            assert sum(1 for _ in call) == 400 - 1


def test_all_streams_together_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients of 60 streams, who read nothing, had the server hold 4 GB."""
    monkeypatch.setattr(unread_bytes, "MOST_OF_ALL", BOUND)
    config = CONFIG.format(how="thread", log=tmp_path / "log")
    write_model(tmp_path / "models", "flood", config, {"model.py": MODEL.replace("{sync}", "")})
    count = 12
    with serving(tmp_path / "models") as server, ExitStack() as stack:
        flood = FloodingModel(server.address, tmp_path / "log")
        calls = [stack.enter_context(stream(flood, request(60))) for _ in range(count)]
        flood.wait_until_it_waits()
        # Each may have a block beyond the least of one, which its front has too, and some in windows and
        # sockets' buffers.
        least = 2 if FRONT_ENDS == "0" else 3
        assert flood.sent <= (BOUND + SLACK) // BLOCK + least * count
        assert [sum(1 for _ in call) for call in calls] == [60 - 1] * count


@pytest.mark.parametrize("how", WAYS)
def test_a_model_that_waits_goes_on_when_its_reader_leaves(
    repository: Path, tmp_path: Path, how: str
) -> None:
    with flooding(repository, tmp_path, how) as flood:
        with stream(flood, request(BLOCKS)) as call:
            flood.wait_until_it_waits()
            call.cancel()
            eventually(lambda: flood.cancelled == 1, "the model stops")
        with stream(flood, request(3)) as call:
            assert sum(1 for _ in call) == 2


@pytest.mark.parametrize(
    "how", ["execute", *(pytest.param(how, marks=pytest.mark.slow) for how in ("thread", "async"))]
)
def test_a_server_stops_although_a_model_waits(repository: Path, tmp_path: Path, how: str) -> None:
    flags = (IN_PROCESS, "--exit-timeout-secs=3")
    with flooding(repository, tmp_path, how, *flags) as flood, stream(flood, request(BLOCKS)) as call:
        flood.wait_until_it_waits()
        flood.server.signal(signal.SIGTERM)
        # It has had its time to read; then its stream is cancelled and the model goes on.
        assert flood.server.wait() in (0, 1)
        assert flood.cancelled == 1
        with pytest.raises(grpc.RpcError):
            list(call)


@pytest.mark.slow
def test_many_slow_readers_of_a_worker_hold_few_descriptors(repository: Path, tmp_path: Path) -> None:
    config = CONFIG.format(how="thread", log=tmp_path / "log")
    config += 'parameters { key: "CONCH_PLACEMENT" value { string_value: "worker" } }'
    write_model(tmp_path / "models", "flood", config, {"model.py": MODEL.replace("{sync}", "")})
    with (
        serving_process(repository, tmp_path / "models", flags=[]) as server,
        client_of(server) as client,
        ExitStack() as stack,
    ):
        flood = Flood(server, tmp_path / "log")
        (worker,) = workers_of_flood(server)
        streams = [stack.enter_context(stream(flood, request(90))) for _ in range(20)]
        flood.wait_until_it_waits()
        for process in (server.process.pid, worker.pid):
            assert 0 < blocks_of(process) <= MOST_LENT + MOST_IDLE
        used = max(int(number) for number in os.listdir(f"/proc/{server.process.pid}/fd"))
        _, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (used + 1, hard))
        for call in streams[:3]:
            call.cancel()
        eventually(lambda: flood.cancelled == 3, "the model goes on")
        check_simple(client.infer("simple", simple_inputs()))
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (hard, hard))
        with stream(flood, request(3)) as call:
            assert sum(1 for _ in call) == 2
        assert workers_of_flood(server) == [worker]


def workers_of_flood(server: ServerProcess) -> list[psutil.Process]:
    """The worker processes of the model that floods."""
    return [each for each in workers_of(server) if "flood" in each.cmdline()[0]]


def test_a_deadline_ends_the_wait(repository: Path, tmp_path: Path) -> None:
    with flooding(repository, tmp_path, "execute") as flood, closing(RawClient(flood.server.address)) as raw:

        def read_one(seconds: float) -> bool:
            """Reads one message; False if the deadline came before the model had to wait."""
            sent, cancelled = flood.sent, flood.cancelled
            message = request(BLOCKS).SerializeToString()
            call = raw.channel.stream_stream(STREAM)(iter([message]), timeout=seconds)
            try:
                next(call)
            except grpc.RpcError:
                return False
            eventually(lambda: flood.cancelled == cancelled + 1, "the model stops")
            call.cancel()
            return BOUND // BLOCK - 8 < flood.sent - sent < BLOCKS

        given_time(read_one, 3)


WORDS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        (request,) = requests
        word = np.array([b"x" * 10_000], object)
        for number in range(int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])):
            yield pb_utils.InferenceResponse([pb_utils.Tensor("OUT", word)])
"""


def events(http: str, count: int, before_reading: Callable[[], None] = lambda: None) -> int:
    """Streams responses of 10 kB; returns how many came."""
    host, port = http.rsplit(":", 1)
    with closing(HTTPConnection(host, int(port), timeout=WAIT_S)) as connection:
        connection.request("POST", "/v2/models/words/generate_stream", json.dumps({"COUNT": count}))
        response = connection.getresponse()
        before_reading()
        return response.read().count(b"data: {")


def test_a_slow_reader_of_generate_stream_holds_up_no_other(repository: Path, tmp_path: Path) -> None:
    config = CONFIG.format(how="", log="").replace("TYPE_UINT8", "TYPE_STRING")
    write_model(tmp_path / "models", "words", config, {"model.py": WORDS})
    with (
        serving_process(repository, tmp_path / "models", flags=[]) as server,
        ThreadPoolExecutor(32) as clients,
    ):
        assert events(server.http_address, 3) == 3
        before = psutil.Process(server.process.pid).memory_info().rss
        go_on = threading.Event()
        began = threading.Event()

        def wait() -> None:
            began.set()
            assert go_on.wait(2 * WAIT_S)

        slow = clients.submit(events, server.http_address, 6000, wait)  # 60 MB
        assert began.wait(WAIT_S)
        try:
            quick = [clients.submit(events, server.http_address, 200) for _ in range(31)]
            assert [each.result(2 * WAIT_S) for each in quick] == [200] * 31
            assert not slow.done()
            assert psutil.Process(server.process.pid).memory_info().rss - before < SLACK
        finally:
            go_on.set()
        assert slow.result(2 * WAIT_S) == 6000
