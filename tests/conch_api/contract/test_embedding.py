"""Servers inside a program: started and stopped from anywhere, several at once, nothing left behind."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.support.leaks import held, still_leaked
from tests.support.servers import EXAMPLES, START_S, WAIT_S, eventually, free_port, past_deadline, write_model

import conch
from conch.core.tensor import Array

X, Y = conch.Tensor("X"), conch.Tensor("Y")
HERE: dict[str, Any] = {"backend_config": ["python,placement=in_process"]}
NO_PORTS: dict[str, Any] = {"grpc_port": None, "http_port": None, "metrics_port": None, **HERE}
FREE_PORTS: dict[str, Any] = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, **HERE}


def adding(number: float, **flags: Any) -> conch.Server:
    """A server with a function that adds a number."""
    server = conch.Server(**{**FREE_PORTS, **flags})
    server.bind("add", conch.batch(lambda X: X + np.float32(number)), [X], [Y])
    return server


def answer(server: conch.Server) -> float:
    value: float = server.infer("add", {"X": [[1.0]]})["Y"].item()
    return value


def test_a_repository_is_served_and_asked_without_a_socket() -> None:
    with conch.Server(EXAMPLES, model_control_mode="explicit", load_model=["simple"], **NO_PORTS) as server:
        assert server.ready
        assert (server.grpc_url, server.http_url, server.metrics_url) == (None, None, None)
        row = np.arange(16, dtype=np.int32)[np.newaxis]
        result = server.infer("simple", {"INPUT0": row, "INPUT1": row})
        np.testing.assert_array_equal(result["OUTPUT0"], 2 * row)
        with pytest.raises(conch.NotFoundError):
            server.infer("strings", {})
        server.load("add_sub_python")
        assert server.model_ready("add_sub_python")
        server.unload("add_sub_python")
        states = {entry.name: entry.state for entry in server.models}
        assert states["simple"] == "READY"
        assert states["digits"] == ""
    assert server.wait(0)
    with pytest.raises(conch.UnavailableError, match="has been stopped"):
        server.infer("simple", {})


@pytest.mark.slow
def test_twenty_starts_and_stops_leave_nothing() -> None:
    with adding(0) as server:
        answer(server)
    before = held()
    for number in range(20):
        with adding(number) as server:
            assert server.grpc_url is not None
            assert answer(server) == number + 1
            with conch.Client(server.grpc_url, "add") as client:
                assert client.infer_sample([1.0])["Y"].item() == number + 1
    assert still_leaked(before) == []


def test_two_servers_at_once_are_two_servers(tmp_path: Path) -> None:
    code = """
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def initialize(self, args):
                self.family = pb_utils.MetricFamily("told", "", pb_utils.MetricFamily.GAUGE)
                self.metric = self.family.Metric()
                self.metric.set(NUMBER)

            def execute(self, requests):
                return [pb_utils.InferenceResponse([]) for _ in requests]
    """
    config = 'backend: "python" input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ' + (
        'output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }'
    )
    servers = []
    for number in (1, 2):
        repository = tmp_path / str(number)
        repository.mkdir()
        text = textwrap.dedent(code).replace("NUMBER", str(number))
        write_model(repository, "metric", config, {"model.py": text})
        servers.append(adding(number, model_repository=repository))
    first, second = servers
    with first, second:
        assert (answer(first), answer(second)) == (2.0, 3.0)
        texts = [httpx.get(str(server.metrics_url)).text for server in servers]
        assert "told 1" in texts[0]
        assert "told 2" in texts[1]
        assert 'nv_inference_count{model="add",version="1"} 1' in texts[0]
        first.stop()
        assert answer(second) == 3.0
        assert second.grpc_url is not None
        with conch.Client(second.grpc_url, "add") as client:
            assert client.infer_sample([1.0])["Y"].item() == 3.0


def test_threads_start_use_and_stop_it() -> None:
    server = adding(1)
    found: list[Any] = []

    def run() -> None:
        with server:
            found.append(answer(server))

    thread = threading.Thread(target=run)
    thread.start()
    assert server.wait(WAIT_S)
    thread.join()
    assert found == [2.0]
    assert server.stop()


def test_a_server_is_started_once() -> None:
    server = adding(1, **NO_PORTS)
    with pytest.raises(conch.UnavailableError, match="has not been started"):
        answer(server)
    with server:
        with pytest.raises(RuntimeError, match="the server runs; make another one"):
            server.start()
        with server:
            pass
    for again in (server.start, server.__enter__, server.serve):
        with pytest.raises(RuntimeError, match="has been stopped; make another one"):
            again()
    with pytest.raises(conch.UnavailableError, match="has been stopped"):
        server.bind("other", lambda requests: requests, [X], [Y])
    never = adding(1, **NO_PORTS)
    assert never.stop()
    assert never.wait(0)


def test_a_start_that_fails_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(conch.InvalidArgumentError, match="repository path is not a valid directory"):
        conch.Server(tmp_path / "missing", **NO_PORTS).start()
    write_model(tmp_path, "broken", 'backend: "python"', {"model.py": "raise ValueError('no good')"})
    with pytest.raises(conch.InternalError, match=r"'broken'.*ValueError: no good"):
        conch.Server(tmp_path, **NO_PORTS).start()
    with adding(1) as server:
        taken = adding(2, grpc_port=server.grpc_port)
        with pytest.raises(conch.UnavailableError, match="already in use"):
            taken.start()
        assert taken.wait(0)
    server = adding(1, **NO_PORTS)
    wrong = conch.ModelConfig(batcher=conch.DynamicBatcher(preferred_batch_size=[99]))
    server.bind("bad", conch.batch(lambda X: X), [X], [Y], wrong)
    with pytest.raises(conch.InternalError, match="'bad': dynamic batching preferred size must be <= max"):
        server.start()


def write_slow(repository: Path) -> Path:
    """A model that says in its folder that it has begun to load, and goes on when a file there says so."""
    code = """
        import time
        from pathlib import Path

        class TritonPythonModel:
            def initialize(self, args):
                here = Path(args["model_repository"])
                (here / "begun").touch()
                while not (here / "go").exists():
                    time.sleep(0.01)

            def execute(self, requests):
                return []
    """
    return write_model(repository, "slow", 'backend: "python"', {"model.py": textwrap.dedent(code)})


def test_a_stop_from_elsewhere_ends_a_start(tmp_path: Path) -> None:
    here = write_slow(tmp_path)
    server = conch.Server(tmp_path, exit_timeout_secs=int(WAIT_S), **NO_PORTS)
    raised: list[BaseException] = []

    def start() -> None:
        try:
            server.start()
        except conch.ConchError as error:
            raised.append(error)

    starter = threading.Thread(target=start)
    starter.start()
    eventually((here / "begun").exists, "the model is being loaded")
    stopper = threading.Thread(target=server.stop)
    stopper.start()
    eventually(lambda: "has been stopped" in repr(server), "it is being stopped")
    (here / "go").touch()
    stopper.join(WAIT_S)
    starter.join(WAIT_S)
    assert [type(error) for error in raised] == [conch.UnavailableError]


def test_inside_an_event_loop() -> None:
    @conch.sample
    def count(N: Array) -> Iterator[Array]:
        for number in range(int(N[0])):
            yield np.array([number], np.int32)

    async def run() -> None:
        server = adding(1)
        config = conch.ModelConfig(batching=False, decoupled=True)
        server.bind("count", count, [conch.Tensor("N", np.int32)], [conch.Tensor("I", np.int32)], config)
        await asyncio.to_thread(server.start)
        try:
            several = [server.infer_async("add", {"X": [[float(number)]]}) for number in range(50)]
            assert [result["Y"].item() for result in await asyncio.gather(*several)] == list(range(1, 51))
            assert [result["I"].item() async for result in server.stream_async("count", {"N": [40]})] == list(
                range(40)
            )
            stream = server.stream_async("count", {"N": [1000]})
            assert (await anext(stream))["I"].item() == 0
            await stream.aclose()  # type: ignore[attr-defined]
            with pytest.raises(conch.InvalidArgumentError, match="use stream"):
                await server.infer_async("count", {"N": [3]})
            for url in (server.grpc_url, server.http_url):
                assert url is not None
                async with conch.AsyncClient(url, "add") as client:
                    assert (await client.infer_sample([1.0]))["Y"].item() == 2.0
                    assert (await client.infer_batch(X=[[1.0]]))["Y"].item() == 2.0
                    with pytest.raises(conch.InvalidArgumentError):
                        await client.infer_batch([1.0])
            assert server.grpc_url is not None
            async with conch.AsyncClient(server.grpc_url, "count") as client:
                assert [result["I"].item() async for result in client.stream_batch([3])] == [0, 1, 2]
                early = client.stream_batch([1000])
                await anext(early)
                await early.aclose()  # type: ignore[attr-defined]
        finally:
            assert await asyncio.to_thread(server.stop)

    asyncio.run(run())


def test_inside_a_loop_that_is_blocked_meanwhile() -> None:
    async def notebook() -> float:
        with adding(1) as server:  # as a cell of a notebook does it
            return answer(server)

    assert asyncio.run(notebook()) == 2.0


def test_time_limits_end_requests() -> None:
    gates: list[threading.Event] = []
    seen: list[Any] = []

    def slow(requests: list[conch.Request]) -> Iterator[list[Any]]:
        gate = gates[-1]
        yield [request["X"] for request in requests]
        gate.wait(WAIT_S)
        yield [request["X"] for request in requests]

    def streamed(seconds: float) -> None:
        gates.append(threading.Event())
        with pytest.raises(conch.DeadlineExceededError, match=rf"no answer within {seconds} s"):
            seen.extend(server.stream("slow", {"X": [1.0]}, timeout=seconds))
        gates[-1].set()

    with conch.Server(**NO_PORTS) as server:
        server.bind("slow", slow, [X], [Y], conch.ModelConfig(batching=False, decoupled=True))
        past_deadline(streamed, lambda: seen, first_s=0.05)
        gates.append(threading.Event())
        with pytest.raises(conch.DeadlineExceededError):
            server.infer("slow", {"X": [1.0]}, timeout=0.05)
        gates[-1].set()


def test_a_reader_that_stops_reading_does_not_hold_up_the_end() -> None:
    going, ended = threading.Event(), threading.Event()

    def forever(requests: list[conch.Request]) -> Iterator[list[Any]]:
        try:
            while True:
                going.set()
                yield [request["X"] for request in requests]
        finally:
            ended.set()

    server = conch.Server(exit_timeout_secs=0, **NO_PORTS)
    server.bind("forever", forever, [X], [Y], conch.ModelConfig(batching=False, decoupled=True))
    server.start()
    stream = server.stream("forever", {"X": [1.0]})
    next(stream)
    assert going.wait(WAIT_S)
    stopper = threading.Thread(target=lambda: stopped.append(server.stop()))
    stopped: list[bool] = []
    stopper.start()
    stopper.join(WAIT_S)
    assert stopped == [False]
    with pytest.raises(conch.UnavailableError, match="the server has been stopped"):
        list(stream)
    assert ended.wait(WAIT_S)
    stream.close()


def test_inputs_that_can_not_be() -> None:
    with adding(1, **NO_PORTS) as server:
        for inputs, text in (
            ({"X": [["a"]]}, "input 'X' can't be made an array"),
            ({"X": np.array([["a"]])}, "input 'X'"),
            ({"X": np.array([[object()]])}, "has an element of object among its numbers"),
            ({"X": np.zeros((1, 1), complex)}, "input 'X': arrays of dtype complex128 have no datatype"),
            ({"Z": [[1.0]]}, "'Z'"),
            ({}, "expected 1 inputs but got 0"),
        ):
            with pytest.raises(conch.InvalidArgumentError, match=text):
                server.infer("add", inputs)
        with pytest.raises(conch.InvalidArgumentError, match="output 'Z'"):
            server.infer("add", {"X": [[1.0]]}, outputs=["Z"])
        with pytest.raises(conch.InvalidArgumentError, match="parameter 'a' must be a boolean"):
            server.infer("add", {"X": [[1.0]]}, parameters={"a": None})  # type: ignore[dict-item]
        with pytest.raises(TypeError, match="no option 'prio'"):
            server.infer("add", {"X": [[1.0]]}, prio=1)  # type: ignore[call-arg]
        big_endian = np.array([[1.0]], ">f4")
        assert server.infer("add", {"X": big_endian})["Y"].item() == 2.0
        assert server.infer("add", {"X": np.ones((4, 2), np.float32)[:, ::2]})["Y"].shape == (4, 1)


@pytest.mark.process
def test_the_program_keeps_its_logging_and_signals(tmp_path: Path) -> None:
    def state() -> Any:
        names = (None, "conch", "conch_control", "asyncio")
        loggers = [logging.getLogger(name) for name in names]
        return (
            [(logger.level, list(logger.handlers), logger.propagate) for logger in loggers],
            [
                signal.getsignal(number)
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGBUS)
            ],
            sys.getswitchinterval(),
        )

    log = tmp_path / "access.log"
    before = state()
    with adding(1, access_log=log, access_log_format="text") as server:
        assert state() == before
        answer(server)
        httpx.get(f"{server.http_url}/v2/health/ready")
    assert state() == before
    assert "direct" in log.read_text()
    with pytest.raises(conch.FlagError, match="access_log can't be opened"):
        adding(1, access_log=tmp_path / "no" / "log").start()


SCRIPT = """
import sys, threading
import conch

server = conch.Server(grpc_port={port}, http_port=None, metrics_port=None)
server.bind("m", conch.batch(lambda X: X), [conch.Tensor("X")], [conch.Tensor("Y")])
{rest}
print("over", flush=True)
"""


def script(rest: str, port: int = 0) -> subprocess.Popen[str]:
    code = SCRIPT.format(rest=textwrap.dedent(rest), port=port)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_ends_with_a_signal(number: signal.Signals) -> None:
    port = free_port()
    process = script("server.serve()", port)
    try:
        conch.Client(f"127.0.0.1:{port}", "m", wait_s=START_S)
        with conch.Client(f"127.0.0.1:{port}", "m") as client:
            assert client.infer_sample([1.0])["Y"].item() == 1.0
        os.kill(process.pid, number)
        output, errors = process.communicate(timeout=START_S)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, output) == (0, "over\n"), errors
    assert "| m     | 1       | READY  |        |\n" in errors, "what conch serve prints"
    assert re.search(rf"\| gRPC +\| 127\.0\.0\.1:{port} ", errors)


CELL = """
server = conch.Server(grpc_port={port}, http_port=None, metrics_port=None)
server.bind("m", conch.batch(lambda X: {factor} * X), [conch.Tensor("X")], [conch.Tensor("Y")])
server.start()
"""


@pytest.mark.process
def test_a_cell_that_is_run_again_replaces_its_server() -> None:
    port = free_port()
    cells = [CELL.format(port=port, factor=factor) for factor in (2, 3)]
    client = (
        f"client = conch.Client('127.0.0.1:{port}', 'm'); print(client.infer_sample([1.0])['Y'].item())\n"
    )
    stop = "client.close(); server.stop()\n"
    process = subprocess.run(
        [sys.executable, "-i", "-q"],
        input="import conch\n" + cells[0] + client + "client.close()\n" + cells[1] + client + stop,
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    lines = [line for line in process.stdout.splitlines() if line]
    assert [line for line in lines if line[0].isdigit()] == ["2.0", "3.0"], process.stdout + process.stderr
    shown = f"<conch.Server that runs: gRPC 127.0.0.1:{port}; models: m (1)>"
    assert lines.count(shown) == 2, "a session shows what start() returns"


@pytest.mark.process
def test_serve_gives_up_its_start_with_a_signal(tmp_path: Path) -> None:
    here = write_slow(tmp_path)
    process = script(
        f"conch.Server({str(tmp_path)!r}, grpc_port=0, http_port=None, metrics_port=None, "
        f"exit_timeout_secs=120, backend_config=['python,placement=worker']).serve()"
    )
    try:
        eventually((here / "begun").exists, "the model is being loaded")
        os.kill(process.pid, signal.SIGTERM)
        output, errors = process.communicate(timeout=START_S)
    finally:
        process.kill()
        process.wait()
        (here / "go").touch()
    assert (process.returncode, output) == (0, "over\n"), errors


@pytest.mark.process
def test_serve_ends_when_another_thread_stops_the_server() -> None:
    port = free_port()
    stop = "threading.Thread(target=lambda: (sys.stdin.read(), server.stop())).start()"
    process = script(f"{stop}; server.serve()", port)
    try:
        with conch.Client(f"127.0.0.1:{port}", "m", wait_s=START_S) as client:
            client.wait()
        output, errors = process.communicate(timeout=START_S)  # which ends its input
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, output) == (0, "over\n"), errors


@pytest.mark.process
@pytest.mark.parametrize(
    "rest",
    [
        "server.start()",  # and never stopped
        "t = threading.Thread(target=server.serve); t.start(); server.stop(); t.join()",
    ],
)
def test_scripts_end(rest: str) -> None:
    process = script(rest)
    try:
        output, errors = process.communicate(timeout=START_S)
    finally:
        process.kill()
        process.wait()
    assert output == "over\n", errors
    assert process.returncode == 0, errors


def test_a_client_says_what_is_missing() -> None:
    port = free_port()
    with pytest.raises(conch.UnavailableError, match=r"model 'm' was not ready within 0\.1 s"):
        conch.Client(f"127.0.0.1:{port}", "m", wait_s=0.1).wait()
    with pytest.raises(conch.UnavailableError, match=r"model 'm' was not ready within 0\.1 s"):
        conch.Client(f"http://127.0.0.1:{port}", "m", wait_s=0.1).wait()
    with pytest.raises(
        conch.InvalidArgumentError, match="must be host:port for gRPC, or begin with one of grpc://"
    ):
        conch.Client("ftp://here", "m")


def test_a_client_without_tritonclient_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tritonclient.grpc", None)
    with pytest.raises(ImportError, match=r"pip install 'conch\[client\]'"):
        conch.Client("127.0.0.1:1", "m")


def test_bound_functions_are_beside_what_a_planner_follows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for mode in ("poll", "watch"):
        flags: dict[str, Any] = {"model_control_mode": mode, "repository_poll_secs": 0.05}
        with conch.Server(tmp_path, repository_settle_secs=0.05, **flags, **NO_PORTS) as server:
            server.bind("m", conch.batch(lambda X: X), [X], [Y])
            assert server.infer("m", {"X": [[2.0]]})["Y"].item() == 2.0
            server.bind("m", conch.batch(lambda X: -X), [X], [Y])
            config = 'backend: "python" output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }'
            code = "class TritonPythonModel:\n    def execute(self, requests): return []\n"
            write_model(tmp_path, f"late_{mode}", config, {"model.py": code})
            eventually(lambda: server.model_ready(f"late_{mode}"), "what is new in the directory is loaded")  # noqa: B023
            assert server.infer("m", {"X": [[2.0]]})["Y"].item() == -2.0
            server.unbind("m")
            eventually(lambda: not server.model_ready("m"), "it is gone")
    assert not [record for record in caplog.records if "bound" in record.getMessage()]
