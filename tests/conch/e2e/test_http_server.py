"""The REST port: options, TLS, restricted APIs, taken ports, and how it stops."""

from __future__ import annotations

import json
import re
import socket
import ssl
import threading
from contextlib import ExitStack, closing
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.certificates import Authority
from tests.support.servers import (
    WAIT_S,
    ServerProcess,
    eventually,
    serving_process,
    started,
    write_model,
    write_probe,
)

ASK = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 1], "data": [0]}]}


def body(**parameters: Any) -> str:
    return json.dumps({**ASK, "parameters": parameters})


def connection(server: ServerProcess) -> HTTPConnection:
    host, _, port = server.http_address.rpartition(":")
    return HTTPConnection(host, int(port), timeout=WAIT_S)


def infer(
    client: HTTPConnection, headers: dict[str, str] | None = None, **parameters: Any
) -> tuple[int, Any]:
    client.request("POST", "/v2/models/probe/infer", body(**parameters), headers or {})
    response = client.getresponse()
    return response.status, json.loads(response.read())


def test_without_http(tmp_path: Path) -> None:
    write_probe(tmp_path)
    with serving_process(tmp_path, flags=["--allow-http=false"]) as server:
        assert "HTTP" not in server.output


def test_a_taken_port(tmp_path: Path) -> None:
    write_probe(tmp_path)
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        flags = [f"--model-repository={tmp_path}", "--grpc-port=0", "--http-address=127.0.0.1"]
        with started(*flags, f"--http-port={port}") as server:
            assert server.wait() == 1
            assert f"Unavailable - Socket '127.0.0.1:{port}' already in use " in server.errors
            assert "loading" not in server.errors, "it is found out before models are loaded"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--http-max-input-size=0"], "Error: --http-max-input-size must be greater than 0."),
        (["--http-restricted-api=infer:a=b"], "unknown restricted api 'infer'"),
        (["--http-header-forward-pattern=("], "'(' is not a regular expression"),
        (["--http-use-ssl"], "--http-server-cert must be specified to serve REST over TLS"),
        (["--http-server-cert=x"], "--http-server-cert needs --http-use-ssl"),
        (["--metrics-use-ssl"], "it needs --http-use-ssl"),
    ],
)
def test_flags_that_are_refused(tmp_path: Path, flags: list[str], text: str) -> None:
    with started(f"--model-repository={tmp_path}", "--grpc-port=0", *flags) as server:
        assert server.wait() == 1
        assert text in server.errors


def test_tls(tmp_path: Path) -> None:
    write_probe(tmp_path / "models")
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    key, certificate = ours.issue("server")
    flags = ["--http-use-ssl", f"--http-server-key={key}", f"--http-server-cert={certificate}"]

    def ask(server: ServerProcess, client: tuple[Path, Path] | None) -> tuple[int, Any]:
        context = ssl.create_default_context(cafile=str(ours.root))
        if client is not None:
            context.load_cert_chain(client[1], client[0])
        port = int(server.http_address.rpartition(":")[2])
        with closing(HTTPSConnection("localhost", port, timeout=WAIT_S, context=context)) as secure:
            return infer(secure)

    with serving_process(tmp_path / "models", flags=flags) as server:
        assert ask(server, None)[0] == 200
        assert "| TLS" in server.output
    with serving_process(tmp_path / "models", flags=[*flags, f"--http-root-cert={ours.root}"]) as server:
        assert ask(server, ours.issue("client"))[0] == 200
        for wrong in (None, theirs.issue("client")):
            with pytest.raises(OSError):
                ask(server, wrong)


@pytest.mark.parametrize("mutual", [False, True])
def test_metrics_over_tls(tmp_path: Path, mutual: bool) -> None:
    ours = Authority(tmp_path / "ours")
    key, certificate = ours.issue("server")
    (tmp_path / "models").mkdir()
    flags = ["--http-use-ssl", f"--http-server-key={key}", f"--http-server-cert={certificate}"]
    flags += ["--metrics-use-ssl", *([f"--http-root-cert={ours.root}"] if mutual else [])]
    with serving_process(tmp_path / "models", flags=flags) as server:
        url = server.metrics_url.replace("http://", "https://").replace("127.0.0.1", "localhost")
        assert len(re.findall(r"\| Metrics +\| \S+ +\| \S+ +\| TLS +\|", server.output)) == 1

        def scrape(address: str, client: tuple[Path, Path] | None) -> int:
            context = ssl.create_default_context(cafile=str(ours.root))
            if client is not None:
                context.load_cert_chain(client[1], client[0])
            return httpx.get(address, verify=context).status_code

        assert scrape(url, ours.issue("prometheus")) == 200
        if mutual:
            with pytest.raises(httpx.TransportError):
                scrape(url, None)
        with pytest.raises(httpx.TransportError):
            httpx.get(url.replace("https://", "http://"))


def test_restricted_inference(tmp_path: Path) -> None:
    write_probe(tmp_path)
    flags = ["--http-restricted-api=inference,health:X-Token=secret"]
    with serving_process(tmp_path, flags=flags) as server, closing(connection(server)) as client:
        for headers in ({}, {"x-token": "wrong"}):
            assert infer(client, headers) == (
                403,
                {"error": "This API is restricted, expecting header 'x-token'"},
            )
        assert infer(client, {"X-TOKEN": "secret"})[0] == 200


def test_other_processes_may_listen_too(tmp_path: Path) -> None:
    write_probe(tmp_path)
    with serving_process(tmp_path, flags=["--reuse-http-port"]) as first:
        port = int(first.http_address.rpartition(":")[2])
        flags = ["--reuse-http-port", f"--http-port={port}"]
        with serving_process(tmp_path, flags=flags) as second, closing(connection(second)) as client:
            assert infer(client)[0] == 200


def test_what_is_in_flight_is_finished_and_what_is_new_refused(tmp_path: Path) -> None:
    # Two instances: what is still taken as the server stops must not wait for what is in flight.
    write_probe(tmp_path, "probe", "instance_group { count: 2 kind: KIND_CPU }")
    begun, go = tmp_path / "begun", tmp_path / "go"
    answers: list[tuple[int, Any]] = []
    with serving_process(tmp_path) as server, ExitStack() as stack:
        busy, idle, late = (stack.enter_context(closing(connection(server))) for _ in range(3))
        for client in (idle, late):
            assert infer(client)[0] == 200
        sender = threading.Thread(
            target=lambda: answers.append(infer(busy, started=str(begun), wait_for=str(go)))
        )
        sender.start()
        eventually(begun.exists, "the model runs")
        server.signal(15)
        eventually(lambda: "in-flight" in server.errors, "it stops")
        assert [infer(late)[0] for _ in range(3)] == [200] * 3, "an open connection is served meanwhile"
        go.touch()
        sender.join()
        try:
            while (answer := infer(late))[0] == 200:
                pass
            assert answer == (503, {"error": "Server exiting"})
        except OSError:
            pass  # it was idle, and has been closed
        assert server.wait() == 0, server.errors
    assert [status for status, _ in answers] == [200]


def test_a_request_that_does_not_end_is_given_up(tmp_path: Path) -> None:
    write_probe(tmp_path)
    begun = tmp_path / "begun"
    flags = [f"--model-repository={tmp_path}", "--grpc-port=0", "--exit-timeout-secs=1"]
    with started(*flags) as server:
        server.wait_ready()
        with closing(connection(server)) as client:
            client.request("POST", "/v2/models/probe/infer", body(started=str(begun), wait_for="/nowhere"))
            eventually(begun.exists, "the model runs")
            server.signal(15)
            assert server.wait() != 0
            with pytest.raises(OSError):
                client.getresponse()


def test_a_full_queue_says_when_to_try_again(tmp_path: Path) -> None:
    write_probe(tmp_path, extra="")
    begun, go = tmp_path / "begun", tmp_path / "go"
    with serving_process(tmp_path, flags=["--max-queue-size=1"]) as server, ExitStack() as stack:
        clients = [stack.enter_context(closing(connection(server))) for _ in range(3)]
        clients[0].request("POST", "/v2/models/probe/infer", body(started=str(begun), wait_for=str(go)))
        eventually(begun.exists, "the model runs")
        statuses = []
        for client in clients[1:]:
            client.request("POST", "/v2/models/probe/infer", body())
        clients[2].sock.settimeout(WAIT_S)
        response = clients[2].getresponse()
        assert response.status == 429 and int(response.headers["Retry-After"]) >= 1
        response.read()
        go.touch()
        for client in clients[:2]:
            statuses.append(client.getresponse().status)
        assert statuses == [200, 200]


def test_probes_are_answered_while_models_load(tmp_path: Path) -> None:
    go = tmp_path / "go"
    slow = f"""
import os, time

class TritonPythonModel:
    def initialize(self, args):
        while not os.path.exists({str(go)!r}):
            time.sleep(0.01)

    def execute(self, requests):
        return []
"""
    config = 'backend: "python"\ninput { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }\n'
    config += 'output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }'
    write_model(tmp_path / "models", "slow", config, {"model.py": slow})
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [f"--model-repository={tmp_path / 'models'}", "--grpc-port=0", f"--http-port={port}"]

    def status(path: str) -> int:
        with closing(HTTPConnection("127.0.0.1", port, timeout=WAIT_S)) as client:
            try:
                client.request("GET", path)
                return client.getresponse().status
            except OSError:
                return 0

    with started(*flags, "--listen-while-loading") as server:
        eventually(lambda: status("/v2/health/live") == 200, "it answers")
        assert status("/v2/health/ready") == 400
        go.touch()
        server.wait_ready()
        assert status("/v2/health/ready") == 200
        assert server.stop() == 0
