"""conch's own transport over TLS: records that do not end where frames do, protocols, long messages."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import grpc
import pytest
from tests.support.certificates import Authority
from tests.support.http2 import ACK, DATA, END_STREAM, PING, REQUEST, SETTINGS, headers
from tests.support.http2_peer import PREFACE, frame
from tests.support.servers import WAIT_S

from conch.frontends.grpc.rpc_calls import UnaryRpc
from conch.frontends.grpc.tls_options import TlsOptions
from conch.frontends.grpc.transport.port_state import PortOptions
from conch.frontends.grpc.transport.transport_server import TransportServer

PATH = "/inference.GRPCInferenceService/ModelInfer"
RECORD = 16_384  # the most bytes of one
READS = 4  # of one round


class Site:
    """A server over TLS that answers with the length of a message, or with the message."""

    def __init__(self, authority: Authority) -> None:
        key, certificate = authority.issue("server")
        self.root = authority.root
        self.busy, self.go_on = threading.Event(), threading.Event()
        self.server = TransportServer(PortOptions())
        self.server.serve(
            {
                PATH: lambda call, message: call.reply(b"length %d" % len(message)),
                "/t.T/Echo": lambda call, message: call.reply(bytes(message)),
                "/t.T/Block": self.block,
            },
            {},
            {},
        )
        self.port = self.server.add_port(
            "127.0.0.1:0", TlsOptions(key.read_bytes(), certificate.read_bytes())
        )
        self.server.start()

    def block(self, call: UnaryRpc, message: Any) -> None:
        """Holds the loop's thread, so that what clients send meanwhile is read in one round."""
        self.busy.set()
        assert self.go_on.wait(WAIT_S)
        call.reply(b"")

    def channel(self) -> grpc.Channel:
        credentials = grpc.ssl_channel_credentials(self.root.read_bytes())
        limits = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        return grpc.secure_channel(f"localhost:{self.port}", credentials, options=limits)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(Authority(tmp_path_factory.mktemp("tls") / "ours"))
    yield site
    assert site.server.stop(WAIT_S)


def receive_until(secure: ssl.SSLSocket, expected: bytes) -> None:
    received = b""
    while expected not in received:
        data = secure.recv(65536)
        assert data, received
        received += data


def test_the_last_record_ends_behind_the_last_read_of_a_round(site: Site) -> None:
    """A frame ends within a record at the last read of a round, and nothing comes after this record."""
    context = ssl.create_default_context(cafile=site.root)
    context.set_alpn_protocols(["h2"])
    size = 90_000
    body = struct.pack(">BI", 0, size) + bytes(size)
    first, second = 30_000, (READS - 1) * RECORD + 100
    with (
        closing(site.channel()) as channel,
        socket.create_connection(("127.0.0.1", site.port), WAIT_S) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        secure.sendall(PREFACE + frame(SETTINGS, 0, 0) + headers(1, REQUEST))
        secure.sendall(frame(DATA, 0, 1, body[:first]) + frame(PING, 0, 0, b"are-here"))
        receive_until(secure, frame(PING, ACK, 0, b"are-here"))
        blocked = channel.unary_unary("/t.T/Block").future(b"", timeout=WAIT_S)
        assert site.busy.wait(WAIT_S)
        rest = body[first + second :]
        sent = frame(DATA, 0, 1, body[first : first + second]) + frame(DATA, END_STREAM, 1, rest)
        assert (READS - 1) * RECORD < len(sent) < READS * RECORD
        secure.sendall(sent)
        site.go_on.set()
        assert blocked.result() == b""
        receive_until(secure, b"length %d" % size)


@pytest.mark.parametrize("size", [0, 16_379, 70_000, 5_000_000, 40_000_000])
def test_messages_of_all_sizes(site: Site, size: int) -> None:
    message = bytes(range(256)) * (size // 256) + bytes(size % 256)
    with closing(site.channel()) as channel:
        assert channel.unary_unary("/t.T/Echo")(message, timeout=WAIT_S) == message


def openssl(site: Site, *arguments: str) -> str:
    """Output of `openssl s_client` for a handshake."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl is not installed")
    done = subprocess.run(
        [program, "s_client", "-connect", f"127.0.0.1:{site.port}", "-CAfile", site.root, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",  # it prints what the server sends
        timeout=WAIT_S,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.process
@pytest.mark.parametrize(("flag", "version"), [("-tls1_2", "TLSv1.2"), ("-tls1_3", "TLSv1.3")])
def test_versions_of_tls(site: Site, flag: str, version: str) -> None:
    said = openssl(site, flag, "-alpn", "h2")
    assert "ALPN protocol: h2" in said
    assert re.search(rf"New, {version}, Cipher is \w+", said)
    assert "Verification: OK" in said


@pytest.mark.process
@pytest.mark.parametrize("arguments", ["-tls1_1 -cipher ALL:@SECLEVEL=0", "-tls1_2 -cipher NULL:@SECLEVEL=0"])
def test_what_is_no_longer_safe_is_refused(site: Site, arguments: str) -> None:
    said = openssl(site, "-alpn", "h2", *arguments.split())
    assert "Cipher is (NONE)" in said
    assert "alert" in said  # of the server: openssl itself would


@pytest.mark.process
@pytest.mark.parametrize("arguments", [("-alpn", "http/1.1"), ()])
@pytest.mark.parametrize("flag", ["-tls1_2", "-tls1_3"])
def test_no_protocol_but_http2_is_chosen(site: Site, flag: str, arguments: tuple[str, ...]) -> None:
    assert "No ALPN negotiated" in openssl(site, flag, *arguments)


@pytest.mark.parametrize("offers", [["http/1.1"], ["h2c", "http/1.0"], []])
def test_clients_of_other_protocols_are_disconnected(site: Site, offers: list[str]) -> None:
    context = ssl.create_default_context(cafile=site.root)
    if offers:
        context.set_alpn_protocols(offers)
    received = b""
    with (
        suppress(ConnectionError, ssl.SSLError),  # the server's close may overtake the client's handshake
        socket.create_connection(("127.0.0.1", site.port), WAIT_S) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        received = secure.recv(1)
    assert received == b""
