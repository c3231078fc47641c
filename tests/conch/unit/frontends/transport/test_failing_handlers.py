"""Handlers that raise: their own call ends, all others of the connection go on, and a stop ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hpack import Decoder
from tests.support.http2_peer import (
    END_STREAM,
    FrameType,
    Http2Peer,
    call_pairs,
    data,
    header_block,
    headers,
    message,
)
from tests.support.servers import WAIT_S

from conch.frontends.grpc.rpc_calls import StreamRpc, UnaryRpc
from conch.frontends.grpc.transport.messages import compress
from conch.frontends.grpc.transport.port_state import PortOptions
from conch.frontends.grpc.transport.transport_server import TransportServer

INTERNAL = "13"


class PlannedError(Exception):
    """Raised by the handlers."""


def fail(*_: object) -> Any:
    raise PlannedError


class Site:
    """A server with handlers that raise at different times."""

    def __init__(self) -> None:
        self.server = TransportServer(PortOptions())
        self.cancelled: queue.Queue[bytes] = queue.Queue()
        self.waiting: queue.Queue[None] = queue.Queue()
        self.server.serve(
            {
                "/t.T/Echo": lambda call, message: call.reply(bytes(message)),
                "/t.T/Fail": fail,
                "/t.T/Admit": fail,
                "/t.T/Wait": self.wait,
            },
            {
                "/t.T/Open": fail,
                "/t.T/First": lambda call: call.start(fail, lambda: None),
                "/t.T/Second": self.second,
            },
            {"/t.T/Admit": fail},
        )
        self.address = f"127.0.0.1:{self.server.add_port('127.0.0.1:0')}"
        self.server.start()

    def wait(self, call: UnaryRpc, message: Any) -> None:
        call.watch(self.cancel, (call, bytes(message)))
        self.waiting.put(None)

    def cancel(self, subject: tuple[UnaryRpc, bytes]) -> None:
        call, message = subject
        call.reply(b"")
        self.cancelled.put(message)
        raise PlannedError

    def second(self, call: StreamRpc) -> None:
        """Raises at the second message, which another thread has asked for."""
        taken = iter((lambda: threading.Thread(target=call.read_next).start(), fail))
        call.start(lambda message: next(taken)(), lambda: None)


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    assert site.server.stop(WAIT_S), "no call is left open"


@pytest.fixture
def peer(site: Site) -> Iterator[Http2Peer]:
    with closing(Http2Peer(site.address)) as peer:
        peer.handshake()
        yield peer


def calls(stream: int, method: str, *messages: bytes, **metadata: str) -> bytes:
    pairs = [(name.replace("_", "-"), value) for name, value in metadata.items()]
    return headers(stream, header_block(*call_pairs(f"/t.T/{method}"), *pairs)) + data(
        stream, b"".join(messages), END_STREAM
    )


def statuses(peer: Http2Peer, count: int) -> dict[int, str]:
    """The statuses of so many calls by stream, in any order."""
    decoder, found = Decoder(), dict[int, str]()
    while len(found) < count:
        received = peer.wait_any()
        if received.kind == FrameType.HEADERS:
            fields = {_text(name): _text(value) for name, value in decoder.decode(received.payload)}
            if received.ends:
                found[received.stream] = fields["grpc-status"]
    return found


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode()


@pytest.mark.parametrize("method", ["Fail", "Admit", "Open", "First", "Second"])
def test_a_handler_that_raises_ends_its_call_alone(peer: Http2Peer, method: str) -> None:
    one = message(b"abc")
    peer.send(calls(1, "Echo", one) + calls(3, method, one, one) + calls(5, "Echo", one))
    assert statuses(peer, 3) == {1: "0", 3: INTERNAL, 5: "0"}


@pytest.mark.parametrize("method", ["Fail", "First"])
def test_a_handler_that_raises_at_a_compressed_message(peer: Http2Peer, method: str) -> None:
    packed = compress(b"abc", "gzip")
    framed = b"\1" + len(packed).to_bytes(4, "big") + packed
    peer.send(calls(1, method, framed, grpc_encoding="gzip"))
    assert statuses(peer, 1) == {1: INTERNAL}


def test_all_calls_of_a_lost_connection_are_cancelled(site: Site) -> None:
    with closing(Http2Peer(site.address)) as peer:
        peer.handshake()
        peer.send(b"".join(calls(stream, "Wait", message(b"%d" % stream)) for stream in (1, 3, 5)))
        for _ in range(3):
            site.waiting.get(timeout=WAIT_S)
    assert {site.cancelled.get(timeout=WAIT_S) for _ in range(3)} == {b"1", b"3", b"5"}


def test_all_deadlines_of_a_moment_end_their_calls(peer: Http2Peer, site: Site) -> None:
    peer.send(b"".join(calls(each, "Wait", message(b"x"), grpc_timeout="100m") for each in (1, 3, 5)))
    assert statuses(peer, 3) == {1: "4", 3: "4", 5: "4"}
