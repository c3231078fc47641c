"""A connection obeys the tables at the head of `connection.py`, and answers each error with its code."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from tests.support.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PRIORITY,
    PRIORITY_FLAG,
    PUSH_PROMISE,
    REQUEST,
    RESPONSE,
    RST_STREAM,
    SETTINGS,
    TRAILERS,
    WINDOW_UPDATE,
    Frame,
    Pairs,
    block,
    client,
    data,
    frames,
    headers,
    output,
    reset,
    server,
    settings,
    story,
    window_update,
)
from tests.support.http2_peer import PREFACE, frame

from conch.frontends.grpc.http2.connection import Http2Connection, NoStreamError
from conch.frontends.grpc.http2.events import (
    ConnectionClosed,
    DataReceived,
    Event,
    HeadersReceived,
    PingReceived,
    StreamReset,
    TrailersReceived,
)
from conch.frontends.grpc.http2.frames import ErrorCode
from conch.frontends.grpc.http2.limits import LocalSettings, Reason

STREAM = 3


def received(connection: Http2Connection, content: bytes) -> tuple[list[Event], list[Frame]]:
    """Events and frames that bytes cause in a connection."""
    events = connection.receive(content, 0)
    return events, list(frames(output(connection)))


def idle() -> Http2Connection:
    connection = server()
    connection.receive(headers(1), 0)
    return connection


def opened() -> Http2Connection:
    connection = idle()
    connection.receive(headers(STREAM), 0)
    return connection


def answered_early() -> Http2Connection:
    connection = opened()
    connection.send_headers(STREAM, RESPONSE, end_stream=True)
    return connection


def half_closed_remote() -> Http2Connection:
    connection = idle()
    connection.receive(headers(STREAM, end=True), 0)
    return connection


def closed() -> Http2Connection:
    connection = half_closed_remote()
    connection.send_headers(STREAM, RESPONSE, end_stream=True)
    return connection


def reset_by_peer() -> Http2Connection:
    connection = opened()
    connection.receive(reset(STREAM), 0)
    return connection


def reset_here() -> Http2Connection:
    connection = opened()
    connection.reset(STREAM, ErrorCode.CANCEL)
    return connection


def skipped() -> Http2Connection:
    connection = idle()
    connection.receive(headers(7), 0)
    return connection


STATES: dict[str, Callable[[], Http2Connection]] = {
    "idle": idle,
    "open": opened,
    "half-closed (r)": half_closed_remote,
    "closed": closed,
    "answered early": answered_early,
    "closed by reset": reset_by_peer,
    "reset here": reset_here,
    "skipped": skipped,
}

# "same" leaves the state as it is; S and C are errors of the stream and the connection.
RECEIVED = {
    "idle": ("open", "half-closed (r)", "C PROTOCOL", "C PROTOCOL", "C PROTOCOL", "C PROTOCOL"),
    "open": ("S PROTOCOL", "half-closed (r)", "same", "half-closed (r)", "closed", "same"),
    "half-closed (r)": ("S CLOSED", "S CLOSED", "S CLOSED", "S CLOSED", "closed", "same"),
    "closed": ("C CLOSED", "C CLOSED", "S CLOSED", "S CLOSED", "same", "same"),
    "closed by reset": ("C CLOSED", "C CLOSED", "S CLOSED", "S CLOSED", "same", "same"),
    "answered early": ("same", "same", "same", "same", "same", "same"),
    "reset here": ("same", "same", "same", "same", "same", "same"),
    "skipped": ("C PROTOCOL", "C PROTOCOL", "S CLOSED", "S CLOSED", "same", "same"),
}
SENT = {
    "open": ("same", "same", "answered early", "answered early", "reset here"),
    "half-closed (r)": ("same", "same", "closed", "closed", "reset here"),
    "idle": ("ignored",) * 5,
    "closed": ("ignored",) * 5,
    "answered early": ("ignored",) * 5,
    "closed by reset": ("ignored",) * 5,
    "reset here": ("ignored",) * 5,
    "skipped": ("ignored",) * 5,
}
SAME = {"closed by reset": "closed", "skipped": "closed", "answered early": "reset here"}
"""States that `state_of` can't tell apart."""
CODES = {"PROTOCOL": ErrorCode.PROTOCOL_ERROR, "CLOSED": ErrorCode.STREAM_CLOSED}


def state_of(connection: Http2Connection) -> str:
    """The stream's state, from what DATA and an answer do."""
    before = connection.open_streams
    connection.send_data(STREAM, [b"answer"])
    sends = any(one.stream_id == STREAM for one in frames(output(connection)))
    events, sent = received(connection, data(STREAM, b"content"))
    if any(isinstance(event, ConnectionClosed) for event in events):
        return "idle"
    if any(isinstance(event, DataReceived) for event in events):
        assert sends
        return "open"
    if sends:
        assert connection.open_streams == before - 1
        return "half-closed (r)"
    return "closed" if [one.kind for one in sent] == [RST_STREAM] else "reset here"


@pytest.mark.parametrize("which", range(6))
@pytest.mark.parametrize("state", STATES)
def test_received_frames_follow_the_table(state: str, which: int) -> None:
    connection = STATES[state]()
    output(connection)
    pairs: Pairs = REQUEST if state == "idle" else TRAILERS
    events, sent = received(
        connection,
        (
            headers(STREAM, pairs),
            headers(STREAM, pairs, end=True),
            data(STREAM, b"content"),
            data(STREAM, b"content", end=True),
            reset(STREAM),
            window_update(STREAM, 1),
        )[which],
    )
    outcome = RECEIVED[state][which]
    if outcome[0] == "C":
        code = CODES[outcome[2:]]
        assert [type(event) for event in events] == [ConnectionClosed]
        assert isinstance(events[0], ConnectionClosed)
        assert events[0].code == code
        assert [one.kind for one in sent] == [GOAWAY]
        assert int.from_bytes(sent[0].payload[4:8], "big") == code
        assert connection.closed
        assert connection.receive(headers(9), 0) == []
    elif outcome[0] == "S":
        code = CODES[outcome[2:]]
        known = state in ("open", "half-closed (r)")
        assert events == ([StreamReset(STREAM, code)] if known else [])
        assert sent == [Frame(RST_STREAM, 0, STREAM, struct.pack(">I", code))]
        assert state_of(connection) == "reset here"
    else:
        assert sent == []
        expected = state if outcome == "same" else outcome
        assert state_of(connection) == SAME.get(expected, expected)


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("state", STATES)
def test_sent_frames_follow_the_table(state: str, which: int) -> None:
    connection = STATES[state]()
    output(connection)
    (
        lambda: connection.send_headers(STREAM, RESPONSE),
        lambda: connection.send_data(STREAM, [b"content"]),
        lambda: connection.send_data(STREAM, [b"content"], end_stream=True),
        lambda: connection.send_trailers(STREAM, TRAILERS),
        lambda: connection.reset(STREAM, ErrorCode.CANCEL),
    )[which]()
    sent = list(frames(output(connection)))
    outcome = SENT[state][which]
    if outcome == "ignored":
        assert sent == []
        outcome = "same"
    else:
        kinds = (HEADERS, DATA, DATA, HEADERS, RST_STREAM)
        # What the client has left to send is not wanted after an early answer.
        ends = [(RST_STREAM, STREAM)] if outcome == "answered early" else []
        assert [(one.kind, one.stream_id) for one in sent] == [(kinds[which], STREAM), *ends]
        assert bool(sent[0].flags & END_STREAM) == (which in (2, 3))
    expected = state if outcome == "same" else outcome
    assert state_of(connection) == SAME.get(expected, expected)


@pytest.mark.parametrize("state", STATES)
def test_priority_is_checked_and_ignored(state: str) -> None:
    connection = STATES[state]()
    output(connection)
    assert received(connection, frame(PRIORITY, 0, STREAM, bytes(5))) == ([], [])
    for payload, code in (
        (bytes(4), ErrorCode.FRAME_SIZE_ERROR),
        (struct.pack(">IB", STREAM, 1), ErrorCode.PROTOCOL_ERROR),
    ):
        connection = STATES[state]()
        output(connection)
        events, sent = received(connection, frame(PRIORITY, 0, STREAM, payload))
        if state == "idle":
            assert isinstance(events[-1], ConnectionClosed)
            assert events[-1].code == code
        elif state in ("reset here", "answered early"):
            assert (events, sent) == ([], [])
        else:
            assert [(one.kind, one.word) for one in sent] == [(RST_STREAM, code)]


def padded(length: int, content: bytes) -> bytes:
    return bytes([length]) + content + bytes(length)


PROTOCOL, SIZE, FLOW = (
    ErrorCode.PROTOCOL_ERROR,
    ErrorCode.FRAME_SIZE_ERROR,
    ErrorCode.FLOW_CONTROL_ERROR,
)
# On a server's connection on which stream 1 is open.
CONNECTION_ERRORS: dict[str, tuple[bytes, ErrorCode, Reason]] = {
    "DATA on stream 0": (data(0, b"x"), PROTOCOL, Reason.PROTOCOL),
    "DATA on an even stream": (data(2, b"x"), PROTOCOL, Reason.PROTOCOL),
    "DATA with too much padding": (frame(DATA, PADDED, 1, b"\x06abcde"), PROTOCOL, Reason.PROTOCOL),
    "DATA without length of its padding": (frame(DATA, PADDED, 1), SIZE, Reason.FRAME_SIZE),
    "frame too long": (struct.pack(">IBI", (2**20 + 1) << 8, 0, 1), SIZE, Reason.FRAME_SIZE),
    "HEADERS on stream 0": (headers(0), PROTOCOL, Reason.PROTOCOL),
    "HEADERS on stream 0, incomplete": (frame(HEADERS, 0, 0, b""), PROTOCOL, Reason.PROTOCOL),
    "HEADERS on an even stream": (headers(2), PROTOCOL, Reason.PROTOCOL),
    "HEADERS with too much padding": (
        frame(HEADERS, END_HEADERS | PADDED, 3, b"\x05abcd"),
        PROTOCOL,
        Reason.PROTOCOL,
    ),
    "HEADERS without length of its padding": (
        frame(HEADERS, END_HEADERS | PADDED, 3),
        SIZE,
        Reason.FRAME_SIZE,
    ),
    "HEADERS without its priority": (
        frame(HEADERS, END_HEADERS | PRIORITY_FLAG, 3, b"abcd"),
        SIZE,
        Reason.FRAME_SIZE,
    ),
    "invalid header block": (
        frame(HEADERS, END_HEADERS, 3, b"\xff\xff\xff\xff\xff\xff"),
        ErrorCode.COMPRESSION_ERROR,
        Reason.COMPRESSION,
    ),
    "DATA within a header block": (
        frame(HEADERS, 0, 3, block(REQUEST)) + data(1, b"x"),
        PROTOCOL,
        Reason.PROTOCOL,
    ),
    "an unknown frame within a header block": (
        frame(HEADERS, 0, 3, block(REQUEST)) + frame(77, 0, 3),
        PROTOCOL,
        Reason.PROTOCOL,
    ),
    "CONTINUATION of another stream": (
        frame(HEADERS, 0, 3, block(REQUEST)) + frame(CONTINUATION, END_HEADERS, 1),
        PROTOCOL,
        Reason.PROTOCOL,
    ),
    "CONTINUATION without HEADERS": (frame(CONTINUATION, END_HEADERS, 1), PROTOCOL, Reason.PROTOCOL),
    "CONTINUATION after END_HEADERS": (
        headers(3) + frame(CONTINUATION, END_HEADERS, 3),
        PROTOCOL,
        Reason.PROTOCOL,
    ),
    "CONTINUATION on stream 0": (frame(CONTINUATION, END_HEADERS, 0), PROTOCOL, Reason.PROTOCOL),
    "PRIORITY on stream 0": (frame(PRIORITY, 0, 0, bytes(5)), PROTOCOL, Reason.PROTOCOL),
    "RST_STREAM on stream 0": (reset(0), PROTOCOL, Reason.PROTOCOL),
    "RST_STREAM of a wrong length": (frame(RST_STREAM, 0, 1, bytes(3)), SIZE, Reason.FRAME_SIZE),
    "SETTINGS on a stream": (frame(SETTINGS, 0, 1), PROTOCOL, Reason.PROTOCOL),
    "SETTINGS of a wrong length": (frame(SETTINGS, 0, 0, bytes(5)), SIZE, Reason.FRAME_SIZE),
    "SETTINGS that acknowledge with content": (
        frame(SETTINGS, ACK, 0, bytes(6)),
        SIZE,
        Reason.FRAME_SIZE,
    ),
    "ENABLE_PUSH of 2": (settings((2, 2)), PROTOCOL, Reason.PROTOCOL),
    "initial window too large": (settings((4, 2**31)), FLOW, Reason.FLOW_CONTROL),
    "frame size too small": (settings((5, 2**14 - 1)), PROTOCOL, Reason.PROTOCOL),
    "frame size too large": (settings((5, 2**24)), PROTOCOL, Reason.PROTOCOL),
    "PUSH_PROMISE": (frame(PUSH_PROMISE, END_HEADERS, 1, bytes(4)), PROTOCOL, Reason.PROTOCOL),
    "PING on a stream": (frame(PING, 0, 1, bytes(8)), PROTOCOL, Reason.PROTOCOL),
    "PING of a wrong length": (frame(PING, 0, 0, bytes(7)), SIZE, Reason.FRAME_SIZE),
    "GOAWAY on a stream": (frame(GOAWAY, 0, 1, bytes(8)), PROTOCOL, Reason.PROTOCOL),
    "GOAWAY too short": (frame(GOAWAY, 0, 0, bytes(7)), SIZE, Reason.FRAME_SIZE),
    "WINDOW_UPDATE of a wrong length": (frame(WINDOW_UPDATE, 0, 1, bytes(5)), SIZE, Reason.FRAME_SIZE),
    "WINDOW_UPDATE of 0": (window_update(0, 0), PROTOCOL, Reason.PROTOCOL),
    "window above 2^31-1": (window_update(0, 2**31 - 1), FLOW, Reason.FLOW_CONTROL),
    "a stream's window above 2^31-1 by a setting": (
        window_update(1, 2**30) + settings((4, 2**30)),
        FLOW,
        Reason.FLOW_CONTROL,
    ),
}


@pytest.mark.parametrize("name", CONNECTION_ERRORS)
def test_connection_errors(name: str) -> None:
    content, code, reason = CONNECTION_ERRORS[name]
    connection = server()
    connection.receive(headers(1), 0)
    output(connection)
    events = connection.receive(content, 0)
    assert isinstance(events[-1], ConnectionClosed)
    assert (events[-1].code, events[-1].reason) == (code, reason)
    last = list(frames(output(connection)))[-1]
    assert (last.kind, int.from_bytes(last.payload[4:8], "big")) == (GOAWAY, code)
    assert connection.open_streams == 0
    connection.send_headers(1, RESPONSE)
    connection.ping(bytes(8))
    assert output(connection) == b""


# On a stream that is open.
STREAM_ERRORS: dict[str, tuple[bytes, ErrorCode]] = {
    "WINDOW_UPDATE of 0": (window_update(1, 0), PROTOCOL),
    "window above 2^31-1": (window_update(1, 2**31 - 1), FLOW),
    "trailers with a pseudo-header field": (headers(1, ((b":path", b"/"),), end=True), PROTOCOL),
    "trailers with an upper case name": (headers(1, ((b"X", b""),), end=True), PROTOCOL),
    "HEADERS that depend on themselves": (
        frame(
            HEADERS,
            END_HEADERS | PRIORITY_FLAG | END_STREAM,
            1,
            struct.pack(">IB", 1, 0) + block(TRAILERS),
        ),
        PROTOCOL,
    ),
    "trailers too large": (headers(1, ((b"x", bytes(17_000)),), end=True), ErrorCode.ENHANCE_YOUR_CALM),
}


@pytest.mark.parametrize("name", STREAM_ERRORS)
def test_stream_errors(name: str) -> None:
    content, code = STREAM_ERRORS[name]
    connection = server()
    connection.receive(headers(1), 0)
    events, sent = received(connection, content + frame(PING, 0, 0, bytes(8)))
    assert events == [StreamReset(1, code), PingReceived()]
    assert [(one.kind, one.word) for one in sent] == [(RST_STREAM, code), (PING, 0)]
    assert connection.open_streams == 0


@pytest.mark.parametrize("length", [b"4", b"6"])
@pytest.mark.parametrize("by", ["data", "trailers", "pieces", "direct"])
def test_content_length_must_be_that_of_the_data(length: bytes, by: str) -> None:
    for right in (False, True):
        connection = server()
        connection.receive(headers(1, (*REQUEST, (b"content-length", b"5" if right else length))), 0)
        if by == "data":
            events = connection.receive(data(1, b"12345", end=True), 0)
        elif by == "trailers":
            events = connection.receive(data(1, b"12345") + headers(1, TRAILERS, end=True), 0)
        else:
            content = data(1, b"12345", end=True)
            events = connection.receive(content[:12], 0)
            events += (
                connection.receive(content[12:], 0) if by == "pieces" else connection.received_directly(2)
            )
        if right:
            assert story(events)[-1] == ("end", 1)
        else:
            assert events[-1] == StreamReset(1, PROTOCOL)


def test_a_length_of_nothing_needs_no_data() -> None:
    for length, fine in ((b"0", True), (b"1", False)):
        connection = server()
        events, sent = received(connection, headers(1, (*REQUEST, (b"content-length", length)), end=True))
        assert [type(event) for event in events] == ([HeadersReceived] if fine else [])
        assert [one.kind for one in sent] == ([] if fine else [RST_STREAM])


@pytest.mark.parametrize(
    "start",
    [
        b"GET / HTTP/1.1\r\n",
        PREFACE[:-1] + b"x",
        PREFACE + frame(PING, 0, 0, bytes(8)),
        PREFACE + frame(SETTINGS, 1, 0),
    ],
)
def test_the_preface_is_needed(start: bytes) -> None:
    connection = Http2Connection()
    events = connection.receive(start, 0)
    assert [type(event) for event in events] == [ConnectionClosed]
    assert isinstance(events[0], ConnectionClosed)
    assert (events[0].code, events[0].reason) == (PROTOCOL, Reason.PREFACE)
    assert not connection.established


def test_a_preface_is_refused_at_its_first_wrong_byte() -> None:
    connection = Http2Connection()
    assert connection.receive(b"P", 0) == []
    assert [type(event) for event in connection.receive(b"O", 0)] == [ConnectionClosed]


def test_a_connection_announces_its_settings() -> None:
    connection = Http2Connection(settings=LocalSettings(initial_window=70_000, connection_window=100_000))
    first, second = frames(output(connection))
    values = dict(struct.iter_unpack(">HI", first.payload))
    assert (first.kind, values) == (SETTINGS, {1: 4096, 3: 1024, 4: 70_000, 5: 2**20, 6: 16_384})
    assert second == Frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 100_000 - 65_535))
    connection.receive(PREFACE + settings(), 0)
    assert connection.established
    assert list(frames(output(connection))) == [Frame(SETTINGS, ACK, 0, b"")]


@pytest.mark.parametrize(
    "values", [{"initial_window": 2**31}, {"connection_window": 100}, {"max_frame_size": 2**14 - 1}]
)
def test_settings_of_its_own_are_checked(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        LocalSettings(**values)


def test_ping_and_its_answer() -> None:
    connection = server()
    assert received(connection, frame(PING, 0, 0, b"12345678")) == (
        [PingReceived()],
        [Frame(PING, ACK, 0, b"12345678")],
    )
    connection.ping(b"abcdefgh")
    assert list(frames(output(connection))) == [Frame(PING, 0, 0, b"abcdefgh")]
    assert story(connection.receive(frame(PING, ACK, 0, b"abcdefgh"), 0)) == [("pong", b"abcdefgh")]
    with pytest.raises(ValueError, match="eight"):
        connection.ping(b"")


def test_streams_above_the_last_of_goaway_are_ignored() -> None:
    connection = server()
    connection.receive(headers(1), 0)
    connection.go_away(ErrorCode.NO_ERROR, 2**31 - 1)
    assert len(connection.receive(headers(3), 0)) == 1
    connection.go_away(ErrorCode.NO_ERROR, text=b"bye")
    sent = [one.payload for one in frames(output(connection))]
    assert sent == [struct.pack(">II", 2**31 - 1, 0), struct.pack(">II", 3, 0) + b"bye"]
    late = headers(5) + data(5, b"x") + headers(5, TRAILERS, end=True) + reset(5)
    assert received(connection, late) == ([], [])
    assert story(connection.receive(data(1, b"more", end=True), 0)) == [("data", 1, b"more"), ("end", 1)]
    # A later GOAWAY names no higher stream.
    connection.go_away(ErrorCode.NO_ERROR)
    assert [one.payload for one in frames(output(connection))] == [struct.pack(">II", 3, 0)]


def test_a_client_opens_streams_until_it_may_not() -> None:
    connection = client(None, (3, 2))
    assert (connection.open_stream(), connection.open_stream()) == (1, 3)
    with pytest.raises(NoStreamError):
        connection.open_stream()
    connection.reset(1, ErrorCode.CANCEL)
    assert connection.open_stream() == 5
    connection.reset(5, ErrorCode.CANCEL)
    assert story(connection.receive(frame(GOAWAY, 0, 0, struct.pack(">II", 3, 2) + b"why"), 0)) == [
        ("goaway", 3, 2, b"why")
    ]
    assert not connection.can_open
    with pytest.raises(NoStreamError):
        server().open_stream()


# What a server sends on a client's open stream 1, and how that ends.
RESPONSES: dict[str, tuple[bytes, list[object]]] = {
    "informational": (
        headers(1, ((b":status", b"103"), (b"link", b"x"))) + headers(1, RESPONSE, end=True),
        [HeadersReceived],
    ),
    "trailers only": (headers(1, RESPONSE, end=True), [HeadersReceived]),
    "whole": (
        headers(1, RESPONSE) + data(1, b"x") + headers(1, TRAILERS, end=True),
        [HeadersReceived, DataReceived, TrailersReceived],
    ),
    "informational that ends": (headers(1, ((b":status", b"100"),), end=True), [PROTOCOL]),
    "switching protocols": (headers(1, ((b":status", b"101"),)), [PROTOCOL]),
    "no status": (headers(1, ((b"x", b"y"),)), [PROTOCOL]),
    "a request's head": (headers(1, REQUEST), [PROTOCOL]),
    "data first": (data(1, b"x"), [PROTOCOL]),
    "trailers that go on": (headers(1, RESPONSE) + headers(1, TRAILERS), [HeadersReceived, PROTOCOL]),
    "wrong content-length": (
        headers(1, (*RESPONSE, (b"content-length", b"5")), end=True),
        [PROTOCOL],
    ),
}


@pytest.mark.parametrize("name", RESPONSES)
def test_responses(name: str) -> None:
    content, outcome = RESPONSES[name]
    connection = client()
    connection.send_headers(connection.open_stream(), REQUEST)
    output(connection)
    events = connection.receive(content, 0)
    told = [event.code if isinstance(event, StreamReset) else type(event) for event in events]
    assert told == outcome
    resets = [one.word for one in frames(output(connection)) if one.kind == RST_STREAM]
    assert resets == [one for one in outcome if one == PROTOCOL]


@pytest.mark.parametrize(
    "content",
    [headers(2, RESPONSE), headers(3, RESPONSE), settings((2, 1)), frame(PUSH_PROMISE, 4, 1, bytes(4))],
)
def test_what_a_server_must_not_send(content: bytes) -> None:
    connection = client()
    connection.send_headers(connection.open_stream(), REQUEST)
    events = connection.receive(content, 0)
    assert isinstance(events[-1], ConnectionClosed)
    assert events[-1].code == PROTOCOL


def test_unknown_frames_and_settings_are_skipped() -> None:
    connection = server()
    long = frame(200, 0xFF, 3, bytes(100_000))
    events = connection.receive(long[:50_000], 0) + connection.receive(long[50_000:] + headers(1), 0)
    assert [type(event) for event in events] == [HeadersReceived]
    assert connection.direct() is None
    assert received(connection, settings((77, 5))) == ([], [Frame(SETTINGS, ACK, 0, b"")])


def test_a_header_list_that_is_too_large_is_told() -> None:
    connection = server()
    events = connection.receive(headers(1, (*REQUEST, (b"x", b"y" * 17_000))), 0)
    assert isinstance(events[0], HeadersReceived)
    assert events[0].headers.too_large


def test_frames_of_a_stream_reset_here_keep_tables_and_windows_right() -> None:
    """Ignored frames still count: the dynamic table goes on, and the connection's window is given back."""
    connection = server(LocalSettings(initial_window=65_535, connection_window=65_535))
    other = client()
    for _ in range(2):
        other.send_headers(other.open_stream(), REQUEST)
    first, second = frames(output(other))
    connection.reset(1, ErrorCode.CANCEL)
    connection.receive(headers(1), 0)
    connection.reset(1, ErrorCode.CANCEL)
    output(connection)
    again = frame(HEADERS, END_HEADERS, 1, first.payload)
    events, sent = received(connection, again + data(1, bytes(60_000)))
    assert (events, [(one.kind, one.stream_id, one.word) for one in sent]) == (
        [],
        [(WINDOW_UPDATE, 0, 60_000)],
    )
    events = connection.receive(frame(HEADERS, END_HEADERS, 3, second.payload), 0)
    assert story(events) == [("headers", 3, REQUEST)]
