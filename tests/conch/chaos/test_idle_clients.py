"""Connections that do nothing fill one port of a server with few descriptors: all else goes on."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import psutil
import pytest
from tests.support.certificates import Authority
from tests.support.hazards import workers_of
from tests.support.http2_peer import PREFACE, settings
from tests.support.servers import WAIT_S, ServerProcess, eventually, free_port, serving_process

DESCRIPTORS, IDLE = 256, 400
PORTS = ("grpc", "http", "metrics", "control", "console")
GRPC_PORTS = ("grpc", "control")
PATHS = {"http": "/v2/health/live", "metrics": "/metrics", "console": "/"}
INDEX = "/conch.control.v1.ModelControl/Index"
LIVE = "/inference.GRPCInferenceService/ServerLive"


class Ports:
    """A server's ports, and how to ask each whether it answers."""

    def __init__(self, server: ServerProcess, numbers: dict[str, int], root: Path | None) -> None:
        self.server = server
        metrics = re.search(r":(\d+)/", server.metrics_url)
        assert metrics
        self.numbers = numbers | {
            "grpc": server.port,
            "http": int(server.http_address.rpartition(":")[2]),
            "metrics": int(metrics[1]),
        }
        self._root = root

    def answers(self, port: str) -> bool:
        if port in GRPC_PORTS:
            return self._answers_call(f"localhost:{self.numbers[port]}", LIVE if port == "grpc" else INDEX)
        if self._root is None:
            connection = http.client.HTTPConnection("localhost", self.numbers[port], timeout=WAIT_S)
        else:
            context = ssl.create_default_context(cafile=str(self._root))
            connection = http.client.HTTPSConnection(
                "localhost", self.numbers[port], timeout=WAIT_S, context=context
            )
        try:
            connection.request("GET", PATHS[port])
            return connection.getresponse().status == 200
        finally:
            connection.close()

    def _answers_call(self, address: str, method: str) -> bool:
        if self._root is None:
            channel = grpc.insecure_channel(address)
        else:
            channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(self._root.read_bytes()))
        with channel:
            channel.unary_unary(method)(b"", timeout=WAIT_S)
        return True


@pytest.fixture
def ports(request: pytest.FixtureRequest, repository: Path, tmp_path: Path) -> Iterator[Ports]:
    numbers = {"control": free_port(), "console": free_port()}
    flags = [f"--{name}-port={number}" for name, number in numbers.items()]
    root = None
    if request.param == "tls":
        authority = Authority(tmp_path / "authority")
        root = authority.root
        key, certificate = authority.issue("server")
        for name in ("grpc", "http", "control", "console"):
            flags += [
                f"--{name}-use-ssl",
                f"--{name}-server-cert={certificate}",
                f"--{name}-server-key={key}",
            ]
        flags.append("--metrics-use-ssl")
    with serving_process(repository, flags=flags, descriptors=DESCRIPTORS) as server:
        yield Ports(server, numbers, root)


def first_bytes(port: str) -> bytes:
    return PREFACE + settings() if port in GRPC_PORTS else b"GET /v2/hea"


def closed(connection: socket.socket) -> bool:
    try:
        while data := connection.recv(1 << 16):  # a refusal, or HTTP/2's settings
            assert data
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.parametrize(
    ("ports", "begun"), [("plain", False), ("plain", True), ("tls", False)], indirect=["ports"]
)
def test_a_full_port_takes_no_descriptors_from_the_others(ports: Ports, begun: bool) -> None:
    for full in PORTS:
        check_others(ports, full, first_bytes(full) if begun else b"")


def check_others(ports: Ports, full: str, sent: bytes) -> None:
    server = ports.server
    with ExitStack() as stack:
        idle = [stack.enter_context(socket.socket()) for _ in range(IDLE)]
        for connection in idle:
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", ports.numbers[full]))
        for connection in idle:
            with suppress(OSError):
                connection.send(sent)
        for port in PORTS:
            assert port == full or ports.answers(port), f"{port} beside {full}"
        (worker,) = workers_of(server)
        worker.kill()
        again = rf"\(pid {worker.pid}\) died.*serves again"
        eventually(lambda: re.search(again, server.errors, re.DOTALL), f"the worker is back beside {full}")
        eventually(lambda: sum(map(closed, idle)) >= IDLE - DESCRIPTORS // 2, f"others are refused by {full}")
        assert psutil.Process(server.process.pid).num_fds() < DESCRIPTORS * 3 // 4
    eventually(lambda: answering(ports, full), f"{full} answers again")


def answering(ports: Ports, port: str) -> bool:
    try:
        return ports.answers(port)
    except (OSError, grpc.RpcError):
        return False
