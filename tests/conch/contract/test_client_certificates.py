"""Ports that want client certificates: which ones they take, and that a refused client harms no other."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID
from tests.support.certificates import Authority
from tests.support.servers import WAIT_S, copy_example, free_port, serving

PORTS = ("grpc", "http", "metrics", "openai", "control", "console")
ATTEMPTS = 20
"""Attempts of each kind of refused client."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
Files = tuple[Path, Path]


@dataclass(frozen=True)
class Place:
    """A server all of whose ports want certificates; certificates of clients by what is odd about them."""

    ports: dict[str, int]
    root: Path
    clients: dict[str, Files | None]

    def takes(self, port: str, client: str) -> bool:
        """True if a port answers a client."""
        context = ssl.create_default_context(cafile=self.root)
        http2 = port in ("grpc", "control")
        if http2:
            context.set_alpn_protocols(["h2"])
        files = self.clients[client]
        if files is not None:
            context.load_cert_chain(files[1], files[0])
        with (
            suppress(OSError),
            socket.create_connection(("127.0.0.1", self.ports[port]), WAIT_S) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secure,
        ):
            # With TLS 1.3 the client's handshake ends before the server has seen its certificate.
            secure.sendall(_PREFACE if http2 else _GET)
            return bool(secure.recv(1))
        return False


@pytest.fixture(scope="module", params=[0, pytest.param(1, marks=pytest.mark.process)])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("tls")
    ours, theirs = (Authority(directory / name) for name in ("ours", "theirs"))
    key, certificate = ours.issue("server")
    clients: dict[str, Files | None] = {
        "good": ours.issue("client"),
        "none": None,
        "of another authority": theirs.issue("client"),
        "expired": ours.issue("expired", timedelta(hours=-1)),
        "for servers only": ours.issue("only", usages=[ExtendedKeyUsageOID.SERVER_AUTH]),
        "signed by a client": ours.issue_by("client", "leaf"),
    }
    copy_example(directory / "models", "simple")
    ports = {name: free_port() for name in PORTS}
    flags = [f"--tls-cert={certificate}", f"--tls-key={key}", f"--tls-client-ca={ours.root}"]
    flags += [f"--front-ends={request.param}", "--model-control-mode=explicit"]
    flags += [f"--{name}-port={port}" for name, port in ports.items()]
    with serving(directory / "models", flags=flags):
        yield Place(ports, ours.root, clients)


@pytest.mark.parametrize("port", PORTS)
def test_a_port_takes_clients_with_a_certificate_that_holds_only(place: Place, port: str) -> None:
    assert place.takes(port, "good")
    for client in place.clients:
        if client != "good":
            assert not any(place.takes(port, client) for _ in range(ATTEMPTS)), client
    assert place.takes(port, "good")
