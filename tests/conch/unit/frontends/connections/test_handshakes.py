"""TLS handshakes on their pool: the loop goes on, clients take turns, and a close waits for a step."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
from tests.support.certificates import Authority
from tests.support.servers import WAIT_S, eventually

from conch.core.clock import monotonic_ns
from conch.frontends.connections.byte_stream import ByteStream
from conch.frontends.connections.wire import Wire, open_wire, tls_context
from conch.frontends.grpc.transport.grpc_connection import GrpcConnection
from conch.frontends.grpc.transport.port_state import PortOptions, PortState
from conch.ipc.loop import IoLoop


class Taker:
    """Notes the calls of a stream."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def opened(self) -> None:
        self.told.append("opened")

    def received(self, data: bytes) -> None:
        self.told.append(data.decode())

    def ended(self) -> bool:
        return False

    def pause_writing(self) -> None:
        pass

    def resume_writing(self) -> None:
        pass

    def closed(self) -> None:
        self.told.append("closed")


class Site:
    """Serves connections on a loop; handshakes of clients that ask for the name `slow` wait for `go_on`.

    Attributes:
        threads: Names of the threads that handshakes ran on.
    """

    def __init__(self, authority: Authority) -> None:
        key, certificate = authority.issue("server")
        self.tls = tls_context(key.read_bytes(), certificate.read_bytes(), None)
        self.tls.sni_callback = self._named
        self.threads: list[str] = []
        self.slow, self.go_on = threading.Event(), threading.Event()
        self.loop = IoLoop(name="test-loop")
        self.loop.start()
        self.port = PortState(PortOptions(), monotonic_ns)
        self.port.use(self.loop)
        self._trusting = ssl.create_default_context(cafile=authority.root)
        self._trusting.check_hostname = False
        self._trusting.set_alpn_protocols(["h2"])

    def _named(self, sock: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        self.threads.append(threading.current_thread().name)
        if name == "slow":
            self.slow.set()
            assert self.go_on.wait(WAIT_S)

    def connected(self, address: str = "127.0.0.1") -> tuple[Wire, socket.socket]:
        """A wire and its client."""
        with socket.create_server(("127.0.0.1", 0)) as listening:
            client = socket.create_connection(listening.getsockname(), WAIT_S, (address, 0))
            accepted, _ = listening.accept()
        return open_wire(accepted, self.tls, http2=True), client

    def stream(self, address: str = "127.0.0.1") -> tuple[ByteStream, Taker, socket.socket]:
        """A started stream, its handler and its client."""
        wire, client = self.connected(address)
        taker = Taker()
        stream = ByteStream(self.loop, wire, taker)
        self.on_loop(stream.start)
        return stream, taker, client

    def begin(self, client: socket.socket, name: str) -> ssl.SSLSocket:
        """Sends a client's first message of the handshake."""
        client.setblocking(False)
        secure = self._trusting.wrap_socket(client, server_hostname=name, do_handshake_on_connect=False)
        with suppress(ssl.SSLWantReadError):  # unless the server has answered already
            secure.do_handshake()
        secure.settimeout(WAIT_S)
        return secure

    def on_loop(self, work: Callable[[], object]) -> None:
        """Does work on the loop's thread, and waits for it."""
        done = threading.Event()
        self.loop.call_soon(work)
        self.loop.call_soon(done.set)
        assert done.wait(WAIT_S)


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(Authority(tmp_path_factory.mktemp("tls") / "ours"))
    yield site
    site.go_on.set()
    assert site.loop.stop(WAIT_S)


def test_the_loop_goes_on_beside_a_handshake_and_another_client_overtakes(site: Site) -> None:
    """Connections of one client wait for each other, and no other client for them."""
    with ExitStack() as stack:
        streams = [site.stream() for _ in range(5)]
        slow = [stack.enter_context(site.begin(client, "slow")) for _, _, client in streams]
        assert site.slow.wait(WAIT_S)
        stream, taker, client = site.stream("127.0.0.2")
        other = stack.enter_context(site.begin(client, "localhost"))
        other.do_handshake()
        other.sendall(b"served")
        eventually(lambda: taker.told == ["opened", "served"], "it is served")
        assert len(site.threads) == 2, "of the first client, one handshake runs"
        site.go_on.set()
        for each in slow:
            each.do_handshake()
        eventually(lambda: all(taker.told == ["opened"] for _, taker, _ in streams), "all have a turn")
        for each_stream in (stream, *(each for each, _, _ in streams)):
            site.on_loop(each_stream.close)
        eventually(lambda: all(taker.told[-1] == "closed" for _, taker, _ in streams), "they are closed")
    assert {name[:9] for name in site.threads} == {"conch-tls"}


def test_a_grpc_connection_shakes_hands_on_the_pool(site: Site) -> None:
    wire, client = site.connected()
    connection = GrpcConnection(site.port, wire, "ipv4:127.0.0.1:1")
    site.on_loop(connection.start)
    with site.begin(client, "localhost") as secure:
        secure.do_handshake()
        assert secure.recv(9)[3] == 4, "SETTINGS"
        site.on_loop(connection.close)
    assert [name[:9] for name in site.threads] == ["conch-tls"]


@pytest.mark.parametrize("grpc", [False, True])
def test_a_close_waits_for_the_step_that_runs_and_for_no_other(site: Site, grpc: bool) -> None:
    """The descriptor that TLS works on stays open; a connection that waits for its turn is closed at once."""

    def started() -> tuple[Wire, socket.socket, Callable[[], None]]:
        wire, client = site.connected()
        connection = (
            GrpcConnection(site.port, wire, "ipv4:127.0.0.1:1")
            if grpc
            else ByteStream(site.loop, wire, Taker())
        )
        site.on_loop(connection.start)
        return wire, client, connection.close

    (running, first, close_running), (waiting, second, close_waiting) = started(), started()
    with site.begin(first, "slow") as slow:
        assert site.slow.wait(WAIT_S)
        with site.begin(second, "localhost") as queued:
            for _ in range(2):
                site.on_loop(lambda: None)  # the second of two rounds has seen what was sent
            site.on_loop(close_running)
            site.on_loop(close_waiting)
            site.on_loop(lambda: None)
            assert waiting.fileno() == -1
            with pytest.raises(OSError):
                queued.do_handshake()
        descriptor = running.fileno()
        assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
        site.go_on.set()
        eventually(lambda: running.fileno() == -1, "it is closed")
        assert slow.recv(1) == b""
    assert len(site.threads) == 1
