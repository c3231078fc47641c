"""Malformed messages are refused by RFC 9113, sections 8.1 to 8.3, and by h2 alike."""

from __future__ import annotations

import h2.config
import h2.connection
import h2.exceptions
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support.http2 import REQUEST, RESPONSE, TRAILERS, Pairs, headers, server, settings
from tests.support.http2_peer import PREFACE

from conch.frontends.grpc.http2.events import HeadersReceived, StreamReset
from conch.frontends.grpc.http2.field_rules import (
    MalformedError,
    check_request,
    check_response,
    check_trailers,
)

PSEUDO = REQUEST[:4]
MALFORMED_REQUESTS: dict[str, Pairs] = {
    "nothing": (),
    "no method": REQUEST[1:],
    "no scheme": (REQUEST[0], *REQUEST[2:]),
    "no path": (*REQUEST[:2], *REQUEST[3:]),
    "an empty path": (*REQUEST[:2], (b":path", b"")),
    "a field twice": (REQUEST[0], *REQUEST),
    "a response's field": (*PSEUDO, (b":status", b"200")),
    "an unknown pseudo-header field": (*PSEUDO, (b":protocol", b"websocket")),
    "a pseudo-header field after a regular one": (*REQUEST[:3], (b"x", b"y"), REQUEST[3]),
    "a pseudo-header field after a usual one": (*REQUEST[:3], (b"content-type", b"y"), REQUEST[3]),
    "CONNECT with a path": ((b":method", b"CONNECT"), (b":authority", b"a"), (b":path", b"/")),
    **{
        f"the path {value!r}": (*REQUEST[:2], (b":path", value), REQUEST[3])
        for value in (b" /a", b"/a ", b"\t/a", b"/a\t", b" ")
    },
    "CONNECT without authority": ((b":method", b"CONNECT"),),
    **{
        f"the field {name!r}": (*REQUEST, (name, b"x"))
        for name in (
            b"connection",
            b"proxy-connection",
            b"keep-alive",
            b"transfer-encoding",
            b"upgrade",
            b"te",
            b"Content-Type",
            b"a b",
            b"a:",
            b"",
            b"\x7f",
            b"a\0",
            b"\xff",
        )
    },
    **{
        f"the value {value!r}": (*PSEUDO, (name, value))
        for name in (b"x", b"user-agent")
        for value in (b"a\0b", b"a\nb", b"a\rb")
    },
    **{
        f"a length of {value!r}": (*REQUEST, (b"content-length", value))
        for value in (b"", b"-1", b"+1", b"1_0", b"1,1", b"9" * 20)
    },
    "two lengths": (*REQUEST, (b"content-length", b"1"), (b"content-length", b"2")),
}


@pytest.mark.parametrize("name", MALFORMED_REQUESTS)
def test_malformed_requests_are_stream_errors(name: str) -> None:
    with pytest.raises(MalformedError):
        check_request(MALFORMED_REQUESTS[name])
    connection = server()
    for stream_id in (1, 3):
        assert connection.receive(headers(stream_id, MALFORMED_REQUESTS[name]), 0) == []
    assert [type(event) for event in connection.receive(headers(5), 0)] == [HeadersReceived]


def test_well_formed_requests() -> None:
    assert check_request(REQUEST) == -1
    assert check_request(((b":method", b"CONNECT"), (b":authority", b"a"))) == -1
    twice = (b"content-length", b"12")
    assert check_request((*REQUEST, twice, twice, (b"x", b""), (b"y", b"a\tb c\xff"))) == 12
    assert check_request((*REQUEST, (b"x", b" a\t"))) == -1, "gRPC strips them"


def test_responses_and_trailers() -> None:
    assert check_response((*RESPONSE, (b"content-length", b"7"))) == (200, 7)
    assert check_response(((b":status", b"103"),)) == (103, -1)
    for status in (b"", b"20", b"2000", b"abc", b"101", b"+20"):
        with pytest.raises(MalformedError):
            check_response(((b":status", status),))
    check_trailers(TRAILERS)
    for pairs in (RESPONSE, ((b"x", b" "),), ((b"X", b""),)):
        with pytest.raises(MalformedError):
            check_trailers(pairs)


more_names = (b"x-a", b"X-a", b"te", b"upgrade", b"connection", b":status")
fields = st.tuples(
    st.sampled_from([*more_names, *(name for name, _ in REQUEST)]),
    st.sampled_from([b"", b"trailers", b"/", b" x", b"x\n", b"http"]),
)


@given(st.sets(st.integers(0, 5), min_size=3), st.lists(fields, max_size=2), st.integers(0, 6))
def test_h2_agrees(kept: set[int], more: list[tuple[bytes, bytes]], at: int) -> None:
    """On a request of which some fields are missing, and into which others are put."""
    usual = [REQUEST[index] for index in sorted(kept)]
    pairs = (*usual[:at], *more, *usual[at:])
    assume(all(value == value.strip(b" ") or name[:1] == b":" for name, value in pairs))
    # h2 asks for an authority, RFC 9113 does not.
    assume(any(name in (b":authority", b"host") for name, _ in pairs))
    peer = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
    peer.initiate_connection()
    try:
        peer.receive_data(PREFACE + settings() + headers(1, pairs))
        fine = True
    except h2.exceptions.ProtocolError:
        fine = False
    events = server().receive(headers(1, pairs), 0)
    assert not any(isinstance(event, StreamReset) for event in events)
    assert bool(events) == fine
