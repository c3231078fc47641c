"""Generate and server-sent events from a running server, read by httpx, by curl and by a plain socket."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from tests.support.servers import (
    AnyServer,
    eventually,
    serving,
    write_model,
    write_probe,
    write_steps,
)

FLOOD = """
import numpy as np
import triton_python_backend_utils as pb_utils
from pathlib import Path

CHUNK = b"x" * (1 << 20)


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            (path,) = pb_utils.get_input_tensor_by_name(request, "PATH").as_numpy()
            sender = request.get_response_sender()
            sent = 0
            while not sender.is_cancelled():
                chunk = pb_utils.Tensor("OUT", np.array([CHUNK], np.object_))
                sender.send(pb_utils.InferenceResponse([chunk]))
                sent += 1
                self.tell(path.decode(), str(sent))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            self.tell(path.decode(), "cancelled")

    def tell(self, path, text):
        # Who reads it never finds it half written.
        Path(path + ".new").write_text(text)
        Path(path + ".new").rename(path)
"""
FLOOD_CONFIG = """
    backend: "python"
    input { name: "PATH" data_type: TYPE_STRING dims: [ 1 ] }
    output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
    model_transaction_policy { decoupled: true }
"""


@pytest.fixture(scope="module")
def streaming(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnyServer]:
    """A server with decoupled models."""
    repository = tmp_path_factory.mktemp("models")
    write_probe(repository)
    write_steps(repository)
    write_model(repository, "flood", FLOOD_CONFIG, {"model.py": FLOOD})
    with serving(repository) as server:
        yield server


@pytest.fixture
def client(streaming: AnyServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{streaming.http_address}") as client:
        yield client


def steps(what: str, **more: Any) -> dict[str, Any]:
    return {"IN": [1], "steps": what, **more}


def answer(number: int) -> dict[str, Any]:
    """Answer of the steps model."""
    return {"OUT": number, "model_name": "steps", "model_version": "1", "n": number, "text": "ä", "yes": True}


def posted(path: str, body: bytes) -> bytes:
    """A request as it is sent."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def events(lines: Iterator[str]) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


def test_generate(client: httpx.Client) -> None:
    reply = client.post("/v2/models/probe/generate", json={"IN": [1, 2.5], "id": "q", "x": "y"})
    assert reply.status_code == 200
    body = reply.json()
    assert (body["OUT"], body["id"], body["model_version"]) == ([1.0, 2.5], "q", "1")
    assert json.loads(body["SEEN"])["parameters"] == {"id": "q", "x": "y"}
    stream = client.post("/v2/models/probe/versions/1/generate_stream", json={"IN": 0.5})
    assert events(iter(stream.text.split("\n")))[0]["OUT"] == 0.5


def test_generate_wants_exactly_one_response(client: httpx.Client) -> None:
    path = "/v2/models/steps/generate"
    for one in ("ok final", "okfinal"):
        assert client.post(path, json=steps(one)).json() == answer(0)
    for other in ("final", "ok ok final"):
        reply = client.post(path, json=steps(other))
        assert reply.status_code == 400
        assert "generate expects model to produce exactly 1 response" in reply.json()["error"]
    failed = client.post(path, json=steps("errfinal"))
    assert (failed.status_code, failed.json()) == (404, {"error": "told to"})


@pytest.mark.parametrize(
    ("what", "status", "expected"),
    [
        ("ok ok okfinal", 200, [answer(0), answer(1), answer(2)]),
        ("ok ok final", 200, [answer(0), answer(1)]),
        ("final", 200, []),
        ("ok err final", 200, [answer(0), {"error": "told to"}]),
        ("err final", 404, [{"error": "told to"}]),
    ],
)
def test_a_stream_of_events(client: httpx.Client, what: str, status: int, expected: list[Any]) -> None:
    reply = client.post("/v2/models/steps/generate_stream", json=steps(what))
    assert (reply.status_code, reply.headers["content-type"]) == (status, "text/event-stream; charset=utf-8")
    assert events(iter(reply.text.split("\n"))) == expected


def test_events_come_as_soon_as_there_are_any(client: httpx.Client, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with client.stream(
        "POST", "/v2/models/steps/generate_stream", json=steps(f"ok wait:{go} okfinal")
    ) as reply:
        lines = reply.iter_lines()
        assert json.loads(next(lines).removeprefix("data: ")) == answer(0)
        go.touch()
        assert events(lines) == [answer(2)]


@pytest.mark.parametrize("route", ["generate", "generate_stream"])
def test_a_client_that_goes_away_cancels(streaming: AnyServer, tmp_path: Path, route: str) -> None:
    began, cancelled = tmp_path / "began", tmp_path / "cancelled"
    body = json.dumps(steps(f"touch:{began} cancelled:{cancelled} final")).encode()
    host, _, port = streaming.http_address.rpartition(":")
    with closing(socket.create_connection((host, int(port)))) as connection:
        connection.sendall(posted(f"/v2/models/steps/{route}", body))
        eventually(began.exists, "the model runs")
    eventually(cancelled.exists, "the model is told")


def test_a_slow_reader_makes_the_model_wait(streaming: AnyServer, tmp_path: Path) -> None:
    path = tmp_path / "sent"
    body = json.dumps({"PATH": str(path)}).encode()
    host, _, port = streaming.http_address.rpartition(":")
    process = psutil.Process()
    before = process.memory_info().rss

    def sent() -> str:
        return path.read_text() if path.exists() else ""

    with closing(socket.create_connection((host, int(port)))) as connection:
        connection.sendall(posted("/v2/models/flood/generate_stream", body))
        eventually(lambda: sent().isdigit() and int(sent()) >= 16, "the model sends")
        # Far fewer than a model that is not held back would make while these requests are answered.
        with httpx.Client(base_url=f"http://{streaming.http_address}") as client:
            for _ in range(100):
                assert client.get("/v2/health/live").status_code == 200
        assert int(sent()) < 60
        assert process.memory_info().rss - before < 200 << 20
        read = 0
        while read < 80 << 20:
            read += len(connection.recv(1 << 20))
    eventually(lambda: sent() == "cancelled", "the model is told that its reader has gone")


@pytest.mark.process
def test_curl_reads_events(streaming: AnyServer) -> None:
    command = ["curl", "-sSN", "-m", "20", "-d", json.dumps(steps("ok okfinal"))]
    url = f"http://{streaming.http_address}/v2/models/steps/generate_stream"
    done = subprocess.run([*command, url], capture_output=True, text=True, check=True)
    assert events(iter(done.stdout.split("\n"))) == [answer(0), answer(1)]


def test_large_tensors_and_bad_bodies_leave_others_alone(client: httpx.Client) -> None:
    numbers = np.arange(300_000, dtype=np.float32)
    reply = client.post("/v2/models/probe/generate", json={"IN": numbers.tolist()})
    assert reply.json()["OUT"] == numbers.tolist()
    for body in (b"", b"[", b"\xff", b"{" * 100_000, b'{"IN":' + b"[" * 250_000):
        refused = client.post("/v2/models/probe/generate", content=body)
        assert "error" in refused.json(), body[:10]
    assert client.post("/v2/models/probe/generate", json={"IN": 1}).status_code == 200
