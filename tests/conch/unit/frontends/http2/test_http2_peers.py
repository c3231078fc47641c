"""Whatever peers do, cut as it may be, a connection tells what h2 tells; what it sends, h2 understands."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import h2.config
import h2.connection
import h2.events
import h2.settings
from hpack import Encoder
from hypothesis import example, given, settings
from hypothesis import strategies as st
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
    PRIORITY_FLAG,
    REQUEST,
    RESPONSE,
    TRAILERS,
    add_data,
    cut,
    events_of,
    frames,
    output,
    reset,
    story,
    window_update,
)
from tests.support.http2 import settings as settings_frame
from tests.support.http2_peer import PREFACE, frame
from tests.support.profiles import scaled

from conch.frontends.grpc.http2.connection import Http2Connection
from conch.frontends.grpc.http2.events import (
    ConnectionClosed,
    DataReceived,
    Event,
    HeadersReceived,
    TrailersReceived,
)
from conch.frontends.grpc.http2.limits import LocalSettings

Story = list[tuple[object, ...]]
positions = st.lists(st.integers(0, 2**20), max_size=30)
contents = st.binary(max_size=300)
values = st.binary(max_size=20).map(bytes.hex).map(str.encode)
extra = st.lists(st.tuples(st.sampled_from([b"grpc-timeout", b"x-trace", b"x-blob-bin"]), values), max_size=3)


class Sender:
    """Makes legal frames of a client, from what `draw` decides."""

    def __init__(self, draw: Callable[[st.SearchStrategy[object]], object]) -> None:
        self.draw = draw
        self.encoder = Encoder()
        self.next_id = 1
        self.open: list[int] = []
        self.parts = [PREFACE + settings_frame((4, 70_000), (3, 7))]

    def number(self, most: int) -> int:
        drawn = self.draw(st.integers(0, most))
        assert isinstance(drawn, int)
        return drawn

    def block(self, stream_id: int, pairs: list[tuple[bytes, bytes]], end: bool) -> None:
        """HEADERS, perhaps with padding and priority, and perhaps with CONTINUATION."""
        content = self.encoder.encode(pairs)
        pieces = list(cut(content, [self.number(2**10) for _ in range(self.number(3))]))
        flags = END_STREAM if end else 0
        first, last = pieces[0], len(pieces) - 1
        if self.number(1):
            flags |= PRIORITY_FLAG
            first = bytes(4) + b"\7" + first
        if self.number(1):
            padding = self.number(255)
            flags |= PADDED
            first = bytes([padding]) + first + bytes(padding)
        self.parts.append(frame(HEADERS, flags | (0 if last else END_HEADERS), stream_id, first))
        for index, piece in enumerate(pieces[1:], 1):
            self.parts.append(frame(CONTINUATION, END_HEADERS if index == last else 0, stream_id, piece))

    def request(self) -> None:
        stream_id, end = self.next_id, bool(self.number(1))
        self.next_id += 2 + 2 * self.number(1)
        drawn = self.draw(extra)
        assert isinstance(drawn, list)
        self.block(stream_id, [*REQUEST, *drawn], end)
        if not end:
            self.open.append(stream_id)

    def send(self) -> None:
        """DATA, trailers or RST_STREAM on an open stream."""
        if not self.open:
            return
        stream_id = self.open[self.number(len(self.open) - 1)]
        kind = self.number(9)
        if kind < 7:
            content = self.draw(contents)
            assert isinstance(content, bytes)
            flags = END_STREAM if kind == 6 else 0
            if self.number(3) == 0:
                padding = self.number(255)
                flags |= PADDED
                content = bytes([padding]) + content + bytes(padding)
            self.parts.append(frame(DATA, flags, stream_id, content))
        elif kind == 7:
            self.parts.append(reset(stream_id, self.number(13)))
        else:
            self.block(stream_id, list(TRAILERS), True)
        if kind >= 6:
            self.open.remove(stream_id)

    def control(self) -> None:
        """A frame that is not a message's."""
        self.parts.append(
            (
                frame(PING, 0, 0, bytes(8)),
                frame(PING, ACK, 0, b"12345678"),
                window_update(0, 1 + self.number(1000)),
                window_update(self.open[-1] if self.open else 0, 1 + self.number(1000)),
                settings_frame((4, self.number(2**20)), (5, 2**14 + self.number(100))),
                frame(PRIORITY, 0, self.next_id + 2, bytes(5)),
                frame(99, self.number(255), self.number(5), bytes(self.number(300))),
            )[self.number(6)]
        )


@st.composite
def recordings(draw: Callable[[st.SearchStrategy[object]], object]) -> bytes:
    """Bytes that a client sends on one connection."""
    sender = Sender(draw)
    for _ in range(sender.number(25)):
        (sender.request, sender.send, sender.send, sender.control)[sender.number(3)]()
    return b"".join(sender.parts)


def story_of_h2(events: list[h2.events.Event]) -> Story:
    """Events of h2, in the words of `story`."""
    told: Story = []
    for event in events:
        match event:
            case h2.events.RequestReceived() | h2.events.ResponseReceived():
                told.append(("headers", event.stream_id, tuple(map(tuple, event.headers))))
            case h2.events.DataReceived():
                add_data(told, event.stream_id, event.data)
            case h2.events.TrailersReceived():
                told.append(("trailers", event.stream_id, tuple(map(tuple, event.headers))))
            case h2.events.StreamEnded():
                told.append(("end", event.stream_id))
            case h2.events.StreamReset():
                told.append(("reset", event.stream_id, int(event.error_code)))
            case h2.events.PingReceived():
                told.append(("ping",))
            case h2.events.PingAckReceived():
                told.append(("pong", event.ping_data))
    return told


def h2_peer(client: bool, window: int = 65_535) -> h2.connection.H2Connection:
    peer = h2.connection.H2Connection(h2.config.H2Configuration(client_side=client, header_encoding=None))
    own = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
    peer.local_settings = h2.settings.Settings(client=client, initial_values=own)
    return peer


def pieces_received(connection: Http2Connection, content: bytes, places: list[int]) -> list[Event]:
    """Events of content that comes in pieces, some of which the owner receives itself."""
    events: list[Event] = []
    for piece in cut(content, places):
        rest, direct = piece, connection.direct()
        if direct is not None and direct[1] % 2:
            count = min(direct[1], len(piece))
            events.append(DataReceived(direct[0], piece, 0, count, False))
            events += connection.received_directly(count)
            rest = piece[count:]
        events += events_of(connection, rest, 0)
    return events


@settings(max_examples=scaled(200))
@given(recordings(), positions)
def test_legal_frames_tell_what_h2_tells_however_they_are_cut(recording: bytes, places: list[int]) -> None:
    peer = h2_peer(False)
    peer.initiate_connection()
    expected = story_of_h2(peer.receive_data(recording))
    whole, connection = Http2Connection(), Http2Connection()
    assert story(events_of(whole, recording, 0)) == expected
    assert story(pieces_received(connection, recording, places)) == expected
    assert output(whole) == output(connection)
    assert whole.open_streams == connection.open_streams == peer.open_inbound_streams


@settings(max_examples=scaled(50))
@given(recordings())
def test_single_bytes_tell_the_same(recording: bytes) -> None:
    connection = Http2Connection()
    events = [event for byte in recording for event in events_of(connection, bytes([byte]), 0)]
    assert story(events) == story(events_of(Http2Connection(), recording, 0))


edits = st.lists(
    st.tuples(
        st.sampled_from(["flip", "delete", "repeat", "insert"]),
        st.integers(0, 2**20),
        st.integers(1, 40),
        st.binary(min_size=1, max_size=20),
    ),
    min_size=1,
    max_size=6,
)


def mutated(recording: bytes, changes: list[tuple[str, int, int, bytes]]) -> bytes:
    content = bytearray(recording)
    for kind, place, count, new in changes:
        at = place % (len(content) + 1)
        if kind == "flip" and at < len(content):
            content[at] ^= new[0] or 1
        elif kind == "delete":
            del content[at : at + count]
        elif kind == "repeat":
            content[at:at] = content[at : at + count]
        elif kind == "insert":
            content[at:at] = new
    return bytes(content)


@settings(max_examples=scaled(500))
@given(recordings(), edits, positions, st.booleans())
def test_mutated_recordings_close_the_connection_at_worst(
    recording: bytes, changes: list[tuple[str, int, int, bytes]], places: list[int], client: bool
) -> None:
    content = mutated(recording, changes)
    if client:
        content = content[len(PREFACE) :]
    connection, whole = Http2Connection(client=client), Http2Connection(client=client)
    if client:
        for each in (connection, whole):
            for _ in range(3):
                each.send_headers(each.open_stream(), REQUEST)
    events: list[Event] = []
    for piece in cut(content, places):
        assert not any(isinstance(event, ConnectionClosed) for event in events[:-1])
        events += events_of(connection, piece, 0)
        for event in events[-3:]:
            if isinstance(event, HeadersReceived | DataReceived | TrailersReceived):
                connection.consumed(event.stream_id, 1 if isinstance(event, DataReceived) else 0)
    assert connection.closed == (bool(events) and isinstance(events[-1], ConnectionClosed))
    list(frames(output(connection)))
    assert story(events) == story(events_of(whole, content, 0))


def endless(numbers: list[int]) -> Iterator[int]:
    while True:
        yield from numbers


small_windows = st.integers(1, 500)
messages = st.lists(st.integers(0, 40_000), min_size=1, max_size=4)
turns = st.lists(st.integers(0, 2**20), min_size=1, max_size=20)


def bytes_of(stream_id: int, index: int, count: int) -> bytes:
    return bytes([stream_id % 251, index]) * (count // 2) + b"!" * (count % 2)


@settings(max_examples=scaled(30))
@given(small_windows, st.lists(messages, min_size=1, max_size=4), turns)
@example(1, [[5]], [0])
def test_answers_arrive_whole_at_h2_through_small_windows(
    window: int, answers: list[list[int]], numbers: list[int]
) -> None:
    places = endless(numbers)
    peer, connection = h2_peer(True, window * 10), Http2Connection()
    peer.initiate_connection()
    for index, _ in enumerate(answers):
        peer.send_headers(1 + 2 * index, REQUEST, end_stream=True)
    wanted, got = {}, dict.fromkeys(range(1, 2 * len(answers), 2), b"")
    for event in events_of(connection, peer.data_to_send(), 0):
        if isinstance(event, HeadersReceived):
            stream_id = event.stream_id
            sizes = answers[stream_id // 2]
            parts = [bytes_of(stream_id, index, size // 4) for index, size in enumerate(sizes)]
            connection.send_headers(stream_id, RESPONSE)
            for part in parts:
                connection.send_data(stream_id, [part[:5], memoryview(part)[5:]])
            connection.send_trailers(stream_id, TRAILERS)
            wanted[stream_id] = b"".join(parts)
    ended = set()
    now_ns = 0
    while sent := output(connection):
        for piece in cut(sent, [next(places)]):
            for told in peer.receive_data(piece):
                if isinstance(told, h2.events.DataReceived):
                    got[told.stream_id] += told.data
                    peer.acknowledge_received_data(told.flow_controlled_length, told.stream_id)
                elif isinstance(told, h2.events.StreamEnded):
                    ended.add(told.stream_id)
        if next(places) % 7 == 0 and len(ended) < len(wanted):
            peer.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1 + next(places) % 3000})
        # h2 gives windows back only once half of the largest that it had is used.
        for stream_id in wanted:
            if stream_id not in ended and peer.remote_flow_control_window(stream_id) <= 0:
                peer.increment_flow_control_window(400 + next(places) % 3000, stream_id)
        if peer.inbound_flow_control_window < 5000:
            peer.increment_flow_control_window(20_000)
        # At a rate of SETTINGS that is allowed.
        now_ns += 10**9
        events_of(connection, peer.data_to_send(), now_ns)
    assert got == wanted
    assert ended == set(wanted)
    assert connection.open_streams == 0


@settings(max_examples=scaled(60))
@given(small_windows, small_windows, st.integers(0, 5000), st.lists(messages, min_size=1, max_size=4), turns)
def test_both_ends_of_ours_exchange_messages_whole(
    mine: int, theirs: int, more: int, calls: list[list[int]], numbers: list[int]
) -> None:
    """Data of both directions at once, windows of a few bytes, readers that consume when they like."""
    places = endless(numbers)
    client = Http2Connection(True, LocalSettings(initial_window=mine, connection_window=65_535 + more))
    server = Http2Connection(False, LocalSettings(initial_window=theirs, connection_window=65_535))
    got: dict[tuple[bool, int], bytes] = {}
    ended: dict[tuple[bool, int], bool] = {}
    unread: list[tuple[Http2Connection, int, int]] = []
    wanted = {}
    for sizes in calls:
        stream_id = client.open_stream()
        wanted[stream_id] = [bytes_of(stream_id, index, size // 8) for index, size in enumerate(sizes)]
        client.send_headers(stream_id, REQUEST)
        client.send_data(stream_id, wanted[stream_id])
        client.send_data(stream_id, [b"last"], end_stream=True)
    busy = True
    while busy:
        busy = False
        for sender, receiver in ((client, server), (server, client)):
            for piece in cut(output(sender), [next(places), next(places)]):
                busy = True
                for event in events_of(receiver, piece, 0):
                    assert not isinstance(event, ConnectionClosed)
                    if isinstance(event, HeadersReceived) and receiver is server:
                        server.send_headers(event.stream_id, RESPONSE)
                        for part in wanted[event.stream_id]:
                            server.send_data(event.stream_id, [part])
                    elif isinstance(event, DataReceived):
                        key, count = (receiver is server, event.stream_id), event.end - event.start
                        got[key] = got.get(key, b"") + event.data[event.start : event.end]
                        ended[key] = event.end_stream
                        unread.append((receiver, event.stream_id, count))
                        if event.end_stream:  # trailers before it drop what the client has left
                            server.send_trailers(event.stream_id, TRAILERS)
                    elif isinstance(event, TrailersReceived):
                        ended[False, event.stream_id] = True
        if unread:
            receiver, stream_id, count = unread.pop(next(places) % len(unread))
            receiver.consumed(stream_id, count)
            busy = True
    for stream_id, parts in wanted.items():
        assert got[True, stream_id] == b"".join(parts) + b"last"
        assert got.get((False, stream_id), b"") == b"".join(parts)
        assert ended[True, stream_id]
        assert ended[False, stream_id]
        assert client.unsent(stream_id) == server.unsent(stream_id) == 0
    assert client.open_streams == server.open_streams == 0


@settings(max_examples=scaled(60))
@given(small_windows, st.lists(messages, min_size=1, max_size=3), turns)
def test_requests_of_h2_arrive_whole_through_small_windows(
    window: int, calls: list[list[int]], numbers: list[int]
) -> None:
    places = endless(numbers)
    peer, connection = (
        h2_peer(True),
        Http2Connection(settings=LocalSettings(initial_window=window, connection_window=65_535)),
    )
    peer.initiate_connection()
    peer.receive_data(output(connection))
    events_of(connection, peer.data_to_send(), 0)
    peer.receive_data(output(connection))
    wanted = {}
    for index, sizes in enumerate(calls):
        stream_id = 1 + 2 * index
        peer.send_headers(stream_id, REQUEST)
        wanted[stream_id] = b"".join(
            bytes_of(stream_id, number, size // 8) for number, size in enumerate(sizes)
        )
    left = dict(wanted)
    got = dict.fromkeys(wanted, b"")
    while left:
        for stream_id in list(left):
            content = left.pop(stream_id)
            room = min(peer.local_flow_control_window(stream_id), peer.max_outbound_frame_size)
            peer.send_data(stream_id, content[:room], end_stream=room >= len(content))
            if room < len(content):
                left[stream_id] = content[room:]
        for piece in cut(peer.data_to_send(), [next(places)]):
            for event in events_of(connection, piece, 0):
                if isinstance(event, DataReceived):
                    got[event.stream_id] += event.data[event.start : event.end]
                    connection.consumed(event.stream_id, event.end - event.start)
        peer.receive_data(output(connection))
    assert got == wanted


def test_long_header_blocks_are_continued() -> None:
    """Also one whose last frame is full: of the last two the table has all other fields."""
    client, server = Http2Connection(client=True), h2_peer(False)
    server.initiate_connection()
    events_of(client, server.data_to_send(), 0)
    last = 0
    for fills in (False, False, True):
        large = ((b"x-large", b"v" * (40_000 + (16_384 - last if fills else 0))),)
        stream_id = client.open_stream()
        client.send_headers(stream_id, REQUEST + large, end_stream=True)
        sent = output(client)
        found = [one for one in frames(sent) if one.stream_id == stream_id]
        assert [one.kind for one in found] == [HEADERS, CONTINUATION, CONTINUATION]
        told = story_of_h2(server.receive_data(sent))
        assert told == [("headers", stream_id, REQUEST + large), ("end", stream_id)]
        last = len(found[-1].payload)
    assert last == 16_384


def test_streams_take_turns() -> None:
    """A long answer does not hold up another: each has four frames in turn."""
    connection = Http2Connection()
    events_of(connection, PREFACE + settings_frame((4, 2**20)) + window_update(0, 2**20), 0)
    peer = Encoder()
    for stream_id in (1, 3):
        events_of(connection, frame(HEADERS, END_HEADERS | END_STREAM, stream_id, peer.encode(REQUEST)), 0)
    for stream_id in (1, 3):
        connection.send_data(stream_id, [bytes(10 * 16_384)], end_stream=True)
    sent = [one for one in frames(output(connection)) if one.kind == DATA]
    assert [one.stream_id for one in sent] == [1] * 4 + [3] * 4 + [1] * 4 + [3] * 4 + [1, 1, 3, 3]
    assert [one.flags & END_STREAM for one in sent] == [0] * 16 + [0, 1, 0, 1]
