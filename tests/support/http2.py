"""Both ends of an HTTP/2 connection without sockets: frames by hand, and what connections make of them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from hpack import Encoder, NeverIndexedHeaderTuple
from tests.support.http2_peer import PREFACE, frame

from conch.frontends.grpc.http2.connection import Http2Connection
from conch.frontends.grpc.http2.events import (
    DataReceived,
    Event,
    GoAwayReceived,
    HeadersReceived,
    PingAcknowledged,
    PingReceived,
    StreamReset,
    TrailersReceived,
    WindowOpened,
)
from conch.frontends.grpc.http2.limits import Http2Limits, LocalSettings

Pairs = tuple[tuple[bytes, bytes], ...]

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = range(5)
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(5, 10)
END_STREAM = ACK = 1
END_HEADERS, PADDED, PRIORITY_FLAG = 4, 8, 32

REQUEST: Pairs = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/inference.GRPCInferenceService/ModelInfer"),
    (b":authority", b"localhost:8001"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
)
RESPONSE: Pairs = ((b":status", b"200"), (b"content-type", b"application/grpc"))
TRAILERS: Pairs = ((b"grpc-status", b"0"), (b"grpc-message", b"fine"))


class Frame(NamedTuple):
    """A frame that was sent."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes

    @property
    def word(self) -> int:
        """Its payload's last four bytes: an increment, or an error code."""
        return int.from_bytes(self.payload[-4:], "big")


def frames(data: bytes) -> Iterator[Frame]:
    """The frames of what a connection sent."""
    data = data.removeprefix(PREFACE)
    while data:
        length, kind, flags = int.from_bytes(data[:3], "big"), data[3], data[4]
        assert len(data) >= 9 + length, "output ends within a frame"
        yield Frame(kind, flags, int.from_bytes(data[5:9], "big"), data[9 : 9 + length])
        data = data[9 + length :]


@lru_cache
def block(pairs: Pairs) -> bytes:
    """A header block that leaves the dynamic table alone."""
    return Encoder().encode([NeverIndexedHeaderTuple(*pair) for pair in pairs])


def headers(stream_id: int, pairs: Pairs = REQUEST, end: bool = False) -> bytes:
    """A HEADERS frame."""
    return frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), stream_id, block(pairs))


def data(stream_id: int, content: bytes, end: bool = False) -> bytes:
    """A DATA frame."""
    return frame(DATA, END_STREAM if end else 0, stream_id, content)


def reset(stream_id: int, code: int = 8) -> bytes:
    """An RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream_id, struct.pack(">I", code))


def window_update(stream_id: int, increment: int) -> bytes:
    """A WINDOW_UPDATE frame."""
    return frame(WINDOW_UPDATE, 0, stream_id, struct.pack(">I", increment))


def settings(*values: tuple[int, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *one) for one in values))


def events_of(connection: Http2Connection, data: bytes, now_ns: int) -> list[Event]:
    """All events of what has arrived, however many frames it has."""
    events = connection.receive(data, now_ns)
    while connection.unparsed:
        events += connection.receive(b"", now_ns)
    return events


def output(connection: Http2Connection) -> bytes:
    """All that a connection has to send."""
    parts = []
    while taken := connection.take_output():
        parts += taken
    return b"".join(parts)


def server(
    settings_: LocalSettings | None = None, limits: Http2Limits | None = None, *peer: tuple[int, int]
) -> Http2Connection:
    """A server's side after both have sent their settings; the `peer` has these."""
    connection = Http2Connection(settings=settings_, limits=limits)
    assert connection.receive(PREFACE + settings(*peer) + frame(SETTINGS, ACK, 0), 0) == []
    output(connection)
    return connection


def client(settings_: LocalSettings | None = None, *peer: tuple[int, int]) -> Http2Connection:
    """A client's side after both have sent their settings; the `peer` has these."""
    connection = Http2Connection(client=True, settings=settings_)
    assert connection.receive(settings(*peer) + frame(SETTINGS, ACK, 0), 0) == []
    output(connection)
    return connection


def cut(data: bytes, positions: Iterable[int]) -> Iterator[bytes]:
    """Pieces of what is sent, cut at positions modulo its length."""
    places = sorted({position % len(data) for position in positions} | {0, len(data)}) if data else [0]
    for start, stop in pairwise(places):
        yield data[start:stop]


def story(events: Iterable[Event]) -> list[tuple[object, ...]]:
    """Contents of events, however the data was cut, without what only the owner's timing decides."""
    told: list[tuple[object, ...]] = []
    for event in events:
        if isinstance(event, HeadersReceived):
            told.append(("headers", event.stream_id, event.headers.pairs))
            if event.end_stream:
                told.append(("end", event.stream_id))
        elif isinstance(event, DataReceived):
            add_data(told, event.stream_id, event.data[event.start : event.end])
            if event.end_stream:
                told.append(("end", event.stream_id))
        elif isinstance(event, TrailersReceived):
            told += [("trailers", event.stream_id, event.headers.pairs), ("end", event.stream_id)]
        elif isinstance(event, StreamReset):
            told.append(("reset", event.stream_id, int(event.code)))
        elif isinstance(event, PingAcknowledged):
            told.append(("pong", event.payload))
        elif isinstance(event, PingReceived):
            told.append(("ping",))
        elif isinstance(event, GoAwayReceived):
            told.append(("goaway", event.last_stream_id, event.code, event.text))
        elif not isinstance(event, WindowOpened):
            told.append((type(event).__name__, repr(event)))
    return told


def add_data(told: list[tuple[object, ...]], stream_id: int, content: bytes) -> None:
    """Adds data to a story, to what came right before where that was data of the stream."""
    if not content:
        return
    if told and told[-1][:2] == ("data", stream_id):
        content = bytes(told.pop()[2]) + content  # type: ignore[call-overload]
    told.append(("data", stream_id, content))
