"""HTTP connections in front processes: the same answers, and what ends with a front or with the server."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from tests.support.fronts import front_metrics
from tests.support.hazards import fronts_of
from tests.support.servers import (
    IN_PROCESS,
    WAIT_S,
    ServerProcess,
    eventually,
    serving,
    serving_process,
    write_model,
    write_probe,
    write_steps,
)

pytestmark = pytest.mark.slow

INFER = "/v2/models/probe/infer"
LONG = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        out = pb_utils.Tensor("OUT", np.arange(3_000_000, dtype=np.float32))
        return [pb_utils.InferenceResponse([out]) for _ in requests]
"""
LONG_CONFIG = """
    backend: "python"
    input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
    output { name: "OUT" data_type: TYPE_FP32 dims: [ 3000000 ] }
"""


def _json(count: int = 2, **more: Any) -> bytes:
    tensor = {"name": "IN", "shape": [1, count], "datatype": "FP32", "data": [0.5] * count}
    return json.dumps({"inputs": [tensor], **more}).encode()


def _binary(count: int) -> tuple[dict[str, str], bytes]:
    tensor = {
        "name": "IN",
        "shape": [1, count],
        "datatype": "FP32",
        "parameters": {"binary_data_size": 4 * count},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    data = np.arange(count, dtype=np.float32).tobytes()
    return {"inference-header-content-length": str(len(head))}, head + data


def _in_chunks(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 100_000):
        yield body[start : start + 100_000]


def _asked(client: httpx.Client) -> list[tuple[int, dict[str, str], bytes]]:
    """The answers to requests of all kinds."""
    large_head, large = _binary(1_000_000)
    one = _json(1).replace(b"[1, 1]", b"[1]")
    requests: list[tuple[str, str, dict[str, str], Any]] = [
        ("GET", "/v2", {}, None),
        ("HEAD", "/v2", {}, None),
        ("GET", "/v2/models/probe/config", {}, None),
        ("GET", "/nowhere?x=y", {}, None),
        ("DELETE", "/v2", {}, None),
        ("POST", INFER, {}, _json()),
        ("POST", INFER, {"accept-encoding": "gzip"}, _json(5000)),
        ("POST", INFER, {}, b"{"),
        ("POST", INFER, {}, b""),
        ("POST", INFER, large_head, large),
        ("POST", INFER, large_head, _in_chunks(large)),
        ("POST", INFER, {"expect": "100-continue"}, _json(50_000)),
        ("POST", "/v2/models/unknown/infer", {}, _json()),
        ("POST", "/v2/models/long/infer", {}, one),  # more than is sent at once
        ("POST", "/v2/models/probe/generate", {}, b'{"IN": [1, 2.5]}'),
        ("POST", "/v2/models/steps/generate_stream", {}, b'{"IN": [1], "steps": "ok ok final"}'),
        ("POST", "/v2/repository/index", {"origin": "http://elsewhere"}, b"{}"),
        ("POST", "/v2/models/probe/trace/setting", {}, b" " * 10_000),  # more than is taken
    ]
    found = []
    for method, path, headers, body in requests:
        reply = client.request(method, path, headers=headers, content=body)
        given = {name: value for name, value in reply.headers.items() if name != "traceparent"}
        found.append((reply.status_code, given, reply.content))
    return found


def test_answers_are_those_without_fronts(tmp_path: Path) -> None:
    write_probe(tmp_path)
    write_steps(tmp_path)
    write_model(tmp_path, "long", LONG_CONFIG, {"model.py": LONG})
    answers = []
    for fronts in (0, 2):
        with (
            serving(tmp_path, flags=[f"--front-ends={fronts}", "--id=s"]) as server,
            httpx.Client(base_url=f"http://{server.http_address}", timeout=WAIT_S) as client,
        ):
            answers.append(_asked(client))
            connections = front_metrics(server, "conch_front_connections")
            assert sum(connections) == (1 if fronts else 0)
    for without, having in zip(*answers, strict=True):
        assert having == without


class _Stream:
    """A client that reads the events of a stream until it ends."""

    def __init__(self, server: ServerProcess, started: Path, go_on: Path) -> None:
        host, port = server.http_address.rsplit(":", 1)
        self.connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
        self._request = {"IN": [0.5], "started": str(started), "wait_for": str(go_on)}

    def ask(self) -> bool:
        """Whether the answer has come whole."""
        body = json.dumps(self._request)
        try:
            with closing(self.connection):
                self.connection.request("POST", "/v2/models/probe/generate_stream", body)
                return b'"OUT":0.5' in self.connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            return False


def _streams(server: ServerProcess, directory: Path, count: int) -> list[_Stream]:
    return [_Stream(server, directory / f"started-{each}", directory / "go") for each in range(count)]


def test_a_front_that_dies_takes_its_connections_only(tmp_path: Path) -> None:
    """Those of the other are answered, and the requests of its clients leave no trace in the core."""
    write_probe(tmp_path, extra="instance_group { count: 8 }")
    with serving_process(tmp_path, flags=["--front-ends=2", IN_PROCESS, "--allow-grpc=false"]) as server:
        core = psutil.Process(server.process.pid)
        eventually(lambda: front_metrics(server, "conch_front_up") == [1, 1], "both serve")
        descriptors = core.num_fds()
        with ThreadPoolExecutor(6) as threads:
            streams = _streams(server, tmp_path, 6)
            answers = []
            for number, stream in enumerate(streams):  # one by one, so that each front gets three
                answers.append(threads.submit(stream.ask))
                eventually((tmp_path / f"started-{number}").exists, "it has begun")
            assert front_metrics(server, "conch_front_connections") == [3, 3]
            fronts_of(server)[0].kill()
            eventually(lambda: sum(front_metrics(server, "conch_front_restarts_total")) == 1, "it is noticed")
            (tmp_path / "go").touch()
            assert sorted(answer.result() for answer in answers) == 3 * [False] + 3 * [True]
        eventually(lambda: front_metrics(server, "conch_front_up") == [1, 1], "both serve again")
        eventually(
            lambda: front_metrics(server, "conch_front_connections") == [0, 0], "no connection is left"
        )
        assert httpx.post(f"http://{server.http_address}{INFER}", content=_json()).status_code == 200
        eventually(lambda: front_metrics(server, "conch_pending_requests") == [0], "no request is left")
        eventually(lambda: core.num_fds() <= descriptors, "its descriptors are closed")


@pytest.mark.parametrize("grpc", ["true", "false"])
def test_a_stop_lets_requests_end(tmp_path: Path, grpc: str) -> None:
    """What has begun is answered, an idle connection ends at once, and the server ends well."""
    write_probe(tmp_path)
    with serving_process(tmp_path, flags=["--front-ends=2", IN_PROCESS, f"--allow-grpc={grpc}"]) as server:
        host, port = server.http_address.rsplit(":", 1)
        with ExitStack() as stack:
            idle = stack.enter_context(closing(socket.create_connection((host, int(port)), WAIT_S)))
            threads = stack.enter_context(ThreadPoolExecutor(1))
            (stream,) = _streams(server, tmp_path, 1)
            answer = threads.submit(stream.ask)
            eventually((tmp_path / "started-0").exists, "it has begun")
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: "Waiting for in-flight requests" in server.errors, "the server stops")
            threading.Timer(0.5, (tmp_path / "go").touch).start()
            assert answer.result()
            assert idle.recv(1) == b""
            assert server.process.wait(WAIT_S) == 0
