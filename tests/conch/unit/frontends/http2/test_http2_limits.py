"""Limits on the cost of a peer: each closes the connection with its reason, and nothing legal reaches it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from itertools import islice

import pytest
from tests.support.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PADDED,
    PING,
    PRIORITY,
    REQUEST,
    RESPONSE,
    RST_STREAM,
    SETTINGS,
    TRAILERS,
    Frame,
    block,
    data,
    events_of,
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

from conch.frontends.grpc.http2.connection import FRAMES_AT_ONCE, Http2Connection
from conch.frontends.grpc.http2.events import (
    ConnectionClosed,
    DataReceived,
    Event,
    PingReceived,
    StreamRefused,
    StreamReset,
    WindowOpened,
)
from conch.frontends.grpc.http2.frames import ErrorCode
from conch.frontends.grpc.http2.limits import Http2Limits, LocalSettings, Reason

SECOND = 10**9
POINTLESS = frame(PING, 0, 0, bytes(8))


def reason(events: list[Event]) -> Reason | None:
    """Reason for which the connection was closed, if it was."""
    for event in events:
        if isinstance(event, ConnectionClosed):
            assert event.code == ErrorCode.ENHANCE_YOUR_CALM
            return event.reason
    return None


def feed(connection: Http2Connection, parts: Iterator[bytes], every_ns: int = 0) -> tuple[Reason | None, int]:
    """Gives a connection parts, at intervals, until it closes: why it did, and after how many."""
    count = 0
    for count, part in enumerate(parts, 1):
        if found := reason(events_of(connection, part, count * every_ns)):
            return found, count
        output(connection)
    return None, count


def continued(count: int, each: bytes) -> bytes:
    """A header block in a HEADERS frame and CONTINUATION frames."""
    parts = [frame(HEADERS, END_STREAM, 1, block(REQUEST))]
    parts += [
        frame(CONTINUATION, END_HEADERS if last else 0, 1, each) for last in [False] * (count - 1) + [True]
    ]
    return b"".join(parts)


def test_continuations() -> None:
    assert len(events_of(server(), continued(8, b""), 0)) == 1
    assert reason(events_of(server(), continued(9, b""), 0)) == Reason.CONTINUATIONS


def test_bytes_of_a_header_block() -> None:
    assert reason(events_of(server(), continued(8, bytes(9000)), 0)) == Reason.HEADER_BLOCK
    # Before it is read, where a frame alone is too long.
    for length in (65_536, 65_537):
        start = frame(HEADERS, END_HEADERS, 1, bytes(length))[:9]
        expected = Reason.HEADER_BLOCK if length > 65_536 else None
        assert reason(events_of(server(), start, 0)) == expected
    assert (
        reason(events_of(server(), frame(HEADERS, END_HEADERS, 1, bytes(65_537)), 0)) == Reason.HEADER_BLOCK
    )


def test_header_lists() -> None:
    many = server(LocalSettings(max_header_list_bytes=1000))
    assert story(events_of(many, headers(1, (*REQUEST, (b"x", b"y" * 2000)), end=True), 0))[-1] == ("end", 1)
    assert reason(events_of(many, headers(3, (*REQUEST, (b"x", b"y" * 4000))), 0)) == Reason.HEADER_LIST


@pytest.mark.parametrize("kind", [SETTINGS, PING, 7])
def test_control_frames_are_short(kind: int) -> None:
    assert reason(events_of(server(), frame(kind, 0, 0, bytes(16_386))[:9], 0)) == Reason.CONTROL_FRAME
    assert reason(events_of(server(), frame(kind, 0, 0, bytes(16_386)), 0)) == Reason.CONTROL_FRAME


def test_concurrent_streams() -> None:
    connection = server(LocalSettings(max_concurrent_streams=3))
    events_of(connection, b"".join(headers(number) for number in (1, 3, 5)), 0)
    assert events_of(connection, headers(7), 0) == []
    refused = Frame(RST_STREAM, 0, 7, ErrorCode.REFUSED_STREAM.to_bytes(4, "big"))
    assert list(frames(output(connection))) == [refused]
    events_of(connection, reset(1), 0)
    assert len(events_of(connection, headers(9), 0)) == 1


def rapid_resets(from_id: int = 1) -> Iterator[bytes]:
    for number in range(from_id, 10_000, 2):
        yield headers(number) + reset(number)


def made_resets() -> Iterator[bytes]:
    """MadeYouReset: the peer errs, so that this side resets (CVE-2025-8671)."""
    for number in range(1, 10_000, 2):
        yield headers(number) + window_update(number, 0)


def refused_streams() -> Iterator[bytes]:
    for number in range(1, 10_000, 2):
        yield headers(number, (*REQUEST, (b"connection", b"close")))


def closed_streams() -> Iterator[bytes]:
    for number in range(1, 10_000, 2):
        yield headers(number, end=True) + data(number, b"x")


@pytest.mark.parametrize("attack", [rapid_resets, made_resets, refused_streams, closed_streams])
@pytest.mark.parametrize("interval", [0, SECOND // 100, SECOND // 25])
def test_resets(attack: type[Iterator[bytes]], interval: int) -> None:
    """A client that resets all that it gets has every other stream refused, and is not disconnected."""
    connection = server()
    refused = 0
    for count, part in enumerate(islice(attack(), 2000)):
        events = events_of(connection, part, count * interval)
        assert reason(events) is None
        refused += sum(isinstance(each, StreamRefused) for each in events)
    assert refused >= (350 if interval > SECOND // 50 else 880)


def test_slow_resets_are_no_attack() -> None:
    assert feed(server(), rapid_resets(9_001), SECOND // 10) == (None, 500)


def test_resets_of_half_of_the_streams_are_no_attack() -> None:
    def calls() -> Iterator[bytes]:
        for number in range(1, 6_000, 6):
            yield headers(number) + headers(number + 2) + headers(number + 4) + reset(number)

    connection = server(LocalSettings(max_concurrent_streams=10_000))
    assert feed(connection, calls()) == (None, 1000)


def test_resets_of_old_streams_are_no_attack() -> None:
    """Deadlines of many calls pass at once, long after they began."""
    connection = server()
    events_of(connection, b"".join(headers(number) for number in range(1, 1001, 2)), 0)
    output(connection)
    for seconds in (6, 12):
        events_of(connection, b"", seconds * SECOND)
    events = events_of(connection, b"".join(reset(number) for number in range(1, 1001, 2)), 18 * SECOND)
    assert [type(event) for event in events] == [StreamReset] * 500


@pytest.mark.parametrize("ends", [True, False])
def test_resets_after_the_answer_are_no_attack(ends: bool) -> None:
    """A client ends its side by RST_STREAM where the answer came early, or has had enough of a stream."""
    connection = server()
    for number in range(1, 2001, 2):
        events_of(connection, headers(number), 0)
        connection.send_headers(number, RESPONSE, end_stream=ends)
        connection.send_data(number, [b"answer"])
        assert events_of(connection, reset(number), 0) == ([] if ends else [StreamReset(number, 8)])
        output(connection)


def test_empty_data() -> None:
    for empty in (data(1, b""), frame(DATA, PADDED, 1, b"\5" + bytes(5))):
        connection = server()
        events_of(connection, headers(1), 0)
        assert events_of(connection, (empty * 100 + data(1, b"x")) * 3, 0) != []
        assert feed(connection, iter([empty] * 101)) == (Reason.EMPTY_DATA, 101)


@pytest.mark.parametrize("what", [POINTLESS, settings()])
def test_acknowledgements_that_are_not_sent(what: bytes) -> None:
    connection = server()
    assert reason(events_of(connection, what * 100, 0)) is None
    assert reason(events_of(connection, what, 0)) == Reason.UNSENT_ACKS


@pytest.mark.parametrize(("what", "found"), [(POINTLESS, Reason.PINGS), (settings(), Reason.SETTINGS)])
def test_rates(what: bytes, found: Reason) -> None:
    # The peer's first settings and their acknowledgement count, too.
    first = 2 if found == Reason.SETTINGS else 0
    assert feed(server(), iter([what] * 1000)) == (found, 201 - first)
    assert feed(server(), iter([what] * 1000), SECOND // 19) == (None, 1000)
    assert feed(server(), iter([what] * 1000), SECOND // 45)[0] == found


def test_pings_that_measure_the_bandwidth_are_no_flood() -> None:
    """Such as those of grpc-go: one for each round trip with data."""
    connection = server()
    events_of(connection, headers(1), 0)
    connection.send_headers(1, RESPONSE)
    for _ in range(2000):
        connection.send_data(1, [b"message"])
        assert events_of(connection, POINTLESS + window_update(1, 7) + window_update(0, 7), 0) == [
            PingReceived()
        ]
        output(connection)


def test_window_updates() -> None:
    connection = server()
    events_of(connection, headers(1), 0)
    assert feed(connection, iter([window_update(0, 1)] * 2000)) == (Reason.WINDOW_UPDATES, 1003)


@pytest.mark.parametrize(
    "idle",
    [frame(PRIORITY, 0, 1, bytes(5)), frame(0xF0, 0, 0, b""), frame(PING, ACK, 0, bytes(8)), reset(1)],
    ids=["priority", "unknown", "acknowledgement", "reset"],
)
def test_frames_that_bring_nothing(idle: bytes) -> None:
    def connection() -> Http2Connection:
        made = server()
        events_of(made, headers(1) + reset(1), 0)
        return made

    assert feed(connection(), iter([idle] * 2000)) == (Reason.IDLE_FRAMES, 1003)
    assert feed(connection(), iter([idle] * 2000), SECOND // 99) == (None, 2000)


def test_some_frames_are_read_at_a_time() -> None:
    connection = server()
    many = b"".join(headers(number) for number in range(1, 101, 2))
    assert len(connection.receive(many + data(99, b"x")[:5], 0)) == FRAMES_AT_ONCE
    calls = 1
    while connection.unparsed:
        assert len(connection.receive(b"", 0)) <= FRAMES_AT_ONCE
        calls += 1
    assert calls == -(-50 // FRAMES_AT_ONCE)
    (last,) = connection.receive(data(99, b"x")[5:], 0)
    assert isinstance(last, DataReceived)


def test_a_setting_of_windows_is_linear() -> None:
    """A frame that changes the windows of all streams thousands of times costs one look at each."""
    connection = server()
    events_of(connection, b"".join(headers(number, end=True) for number in range(1, 2049, 2)), 0)
    for number in range(1, 2049, 2):
        connection.send_data(number, [bytes(100)])
    many = settings(*[(4, number % 2 + 1) for number in range(2730)])
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        assert reason(events_of(connection, many, 0)) is None
    finally:
        sys.setprofile(None)
    assert calls < 20_000


def test_what_is_kept_of_closed_streams_is_bounded() -> None:
    connection = server(limits=Http2Limits(resets=10**9))

    def rounds(first: int, end: int) -> Iterator[bytes]:
        for number in range(first, end, 8):
            yield headers(number) + window_update(number, 0)

    feed(connection, rounds(1, 20_000))
    assert connection.open_streams == 0
    few = size_of(connection)
    feed(connection, rounds(20_001, 60_000))
    feed(connection, (headers(number) + reset(number) for number in range(60_001, 100_000, 8)))
    assert size_of(connection) <= few * 1.1


def size_of(value: object, seen: set[int] | None = None) -> int:
    """Memory of an object and what it holds, but for classes and functions."""
    seen = set() if seen is None else seen
    if id(value) in seen or callable(value):
        return 0
    seen.add(id(value))
    return sys.getsizeof(value) + sum(size_of(one, seen) for one in gc.get_referents(value))


def test_output_is_bounded_and_the_rest_is_unsent() -> None:
    connection = server(None, Http2Limits(output_bytes=100_000), (4, 2**31 - 1), (5, 2**14))
    events_of(connection, window_update(0, 2**30), 0)
    events_of(connection, headers(1, end=True), 0)
    connection.send_headers(1, RESPONSE)
    connection.send_data(1, [bytes(10**6)])
    connection.send_trailers(1, TRAILERS)
    assert connection.unsent(1) == 10**6
    sizes = []
    while taken := connection.take_output():
        sizes.append(sum(map(len, taken)))
        assert connection.take_events() == [WindowOpened(1)]
        # Control frames do not wait behind all of it.
        connection.ping(bytes(8))
        if not connection.unsent(1):
            break
    assert max(sizes) < 100_000 + 2 * 2**14
    assert sum(sizes) > 10**6
    assert connection.open_streams == 0


def test_small_messages_are_unsent_too_once_the_output_is_full() -> None:
    connection = server(None, Http2Limits(output_bytes=1000))
    events_of(connection, headers(1), 0)
    for _ in range(20):
        connection.send_data(1, [bytes(100)])
    assert connection.unsent(1) == 1000
    assert sum(len(one.payload) for one in frames(output(connection))) == 2000


def test_windows_of_a_peer_that_sends_too_much() -> None:
    connection = server(LocalSettings(initial_window=100_000, connection_window=150_000))
    events_of(connection, headers(1) + headers(3) + data(1, bytes(100_000)) + data(3, bytes(50_000)), 0)
    assert story(events_of(connection, data(1, b""), 0)) == []
    events = events_of(connection, data(3, b"x"), 0)
    assert isinstance(events[-1], ConnectionClosed)
    assert events[-1].reason == Reason.FLOW_CONTROL
    connection = server(LocalSettings(initial_window=100_000, connection_window=150_000))
    assert events_of(connection, headers(1) + data(1, bytes(100_001)), 0)[1:] == [
        StreamReset(1, ErrorCode.FLOW_CONTROL_ERROR)
    ]


def test_all_that_is_received_comes_back_to_the_windows() -> None:
    """Also padding, and what a stream had not consumed when it closes."""
    connection = server(LocalSettings(initial_window=65_535, connection_window=65_535))
    events_of(connection, headers(1) + frame(DATA, PADDED, 1, bytes([200]) + bytes(19_999)), 0)
    connection.consumed(1, 20_000 - 201)
    assert [(each.stream_id, each.word) for each in frames(output(connection))] == [(0, 20_000), (1, 20_000)]
    events_of(connection, data(1, bytes(20_000)) + reset(1), 0)
    assert [(each.stream_id, each.word) for each in frames(output(connection))] == [(0, 20_000)]


def test_settings_that_open_a_window_wake_its_stream() -> None:
    connection = server(None, None, (4, 10))
    events_of(connection, headers(1, end=True), 0)
    connection.send_data(1, [bytes(100)])
    assert [len(each.payload) for each in frames(output(connection))] == [10]
    events_of(connection, settings((4, 1000)), 0)
    assert connection.unsent(1) == 0


def test_a_peer_may_fill_the_default_window_until_it_knows_of_a_smaller_one() -> None:
    connection = Http2Connection(settings=LocalSettings(initial_window=1000))
    start = PREFACE + settings() + headers(1) + data(1, bytes(50_000))
    assert reason(events_of(connection, start, 0)) is None
    assert connection.open_streams == 1
    events_of(connection, frame(SETTINGS, 1, 0), 0)
    assert events_of(connection, data(1, b"x"), 0) == [StreamReset(1, ErrorCode.FLOW_CONTROL_ERROR)]
    events = events_of(connection, headers(3) + data(3, bytes(1001)), 0)
    assert events[-1] == StreamReset(3, ErrorCode.FLOW_CONTROL_ERROR)
