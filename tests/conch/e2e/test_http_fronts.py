"""HTTP connections in front processes: the same answers, and what ends with a front or with the server."""

from __future__ import annotations

import gzip
import http.client
import json
import signal
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import product
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

from conch.frontends.http.infer.infer_request import RequestDecoder
from conch.frontends.http.infer.infer_response import ResponseEncoder

pytestmark = pytest.mark.slow

INFER = "/v2/models/probe/infer"
BINARY_OUT = {"name": "OUT", "parameters": {"binary_data": True}}
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


def _binary(count: int, **more: Any) -> tuple[dict[str, str], bytes]:
    tensor = {
        "name": "IN",
        "shape": [1, count],
        "datatype": "FP32",
        "parameters": {"binary_data_size": 4 * count},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}, **more}).encode()
    data = np.arange(count, dtype=np.float32).tobytes()
    return {"inference-header-content-length": str(len(head))}, head + data


def _in_chunks(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 100_000):
        yield body[start : start + 100_000]


Asked = tuple[str, str, dict[str, str], Any]
"""Method, path, headers and body."""


def _packed(body: bytes, coding: str) -> bytes:
    if not coding:
        return body
    return gzip.compress(body, mtime=0) if coding == "gzip" else zlib.compress(body)


def _plain() -> list[Asked]:
    """Infer requests that fronts decode, and whose responses they encode."""
    found: list[Asked] = []
    for count, coding, accepted in product((1, 20_000), ("", "gzip", "deflate"), ("", "gzip")):
        head, binary = _binary(count)
        for own, body in (
            ({}, _json(count)),
            ({}, _json(count, outputs=[BINARY_OUT], id="é")),
            (head, binary),
        ):
            codings = {"content-encoding": coding, "accept-encoding": accepted}
            found.append(("POST", INFER, {**own, **codings}, _packed(body, coding)))
    orders = {"parameters": {"x": 1.5, "y": 2**60, "z": "é", "priority": 1, "timeout": 10**9}}
    found += [
        ("POST", "/v2/models/probe/versions/1/infer", {}, _json(2, **orders)),
        ("POST", INFER, {}, _json(2, outputs=[])),
        ("POST", INFER, {}, _json(2, parameters={"error": "UNAVAILABLE"})),
        ("POST", INFER, {}, _json(3).replace(b"0.5, 0.5", b"NaN, -0")),
        ("POST", INFER, {"expect": "100-continue"}, _json(50_000)),
        ("POST", INFER, *_binary(1_000_000)),
        ("POST", "/v2/models/long/infer", {}, _json(1).replace(b"[1, 1]", b"[1]")),  # not sent at once
    ]
    return found


def _others() -> list[Asked]:
    """Requests of all other kinds."""
    large_head, large = _binary(1_000_000)
    short_head, short = _binary(10)
    region = b'"parameters": {"shared_memory_region": "x", "shared_memory_byte_size": 8}'
    infers = [
        (large_head, _in_chunks(large)),
        _binary(1_000_000, outputs=[BINARY_OUT, {"name": "SEEN"}]),
        (short_head, short[:-1]),
        (short_head, short.replace(b"[1, 10]", b"[1, 11]")),
        ({"inference-header-content-length": "0"}, b"\0" * 8),
        ({"inference-header-content-length": "x"}, _json()),
        ({"content-encoding": "br"}, _json()),
        ({"content-encoding": "gzip"}, _json()),
        ({"content-encoding": "gzip"}, gzip.compress(_json())[:-20]),
        ({"content-encoding": "gzip"}, gzip.compress(b" " * 5_000_000)),  # more than is taken
        *(
            ({}, body)
            for body in (
                b"{",
                b"",
                b"{" * 70_000,
                _json(2, parameters={"x": "\ud800"}),
                _json(3).replace(b"0.5, 0.5", b"1e999, 0"),
                _json(
                    3_000, outputs=[{"name": "OUT", "parameters": {"binary_data": True}}, {"name": "SEEN"}]
                ),
                _json(2, outputs=[{"name": "OUT", "parameters": {"classification": 1}}]),
                _json(2, outputs=[{"name": "none"}]),
                _json(2, parameters={"sequence_id": 7, "sequence_start": True}),
                _json(2).replace(b"[1, 2]", b"[1, 3]"),
                _json(2).replace(b"FP32", b"FP16"),
                _json(2).replace(b"FP32", b"BYTES"),
                _json(2).replace(b"FP32", b"X"),
                _json(2).replace(b'"data": [0.5, 0.5]', region),
                _json(400_000),  # in JSON more than is taken
            )
        ),
    ]
    return [
        *(("POST", INFER, headers, body) for headers, body in infers),
        ("GET", "/v2", {}, None),
        ("HEAD", "/v2", {}, None),
        ("GET", "/v2/models/probe/config", {}, None),
        ("GET", INFER, {}, None),
        ("GET", "/nowhere?x=y", {}, None),
        ("DELETE", "/v2", {}, None),
        ("POST", "/v2/models/unknown/infer", {}, _json()),
        ("POST", "/v2/models/unknown/infer", {"content-encoding": "gzip"}, gzip.compress(_json(9000))),
        ("POST", "/v2/models/steps/infer", {}, _json()),
        ("POST", "/v2/models/probe/generate", {}, b'{"IN": [1, 2.5]}'),
        ("POST", "/v2/models/steps/generate_stream", {}, b'{"IN": [1], "steps": "ok ok final"}'),
        ("POST", "/v2/repository/index", {"origin": "http://elsewhere"}, b"{}"),
        ("POST", "/v2/models/probe/trace/setting", {}, b" " * 10_000),  # more than is taken
    ]


def _answers(client: httpx.Client, requests: list[Asked]) -> list[tuple[int, dict[str, str], bytes]]:
    found = []
    for method, path, headers, body in requests:
        reply = client.request(method, path, headers=headers, content=body)
        given = {name: value for name, value in reply.headers.items() if name != "traceparent"}
        found.append((reply.status_code, given, reply.content))
    return found


def test_answers_are_those_without_fronts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core neither decodes nor encodes what a front can."""
    write_probe(tmp_path)
    write_steps(tmp_path)
    write_model(tmp_path, "long", LONG_CONFIG, {"model.py": LONG})
    done: list[str] = []
    for coder in (RequestDecoder, ResponseEncoder):
        monkeypatch.setattr(coder, "__call__", _noting(coder.__call__, done, coder.__name__))
    answers = []
    for fronts in (0, 2):
        flags = [f"--front-ends={fronts}", "--id=s", "--http-max-input-size=2000000"]
        with (
            serving(tmp_path, flags=flags) as server,
            httpx.Client(base_url=f"http://{server.http_address}", timeout=WAIT_S) as client,
        ):
            done.clear()
            plain = _answers(client, _plain())
            assert set(done) == (set() if fronts else {"RequestDecoder", "ResponseEncoder"})
            answers.append(plain + _answers(client, _others()))
            connections = front_metrics(server, "conch_front_connections")
            assert sum(connections) == (1 if fronts else 0)
    for without, having in zip(*answers, strict=True):
        assert having == without


def _noting(call: Callable[..., Any], done: list[str], name: str) -> Callable[..., Any]:
    def note(*arguments: Any, **named: Any) -> Any:
        done.append(name)
        return call(*arguments, **named)

    return note


class _Stream:
    """A client that reads the events of a stream until it ends."""

    def __init__(self, server: ServerProcess, started: Path, go_on: Path) -> None:
        host, port = server.http_address.rsplit(":", 1)
        self.connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
        self._request = {"IN": [0.5], "started": str(started), "wait_for": str(go_on)}

    def ask(self) -> bool:
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
    """Requests that have begun are answered, an idle connection ends at once, and the server ends well."""
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
