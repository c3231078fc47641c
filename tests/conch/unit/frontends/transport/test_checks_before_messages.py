"""Checks of calls before their messages: what they watch hears of calls that end without a message."""

from __future__ import annotations

import queue
from contextlib import closing

import pytest
from tests.support.http2_peer import (
    END_STREAM,
    Http2Peer,
    call_pairs,
    data,
    header_block,
    headers,
    message,
)
from tests.support.servers import WAIT_S

from conch.frontends.grpc.rpc_calls import UnaryRpc
from conch.frontends.grpc.transport.port_state import PortOptions
from conch.frontends.grpc.transport.transport_server import TransportServer

PATH = "/t.T/Echo"


@pytest.mark.parametrize(
    ("content", "ended"),
    [(message(b"whole"), False), (b"", True), (message(b"cut")[:-1], True), (message(b"long" * 100), True)],
    ids=["whole", "none", "cut", "too long"],
)
def test_a_call_that_ends_without_a_message_is_told(content: bytes, ended: bool) -> None:
    told: queue.Queue[str] = queue.Queue()

    def admit(call: UnaryRpc) -> bool:
        call.watch(told.put, "ended")
        return True

    def answer(call: UnaryRpc, received: object) -> None:
        told.put("taken")
        call.reply(b"")

    server = TransportServer(PortOptions(most_message_bytes=100))
    server.serve({PATH: answer}, {}, {PATH: admit})
    address = f"127.0.0.1:{server.add_port('127.0.0.1:0')}"
    server.start()
    try:
        with closing(Http2Peer(address)) as peer:
            peer.handshake()
            peer.send(headers(1, header_block(*call_pairs(PATH))), data(1, content, END_STREAM))
            assert told.get(timeout=WAIT_S) == ("ended" if ended else "taken")
            while not peer.wait_any().ends:
                pass
    finally:
        server.stop(0)
    assert told.empty()
