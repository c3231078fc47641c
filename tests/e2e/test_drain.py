"""What clients see of a server that is asked to stop, from the signal to the exit."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.servers import WAIT_S, RawClient, ServerProcess, eventually, serving, started, write_model
from tritonclient.grpc import service_pb2

MODEL = """
import json, time
from pathlib import Path
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self._ran = 0
        self._at = Path(json.loads(args["model_config"])["parameters"]["at"]["string_value"])
        self._name = args["model_name"]
        (self._at / f"loading-{self._name}").touch()
        while (self._at / f"hold-{self._name}").exists():
            time.sleep(0.005)

    def execute(self, requests):
        (self._at / f"running-{self._name}").touch()
        while (self._at / f"busy-{self._name}").exists():
            time.sleep(0.005)
        self._ran += len(requests)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])
            for request in requests
        ]

    def finalize(self):
        (self._at / f"ran-{self._name}").write_text(str(self._ran))
"""
CONFIG = """
    backend: "python"
    input {{ name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }}
    output {{ name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }}
    parameters {{ key: "at" value {{ string_value: "{at}" }} }}
    {more}
"""
SEQUENCES = "sequence_batching { max_sequence_idle_microseconds: 60000000 } instance_group { count: 2 }"
SERVICE = "/inference.GRPCInferenceService/"
CLOSED = "GRPC server is shutting down and has stopped accepting new requests."
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"


class Site:
    """A directory with models and the files by which they are told what to do."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.models = path / "models"

    def model(self, name: str, more: str = "") -> None:
        write_model(self.models, name, CONFIG.format(at=self.path, more=more), {"model.py": MODEL})

    def tell(self, what: str) -> None:
        (self.path / what).touch()

    def take_back(self, what: str) -> None:
        (self.path / what).unlink()

    def wait_for(self, what: str) -> None:
        eventually((self.path / what).exists, what)

    def ran(self, name: str = "a") -> int:
        """How many requests a model has run in its life."""
        return int((self.path / f"ran-{name}").read_text())


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(tmp_path)
    made.model("a")
    return made


def request_for(name: str, **parameters: int | bool) -> Any:
    request = service_pb2.ModelInferRequest(model_name=name, raw_input_contents=[b"\0" * 4])
    request.inputs.add(name="IN", datatype="FP32", shape=[1])
    for key, value in parameters.items():
        if isinstance(value, bool):
            request.parameters[key].bool_param = value
        else:
            request.parameters[key].int64_param = value
    return request


class Client(RawClient):
    """A client with a connection of its own that says what came of a call in short."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])

    def send(self, name: str, **parameters: int | bool) -> Any:
        """Sends a request; the future has the answer."""
        method = self.channel.unary_unary(
            SERVICE + "ModelInfer", request_serializer=service_pb2.ModelInferRequest.SerializeToString
        )
        return method.future(request_for(name, **parameters), timeout=WAIT_S)

    def stream(self, requests: Iterator[Any]) -> Any:
        """Opens a stream."""
        method = self.channel.stream_stream(
            SERVICE + "ModelStreamInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )
        return method(requests, timeout=WAIT_S)

    def health(self) -> Any:
        """What the health service says, or the code of an error."""
        try:
            return self.channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=WAIT_S)
        except grpc.RpcError as error:
            return error.code().name

    def probes(self, model: str = "a") -> list[Any]:
        """Live, ready, the model ready; for an error its code and text."""

        def told(ask: Callable[[], bool]) -> Any:
            try:
                return ask()
            except grpc.RpcError as error:
                return error.code().name, error.details()

        return [
            told(lambda: self("ServerLive", service_pb2.ServerLiveRequest()).live),
            told(lambda: self("ServerReady", service_pb2.ServerReadyRequest()).ready),
            told(lambda: self("ModelReady", service_pb2.ModelReadyRequest(name=model)).ready),
        ]


def outcome(future: Any) -> str:
    """How a request ended: ``OK``, or the code of its error."""
    error = future.exception(WAIT_S)
    return "OK" if error is None else str(error.code().name)


class Load:
    """Clients that send one request after the other, half of them over streams, and count what comes of it.

    Args:
        address: The server's.
        polite: Whether they send no more once the health service says that the server is not ready.
    """

    def __init__(self, address: str, polite: bool) -> None:
        self._address = address
        self._lock = threading.Lock()
        self.answered = 0
        self.failures: list[tuple[str, str]] = []
        self.enough = threading.Event()
        work = [self._unary, self._unary, self._stream, self._stream]
        self._threads = [
            threading.Thread(target=each) for each in (*work, *([self._watch] if polite else []))
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()

    def _count(self) -> None:
        with self._lock:
            self.answered += 1

    def _unary(self) -> None:
        with closing(Client(self._address)) as client:
            while not self.enough.is_set():
                error = client.send("a").exception(WAIT_S)
                if error is not None:
                    self.failures.append((error.code().name, error.details()))
                    return
                self._count()

    def _stream(self) -> None:
        answers: queue.Queue[None] = queue.Queue()

        def requests() -> Iterator[Any]:
            yield request_for("a")
            yield request_for("a")  # so that there always is one in flight
            while not self.enough.is_set():
                answers.get(timeout=WAIT_S)
                yield request_for("a")

        with closing(Client(self._address)) as client:
            try:
                for response in client.stream(requests()):
                    assert not response.error_message, response.error_message
                    self._count()
                    answers.put(None)
            except grpc.RpcError as error:
                self.failures.append((error.code().name, error.details()))
                answers.put(None)
                self.enough.set()

    def _watch(self) -> None:
        with closing(Client(self._address)) as client:
            while not self.enough.is_set():
                if client.health() != SERVING:
                    self.enough.set()
                self.enough.wait(0.01)


def test_no_request_fails_of_clients_that_stop_when_readiness_goes_off(site: Site) -> None:
    with serving(site.models, flags=["--drain-delay=1.5"]) as server:
        load = Load(server.address, polite=True)
        eventually(lambda: load.answered > 50, "there is load")
        before = time.monotonic()
        server.signal(signal.SIGTERM)
        load.join()
        assert time.monotonic() - before < 1.4, "they stopped before the server did"
        assert load.failures == []
        assert server.wait() == 0
        assert time.monotonic() - before >= 1.5
    assert site.ran() == load.answered


def test_no_request_that_was_accepted_fails(site: Site) -> None:
    with serving(site.models) as server:
        load = Load(server.address, polite=False)
        eventually(lambda: load.answered > 50, "there is load")
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        load.enough.set()
        load.join()
    assert {code for code, _ in load.failures} <= {"UNAVAILABLE"}, load.failures
    assert site.ran() == load.answered, "what was run was answered"


def test_everything_is_served_during_the_drain_delay(site: Site) -> None:
    site.model("chat", SEQUENCES)
    with serving(site.models, flags=["--drain-delay=2"]) as server, closing(Client(server.address)) as client:
        assert (client.health(), client.probes()) == (SERVING, [True, True, True])
        server.signal(signal.SIGTERM)
        eventually(lambda: client.health() == NOT_SERVING, "readiness goes off")
        assert client.probes() == [True, False, False]
        assert outcome(client.send("a")) == "OK"
        with closing(Client(server.address)) as late:
            assert late.probes() == [True, False, False]
            assert [answer.error_message for answer in late.stream(iter([request_for("a")]))] == [""]
            assert outcome(late.send("chat", sequence_id=1, sequence_start=True)) == "OK"
            assert outcome(late.send("chat", sequence_id=1, sequence_end=True)) == "OK"
        assert "Waiting for in-flight requests" not in server.errors, "the delay was over"
        assert server.wait() == 0
        assert client.health() == "UNAVAILABLE"


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_drain_delay(site: Site, second: signal.Signals) -> None:
    with (
        serving(site.models, flags=["--drain-delay=600"]) as server,
        closing(Client(server.address)) as client,
    ):
        server.signal(signal.SIGTERM)
        eventually(lambda: client.health() == NOT_SERVING, "readiness goes off")
        server.signal(second)
        assert server.wait() == 128 + second


def test_the_exit_timeout_follows_the_drain_delay(site: Site) -> None:
    flags = ["--drain-delay=1", "--exit-timeout-secs=1"]
    site.tell("busy-a")
    with (
        started(f"--model-repository={site.models}", "--grpc-port=0", *flags) as server,
        closing(Client(ready_address(server))) as client,
    ):
        hanging = client.send("a")
        site.wait_for("running-a")
        before = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.wait() == 1
        assert 2 <= time.monotonic() - before < 8
        assert server.logs()[-1]["message"] == "Exit timeout expired. Exiting immediately."
        assert outcome(hanging) == "UNAVAILABLE"


def ready_address(server: ServerProcess) -> str:
    server.wait_ready()
    return server.address


def test_a_stream_gets_its_answers_and_then_a_status(site: Site) -> None:
    site.tell("busy-a")
    with serving(site.models) as server, closing(Client(server.address)) as client:
        release = threading.Event()

        def requests() -> Iterator[Any]:
            yield from [request_for("a")] * 3
            release.wait(WAIT_S)

        call = client.stream(requests())
        site.wait_for("running-a")
        # On the same connection, so the server has read the requests before this one.
        client("ServerLive", service_pb2.ServerLiveRequest())
        server.signal(signal.SIGTERM)
        eventually(lambda: "Waiting for in-flight requests" in server.errors, "it stops")
        site.take_back("busy-a")
        answers = []
        with pytest.raises(grpc.RpcError):
            for answer in call:
                answers.append(answer.error_message)
        release.set()
        assert answers == [""] * 3
        assert (call.code(), call.details()) == (grpc.StatusCode.UNAVAILABLE, CLOSED)
        assert server.wait() == 0


def test_live_sequences_are_gone_on_with_until_they_end(site: Site) -> None:
    site.model("chat", SEQUENCES)
    with serving(site.models) as server, closing(Client(server.address)) as client:
        to_send: queue.Queue[Any] = queue.Queue()
        call = client.stream(iter(to_send.get, None))
        for number in (1, 2):
            assert outcome(client.send("chat", sequence_id=number, sequence_start=True)) == "OK"
        server.signal(signal.SIGTERM)
        eventually(lambda: client.probes()[0] is not True, "it stops")
        assert client.probes() == [
            ("UNAVAILABLE", "Server exiting"),
            ("UNAVAILABLE", "Server exiting"),
            ("UNAVAILABLE", "Server not ready"),
        ]
        assert client.health() == NOT_SERVING
        for request, text in (
            (client.send("a"), "Server exiting"),
            (client.send("chat", sequence_id=3), "Server exiting"),
            (client.send("nope", sequence_id=1), "Server exiting"),
            (
                client.send("chat", sequence_id=3, sequence_start=True),
                "Server is stopping, scheduler for model has stopped accepting new inference requests",
            ),
        ):
            error = request.exception(WAIT_S)
            assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, text)
        assert outcome(client.send("chat", sequence_id=1)) == "OK"
        assert outcome(client.send("chat", sequence_id=1, sequence_end=True)) == "OK"
        to_send.put(request_for("a"))
        assert next(call).error_message == "Server exiting"
        to_send.put(request_for("chat", sequence_id=2))
        assert next(call).error_message == ""
        assert server.process.poll() is None
        to_send.put(request_for("chat", sequence_id=2, sequence_end=True))
        assert next(call).error_message == ""
        with pytest.raises(grpc.RpcError):
            next(call)
        to_send.put(None)
        assert call.details() == CLOSED
        assert server.wait() == 0


@contextmanager
def loading(site: Site, *flags: str) -> Iterator[ServerProcess]:
    """A server that has loaded model `a` and, until it is told otherwise, loads `b`; `c` comes after it."""
    site.model("b")
    site.model("c")
    site.tell("hold-b")
    arguments = [f"--model-repository={site.models}", "--model-load-thread-count=1", *flags]
    with started(*arguments) as server:
        site.wait_for("loading-b")
        yield server


def test_a_signal_gives_the_start_up(site: Site) -> None:
    with loading(site, "--grpc-port=0") as server:
        server.signal(signal.SIGTERM)
        eventually(lambda: "Waiting for in-flight requests" in server.errors, "it stops")
        site.take_back("hold-b")
        assert server.wait() == 0
        assert not (site.path / "loading-c").exists()
        assert server.output == ""
        assert site.ran("a") == site.ran("b") == 0
        assert "Traceback" not in server.errors


def test_a_second_signal_ends_the_start(site: Site) -> None:
    with loading(site, "--grpc-port=0") as server:
        server.signal(signal.SIGTERM)
        eventually(lambda: "Waiting for in-flight requests" in server.errors, "it stops")
        server.signal(signal.SIGINT)
        assert server.wait(5) == 128 + signal.SIGINT


def test_a_load_that_hangs_does_not_hold_up_the_end_of_a_start(site: Site) -> None:
    with loading(site, "--grpc-port=0", "--exit-timeout-secs=1") as server:
        server.signal(signal.SIGTERM)
        assert server.wait(10) == 1


@pytest.fixture
def early(site: Site) -> Iterator[tuple[ServerProcess, Client]]:
    """A server that listens while it loads, as in `loading`, and a client of it."""
    address = f"unix:{site.path / 'socket'}"
    with (
        loading(site, f"--grpc-address={address}", "--listen-while-loading") as server,
        closing(Client(address)) as client,
    ):
        yield server, client


def test_probes_while_models_are_loaded(site: Site, early: tuple[ServerProcess, Client]) -> None:
    server, client = early
    assert (client.health(), client.probes("a"), client.probes("b")) == (
        NOT_SERVING,
        [True, False, True],
        [True, False, False],
    )
    assert outcome(client.send("a")) == "OK"
    assert outcome(client.send("b")) == "NOT_FOUND"
    site.take_back("hold-b")
    server.wait_ready()
    assert (client.health(), client.probes("b")) == (SERVING, [True, True, True])
    assert server.stop() == 0


def test_a_signal_while_models_are_loaded_lets_requests_finish(
    site: Site, early: tuple[ServerProcess, Client]
) -> None:
    server, client = early
    site.tell("busy-a")
    running = client.send("a")
    site.wait_for("running-a")
    server.signal(signal.SIGTERM)
    eventually(lambda: "Waiting for in-flight requests" in server.errors, "it stops")
    site.take_back("hold-b")
    site.take_back("busy-a")
    assert outcome(running) == "OK"
    assert server.wait() == 0
    assert site.ran("a") == 1


def test_a_failure_while_clients_are_connected_ends_the_start(
    site: Site, early: tuple[ServerProcess, Client]
) -> None:
    server, client = early
    assert client.health() == NOT_SERVING
    (site.models / "c" / "config.pbtxt").write_text("nonsense")
    site.take_back("hold-b")
    assert server.wait() == 1
    assert server.errors.splitlines()[-1] == "error: creating server: Internal - failed to load all models"
    assert client.health() == "UNAVAILABLE"
