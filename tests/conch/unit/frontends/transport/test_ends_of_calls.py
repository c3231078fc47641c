"""Frames with which calls end, on conch's own transport and on grpcio's server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from hpack import Decoder
from tests.conch.unit.frontends.transport.test_server import Site, grpc_server
from tests.support.grpc_transports import EACH
from tests.support.http2_peer import (
    ACK,
    END_STREAM,
    FrameType,
    Http2Peer,
    Setting,
    call_pairs,
    data,
    header_block,
    headers,
    message,
    ping,
)

ONE, LONG, TOO_LONG = message(b"abc"), message(bytes(95)), b"\0\1\0\0\0"
SOON = "1S"
WINDOW = 100
PONG = b"the end?"
UNWANTED = "RST_STREAM 0"
"""Drops what the client still sends."""

# Method, deadline, data of the client, whether it ends the client's side; the frames of the response.
ENDS = {
    "answer": ("Echo", "", ONE, True, "HEADERS 200, DATA, HEADERS 0 end"),
    "answer, client open": ("Echo", "", ONE, False, f"HEADERS 200, DATA, HEADERS 0 end, {UNWANTED}"),
    "error": ("Fail", "", ONE, True, "HEADERS 200 3 end"),
    "error, client open": ("Fail", "", ONE, False, f"HEADERS 200 3 end, {UNWANTED}"),
    "no method": ("Nothing", "", ONE, False, f"HEADERS 200 12 end, {UNWANTED}"),
    "no message": ("Echo", "", b"", True, "HEADERS 200 12 end"),
    "too long": ("Echo", "", TOO_LONG, False, f"HEADERS 200 8 end, {UNWANTED}"),
    "late": ("Wait", SOON, ONE, True, "HEADERS 200 4 end"),
    "late, client open": ("Wait", SOON, ONE, False, f"HEADERS 200 4 end, {UNWANTED}"),
    "late, no message": ("Wait", SOON, b"", False, f"HEADERS 200 4 end, {UNWANTED}"),
    "stream refused": ("No", "", b"", False, f"HEADERS 200 7 end, {UNWANTED}"),
    "stream": ("Each", "", ONE, True, "HEADERS 200, DATA, HEADERS 0 end"),
    "stream, too long": ("Each", "", TOO_LONG, False, f"HEADERS 200, HEADERS 8 end, {UNWANTED}"),
    "stream, late": ("Busy", SOON, ONE, True, "HEADERS 200, DATA, HEADERS 4 end"),
    "stream, late, open": ("Busy", SOON, ONE, False, f"HEADERS 200, DATA, HEADERS 4 end, {UNWANTED}"),
    "stream, late, no message": ("Busy", SOON, b"", False, f"HEADERS 200, HEADERS 4 end, {UNWANTED}"),
    "stream, late, window shut after a message": (
        "Busy", SOON, 2 * LONG, False, f"HEADERS 200, DATA, HEADERS 4 end, {UNWANTED}"
    ),
    "stream, late, in a message": ("Busy", SOON, 2 * ONE + LONG, False, "HEADERS 200, DATA, RST_STREAM 8"),
}  # fmt: skip


@pytest.fixture(scope="module", params=EACH)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def site(transport: str, grpc_is_warm: None) -> Iterator[Site]:
    with closing(Site(grpc_server(transport, max_message_bytes=1000))) as site:
        yield site


def response(peer: Http2Peer) -> list[str]:
    """The frames of stream 1; several DATA frames are one."""
    decoder, said = Decoder(), list[str]()
    while (frame := peer.wait_any()).kind != FrameType.PING or not frame.flags & ACK:
        if frame.stream != 1 or frame.kind == FrameType.WINDOW_UPDATE:
            continue
        words = [FrameType(frame.kind).name]
        if frame.kind == FrameType.HEADERS:
            fields = {str(name): str(value) for name, value in decoder.decode(frame.payload)}
            words += [fields[name] for name in (":status", "grpc-status") if name in fields]
        elif frame.kind == FrameType.RST_STREAM:
            words.append(str(frame.code))
        if frame.ends:
            words.append("end")
        if words != ["DATA"] or said[-1] != "DATA":
            said.append(" ".join(words))
        if frame.ends or frame.kind == FrameType.RST_STREAM:
            peer.send(ping(PONG))
    return said


@pytest.mark.parametrize("end", ENDS)
def test_ends_of_calls(site: Site, transport: str, end: str) -> None:
    method, timeout, content, ends, expected = ENDS[end]
    pairs = [("grpc-timeout", timeout)] if timeout else []
    with closing(Http2Peer(f"127.0.0.1:{site.port}")) as peer:
        peer.handshake((Setting.INITIAL_WINDOW_SIZE, WINDOW))
        peer.send(
            headers(1, header_block(*call_pairs(f"/t.T/{method}"), *pairs)),
            data(1, content, END_STREAM if ends else 0),
        )
        said = ", ".join(response(peer))
    if transport == "grpcio":
        # It adds a reset to each deadline's end, sends trailers within a message, too, and where a stream
        # ends at once, its headers may be part of them.
        expected = expected.replace("RST_STREAM 8", f"HEADERS 4 end, {UNWANTED}")
        if timeout and not expected.endswith(UNWANTED):
            expected += f", {UNWANTED}"
        joined = "HEADERS 200, HEADERS", "HEADERS 200"
        said, expected = said.replace(*joined), expected.replace(*joined)
    assert said == expected
