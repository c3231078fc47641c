"""The stop of a server as clients see it, from the signal to the exit."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.draining import NOT_SERVING, SERVING, Client, Load, outcome, request_for
from tests.support.grpc_transports import each_transport
from tests.support.raw_http import infer_body, raw_http, request
from tests.support.servers import (
    IN_PROCESS,
    WAIT_S,
    ServerProcess,
    eventually,
    serving_process,
    started,
    write_model,
)
from tests.support.waiting import given_time
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
SEQUENCES = "sequence_batching { max_sequence_idle_microseconds: 600000000 } instance_group { count: 2 }"
CLOSED = "GRPC server is shutting down and has stopped accepting new requests."

grpc_transport = each_transport()
pytestmark = pytest.mark.usefixtures("grpc_transport")


class Site:
    """A directory with models and the files that steer them."""

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
        """Number of requests that a model has run in its life."""
        return int((self.path / f"ran-{name}").read_text())


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(tmp_path)
    made.model("a")
    return made


def test_no_request_fails_of_clients_that_stop_when_readiness_goes_off(site: Site) -> None:
    completed = 0

    def drain(delay_s: float) -> bool:
        """Stops a server under load; False if the clients stopped too late for that delay."""
        nonlocal completed
        with serving_process(site.models, flags=[f"--drain-delay={delay_s:g}"]) as server:
            load = Load(server.address, "a", polite=True)
            eventually(lambda: load.completed > 50, "there is load")
            before = time.monotonic()
            server.signal(signal.SIGTERM)
            load.join()
            in_time = time.monotonic() - before < delay_s
            if in_time:
                assert server.process.poll() is None, "they stopped before the server did"
                assert load.failures == []
            assert server.wait() == 0
            assert time.monotonic() - before >= delay_s
        completed += load.completed
        assert site.ran() == completed
        return in_time

    given_time(drain, 3)


def test_no_request_that_was_accepted_fails(site: Site) -> None:
    with serving_process(site.models) as server:
        load = Load(server.address, "a", polite=False)
        eventually(lambda: load.completed > 50, "there is load")
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        load.enough.set()
        load.join()
    assert {code for code, _ in load.failures} <= {"UNAVAILABLE"}, load.failures
    assert site.ran() == load.completed, f"what was run was answered: {load.failures}"


def test_everything_is_served_during_the_drain_delay(site: Site) -> None:
    site.model("chat", SEQUENCES)

    def ask(client: Client, late: Client) -> Iterator[Any]:
        yield client.probes()
        yield outcome(client.send("a"))
        yield late.probes()
        with suppress(grpc.RpcError):
            yield [answer.error_message for answer in late.stream(iter([request_for("a")]))]
        yield outcome(late.send("chat", sequence_id=1, sequence_start=True))
        yield outcome(late.send("chat", sequence_id=1, sequence_end=True))

    def drain(delay_s: float) -> bool:
        """Asks a server that drains; False if the delay was over before the last answer."""
        with (
            serving_process(site.models, flags=[f"--drain-delay={delay_s:g}"]) as server,
            closing(Client(server.address)) as client,
        ):
            assert (client.health(), client.probes()) == (SERVING, [True, True, True])
            before = time.monotonic()
            server.signal(signal.SIGTERM)
            health = eventually(lambda: (seen := client.health()) != SERVING and seen, "readiness goes off")
            with closing(Client(server.address)) as late:
                found = list(ask(client, late))
            stops = "Waiting for in-flight requests" in server.errors
            in_time = time.monotonic() - before < delay_s
            if in_time:
                assert health == NOT_SERVING
                unready = [True, False, False]
                assert found == [unready, "OK", unready, [""], "OK", "OK"]
                assert not stops, "the delay is not over"
            assert server.wait() == 0
            assert client.health() == "UNAVAILABLE"
        return in_time

    given_time(drain, 2)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_drain_delay(site: Site, second: signal.Signals) -> None:
    with (
        serving_process(site.models, flags=["--drain-delay=600"]) as server,
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
        assert time.monotonic() - before >= 2
        assert server.logs()[-1]["message"] == "Exit timeout expired. Exiting immediately."
        assert outcome(hanging) == "UNAVAILABLE"


def ready_address(server: ServerProcess) -> str:
    server.wait_ready()
    return server.address


def test_a_stream_gets_its_answers_and_then_a_status(site: Site) -> None:
    site.tell("busy-a")
    with serving_process(site.models) as server, closing(Client(server.address)) as client:
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


def test_open_http_connections_are_served_until_all_else_has_ended(site: Site) -> None:
    site.model("b")
    site.tell("busy-a")
    body = infer_body("IN", "FP32", [1.0]).replace(b"[1, 1]", b"[1]")
    ask = request("POST", "/v2/models/b/infer", body)
    with serving_process(site.models) as server, closing(Client(server.address)) as client:
        with raw_http(server.http_address) as kept:
            kept.send(ask)
            first = kept.response()
            assert first is not None and first.status == 200, first
            hanging = client.send("a")
            site.wait_for("running-a")
            server.signal(signal.SIGINT)

            def refused() -> bool:
                with raw_http(server.http_address) as late:
                    late.send(ask)
                    answer = late.response()
                    assert answer is not None
                    return answer.status == 503 and answer.json() == {"error": "Server exiting"}

            eventually(refused, "new connections are refused")
            for _ in range(3):
                kept.send(ask)
                answer = kept.response()
                assert answer is not None and answer.status == 200, answer
            site.take_back("busy-a")
            assert outcome(hanging) == "OK"
            assert kept.response() is None, "it is closed"
        assert server.wait() == 0


def test_what_was_sent_on_a_stream_before_the_signal_is_answered(site: Site) -> None:
    """Also what the server has not read by then: here more than fits into its buffers."""
    total = 100
    request = request_for("a")
    request.inputs[0].shape[:] = [1 << 18]
    request.raw_input_contents[:] = [bytes(1 << 20)]
    config = site.models / "a" / "config.pbtxt"
    config.write_text(config.read_text().replace("dims: [ 1 ]", "dims: [ -1 ]"))
    with serving_process(site.models) as server, closing(Client(server.address)) as client:
        sent, release = threading.Event(), threading.Event()

        def requests() -> Iterator[Any]:
            yield from [request] * total
            sent.set()
            release.wait(WAIT_S)

        call = client.stream(requests())
        answers: list[str] = []

        def read() -> None:
            with suppress(grpc.RpcError):
                answers.extend(answer.error_message for answer in call)

        reader = threading.Thread(target=read)
        reader.start()
        assert sent.wait(WAIT_S)
        server.signal(signal.SIGTERM)
        reader.join(WAIT_S)
        release.set()
        assert answers == [""] * total
        assert (call.code(), call.details()) == (grpc.StatusCode.UNAVAILABLE, CLOSED)
        assert server.wait() == 0


def test_a_watch_is_told_of_every_change(site: Site, early: tuple[ServerProcess, Client]) -> None:
    server, client = early
    watch = client.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=WAIT_S)
    assert next(watch) == NOT_SERVING
    site.take_back("hold-b")
    assert next(watch) == SERVING
    server.signal(signal.SIGTERM)
    assert next(watch) == NOT_SERVING
    with pytest.raises(grpc.RpcError):
        next(watch)
    assert (watch.code(), watch.details()) == (grpc.StatusCode.UNAVAILABLE, CLOSED)
    assert server.wait() == 0


def test_live_sequences_are_gone_on_with_until_they_end(site: Site) -> None:
    site.model("chat", SEQUENCES)
    with serving_process(site.models) as server, closing(Client(server.address)) as client:
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
    """A server that has loaded model `a` and, until the test lets it go on, loads `b`; `c` comes after it."""
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
        assert site.ran("a") == 0  # `b` may have been stopped while it loaded
        assert "Traceback" not in server.errors


def test_a_second_signal_ends_the_start(site: Site) -> None:
    with loading(site, "--grpc-port=0") as server:
        server.signal(signal.SIGTERM)
        eventually(lambda: "Waiting for in-flight requests" in server.errors, "it stops")
        server.signal(signal.SIGINT)
        assert server.wait() == 128 + signal.SIGINT


@pytest.mark.parametrize(
    ("flags", "code"),
    [([f"--exit-timeout-secs={WAIT_S:g}"], 0), (["--exit-timeout-secs=1", IN_PROCESS], 1)],
    ids=["worker", "in_process"],
)
def test_a_load_that_hangs_does_not_hold_up_the_end_of_a_start(
    site: Site, flags: list[str], code: int
) -> None:
    """A worker that loads is killed; a thread that loads is left behind."""
    with loading(site, "--grpc-port=0", *flags) as server:
        server.signal(signal.SIGTERM)
        assert server.wait() == code


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
