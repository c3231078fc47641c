"""Listening sockets: all addresses of a host, with one port."""

from __future__ import annotations

import errno
import http.client
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from conch.core.errors import UnavailableError
from conch.frontends.connections.listener import tcp_sockets
from conch.frontends.http.http_exchange import HttpExchange
from conch.frontends.http.http_loop import HttpLoop

ELSEWHERE = "192.0.2.1"  # of no machine: RFC 5737
HOST = "conch.test"


@pytest.fixture
def known_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with two addresses of this machine, one of another, and one of a family that is not there."""

    def found(host: str, port: int, **kind: object) -> list[object]:
        assert host == HOST
        families = {
            ELSEWHERE: socket.AF_INET,
            "none": 255,
            "127.0.0.1": socket.AF_INET,
            "127.0.0.2": socket.AF_INET,
        }
        return [(family, socket.SOCK_STREAM, 6, "", (each, port)) for each, family in families.items()]

    monkeypatch.setattr(socket, "getaddrinfo", found)


@pytest.fixture
def http_loop() -> Iterator[HttpLoop]:
    loop = HttpLoop()
    yield loop
    loop.stop()


def answer(exchange: HttpExchange) -> None:
    exchange.respond(200, [], b"here")


@pytest.mark.usefixtures("known_host")
def test_http_is_served_on_all_addresses_of_a_host(
    http_loop: HttpLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = http_loop.listen(answer, HOST, 0)
    monkeypatch.undo()
    try:
        for address in ("127.0.0.1", "127.0.0.2"):
            with closing(http.client.HTTPConnection(address, listener.port, timeout=60)) as client:
                client.request("GET", "/")
                assert client.getresponse().read() == b"here"
    finally:
        assert listener.close(60)


@pytest.mark.usefixtures("known_host")
def test_a_port_that_is_taken_on_one_address_is_refused(http_loop: HttpLoop) -> None:
    with closing(socket.create_server(("127.0.0.2", 0))) as other:
        port = other.getsockname()[1]
        with pytest.raises(UnavailableError, match=f"Socket '{HOST}:{port}' already in use"):
            http_loop.listen(answer, HOST, port)
        with closing(socket.create_server(("127.0.0.1", port))):
            pass  # nothing is left open


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(OSError) as caught:
        tcp_sockets(ELSEWHERE, 0, False)
    assert caught.value.errno == errno.EADDRNOTAVAIL


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the machine has no IPv6 sockets for both")
def test_all_addresses_of_ipv6_have_ipv4_too() -> None:
    (bound,) = tcp_sockets("::", 0, False)
    with closing(bound), closing(socket.create_connection(("127.0.0.1", bound.getsockname()[1]), 60)):
        pass
