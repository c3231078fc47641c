"""The HTTP/2 conformance cases of h2spec (summerwind/h2spec 2.6), with gRPC calls as requests.

On grpcio they would hold what gRPC's C core does, which differs in many of them and from version to version.

Sections are those of RFC 9113; `generic` and `hpack` ones are h2spec's own. A connection error has to come as
GOAWAY and an end of the connection, where h2spec takes an end alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from hpack import Encoder
from tests.support.http2_peer import (
    ACK,
    END_HEADERS,
    END_STREAM,
    LIVE,
    MAX_WINDOW,
    PADDED,
    PREFACE,
    WITH_PRIORITY,
    ErrorCode,
    FrameType,
    Http2Peer,
    Setting,
    call,
    call_pairs,
    continuation,
    data,
    dependency,
    frame,
    goaway,
    header_block,
    headers,
    initial_window,
    integer,
    message,
    ping,
    priority,
    reset,
    settings,
    window_update,
)
from tests.support.servers import WAIT_S, serving

PROTOCOL, FLOW, CLOSED = ErrorCode.PROTOCOL_ERROR, ErrorCode.FLOW_CONTROL_ERROR, ErrorCode.STREAM_CLOSED
SIZE, COMPRESSION = ErrorCode.FRAME_SIZE_ERROR, ErrorCode.COMPRESSION_ERROR
WHOLE = END_HEADERS | END_STREAM
REQUEST = header_block(*call_pairs())
MORE = header_block(("x-more", "x" * 4000))
UNKNOWN = frame(0x16, 0, 0, bytes(8))
NO_WINDOW = initial_window(0)

Step = bytes | Callable[[Http2Peer], None]
"""Bytes to send, or something to wait for."""


def connection_error(*codes: int) -> Step:
    return lambda peer: peer.wait_connection_error(*codes)


def stream_error(*codes: int, stream: int = 1) -> Step:
    return lambda peer: peer.wait_stream_error(*codes, stream=stream)


def served(peer: Http2Peer) -> None:
    fields = peer.wait_end()
    assert (fields[":status"], fields["grpc-status"]) == ("200", "0"), fields


def refused(peer: Http2Peer) -> None:
    assert peer.wait_end()[":status"] == "405"


def settings_ack(peer: Http2Peer) -> None:
    peer.wait_frame(FrameType.SETTINGS, flags=ACK)


def data_of(length: int) -> Step:
    return lambda peer: peer.wait_data(length)


def pong(payload: bytes = bytes(8)) -> Step:
    return lambda peer: peer.wait_pong(payload)


def first_frame_is_settings(peer: Http2Peer) -> None:
    first = peer.wait_any()
    assert (first.kind, first.flags) == (FrameType.SETTINGS, 0)


def connection_closed(peer: Http2Peer) -> None:
    peer.wait_closed()


def handshake(peer: Http2Peer) -> None:
    peer.handshake((Setting.INITIAL_WINDOW_SIZE, 65535))


def opened(stream: int = 1, flags: int = END_HEADERS) -> bytes:
    """The headers of a call whose message is still to come."""
    return headers(stream, REQUEST, flags)


def ended(stream: int = 1) -> bytes:
    """A call's message, the last of it."""
    return data(stream, message(), END_STREAM)


def with_pairs(*more: tuple[str, str]) -> bytes:
    """The headers of a call with more fields."""
    return headers(1, header_block(*call_pairs(), *more))


def changed(name: str, *values: str) -> bytes:
    """The headers of a call in which a field has these values, each in a field of its own."""
    pairs = []
    for each in call_pairs():
        pairs += [(name, value) for value in values] if each[0] == name else [each]
    return headers(1, header_block(*pairs))


def with_fields(first: bytes = b"", last: bytes = b"") -> bytes:
    """A whole call with these bytes in its header block."""
    return headers(1, first + REQUEST + last) + ended()


def request(method: str) -> bytes:
    """A request without a body."""
    return headers(1, header_block((":method", method), *call_pairs()[1:4]), WHOLE)


def literal(first: int, bits: int, name: str, huffman: bool) -> bytes:
    """A literal field in one of HPACK's three representations, `user-agent` by its index."""
    encoded = Encoder().encode([(name, "h2spec")], huffman=huffman)
    return integer(58 if name == "user-agent" else 0, bits, first) + encoded[1:]


def too_large(frame_of: Callable[[bytes], bytes]) -> Step:
    """A frame that is a byte longer than the server's SETTINGS_MAX_FRAME_SIZE."""

    def send(peer: Http2Peer) -> None:
        size = peer.settings.get(Setting.MAX_FRAME_SIZE, 16384) + 1
        if size == 1 << 24:
            pytest.skip("the server takes frames of any size")
        peer.send(frame_of(bytes(size)))

    return send


def too_many_streams(peer: Http2Peer) -> None:
    peer.send(*(call(stream) for stream in range(1, 2 * peer.settings[Setting.MAX_CONCURRENT_STREAMS], 2)))


def one_more_stream(peer: Http2Peer) -> None:
    last = 2 * peer.settings[Setting.MAX_CONCURRENT_STREAMS] + 1
    peer.send(call(last))
    peer.wait_stream_error(PROTOCOL, ErrorCode.REFUSED_STREAM, stream=last)


def too_large_table(peer: Http2Peer) -> None:
    size = peer.settings.get(Setting.HEADER_TABLE_SIZE, 4096) + 1
    peer.send(with_fields(first=integer(size, 5, 0x20)))


HALF_CLOSED = (NO_WINDOW, settings_ack, call())
"""A call whose answer the server cannot end."""

RESET = (opened(), reset(1))

CASES: dict[str, dict[str, tuple[Step, ...]]] = {
    "generic 1": {
        "the first frame is SETTINGS": (PREFACE + settings(), first_frame_is_settings),
    },
    "generic 2": {
        "PRIORITY on an idle stream": (handshake, priority(1), ping(), pong()),
        "WINDOW_UPDATE on a half-closed stream": (
            handshake,
            *HALF_CLOSED,
            window_update(1, 1),
            data_of(1),
        ),
        "PRIORITY on a half-closed stream": (
            handshake,
            *HALF_CLOSED,
            priority(1),
            window_update(1, 1),
            data_of(1),
        ),
        "RST_STREAM on a half-closed stream": (handshake, *HALF_CLOSED, reset(1), ping(), pong()),
        "PRIORITY on a closed stream": (handshake, call(), served, priority(1), ping(), pong()),
    },
    "generic 3.1": {
        "DATA": (handshake, call(), served),
        "DATA in two frames": (
            handshake,
            opened() + data(1, message()[:2]) + data(1, message()[2:], END_STREAM),
            served,
        ),
        "DATA with padding": (
            handshake,
            opened() + data(1, b"\6" + message() + bytes(6), PADDED | END_STREAM),
            served,
        ),
    },
    "generic 3.2": {
        "HEADERS": (handshake, call(), served),
        "HEADERS with padding": (
            handshake,
            headers(1, b"\x08" + REQUEST + bytes(8), END_HEADERS | PADDED) + ended(),
            served,
        ),
        "HEADERS with priority": (
            handshake,
            headers(1, dependency() + REQUEST, END_HEADERS | WITH_PRIORITY) + ended(),
            served,
        ),
    },
    "generic 3.3": {
        "PRIORITY with weight 1": (handshake, priority(1, dependency(weight=0)) + call(), served),
        "PRIORITY with weight 256": (handshake, priority(1, dependency(weight=255)) + call(), served),
        "PRIORITY with a dependency": (handshake, priority(3, dependency(1)) + call(), served),
        "exclusive PRIORITY": (handshake, priority(1, dependency(exclusive=True)) + call(), served),
        "HEADERS of a lower stream than PRIORITY": (handshake, priority(3) + call(), served),
    },
    "generic 3.4": {
        "RST_STREAM": (handshake, *RESET, ping(), pong()),
    },
    "generic 3.5": {
        "SETTINGS": (
            handshake,
            settings(
                (Setting.HEADER_TABLE_SIZE, 4096),
                (Setting.ENABLE_PUSH, 1),
                (Setting.MAX_CONCURRENT_STREAMS, 100),
                (Setting.INITIAL_WINDOW_SIZE, 65535),
                (Setting.MAX_FRAME_SIZE, 16384),
                (Setting.MAX_HEADER_LIST_SIZE, 100),
            ),
            settings_ack,
        ),
    },
    "generic 3.7": {
        "PING": (handshake, ping(b"payload "), pong(b"payload ")),
    },
    "generic 3.8": {
        "GOAWAY": (handshake, goaway(), connection_closed),
    },
    "generic 3.9": {
        "WINDOW_UPDATE of the connection": (handshake, window_update(0, 1), ping(), pong()),
        "WINDOW_UPDATE of a stream": (handshake, opened() + window_update(1, 1) + ended(), served),
    },
    "generic 3.10": {
        "CONTINUATION": (
            handshake,
            headers(1, REQUEST[:5], 0) + continuation(1, REQUEST[5:]) + ended(),
            served,
        ),
        "two CONTINUATION": (
            handshake,
            headers(1, REQUEST[:5], 0)
            + continuation(1, REQUEST[5:10], 0)
            + continuation(1, REQUEST[10:])
            + ended(),
            served,
        ),
    },
    "generic 4": {
        "GET": (handshake, request("GET"), refused),
        "HEAD": (handshake, request("HEAD"), refused),
        "POST": (handshake, call(), served),
        "POST with trailers": (
            handshake,
            with_pairs(("trailer", "x-test"))
            + data(1, message())
            + headers(1, header_block(("x-test", "ok")), WHOLE),
            served,
        ),
    },
    "generic 5": {
        "indexed field": (handshake, with_fields(last=integer(58, 7, 0x80)), served),
        **{
            f"literal {kind}, {'indexed' if name == 'user-agent' else 'new'} name, {coding}": (
                handshake,
                with_fields(last=literal(first, bits, name, coding == "Huffman")),
                served,
            )
            for kind, first, bits in (
                ("with incremental indexing", 0x40, 6),
                ("without indexing", 0, 4),
                ("never indexed", 0x10, 4),
            )
            for name in ("user-agent", "x-test")
            for coding in ("plain", "Huffman")
        },
        "table size update": (handshake, with_fields(first=b"\x20"), served),
        "two table size updates": (handshake, with_fields(first=b"\x20\x3f\xe1\x1f"), served),
    },
    "hpack 2.3.3": {
        "indexed field beyond the tables": (
            handshake,
            with_fields(last=integer(126, 7, 0x80)),
            connection_error(COMPRESSION),
        ),
        "literal field with a name beyond the tables": (
            handshake,
            with_fields(last=integer(126, 6, 0x40) + b"\2ok"),
            connection_error(COMPRESSION),
        ),
    },
    "hpack 4.2": {
        "table size update at the end of a block": (
            handshake,
            with_fields(last=b"\x21"),
            connection_error(COMPRESSION),
        ),
    },
    "hpack 5.2": {
        "Huffman padding of more than 7 bits": (
            handshake,
            with_fields(last=b"\0\6x-test\x84\x49\x50\x9f\xff"),
            connection_error(COMPRESSION),
        ),
        "Huffman padding of zeros": (
            handshake,
            with_fields(last=b"\0\6x-test\x83\x49\x50\x90"),
            connection_error(COMPRESSION),
        ),
        "Huffman code of EOS": (
            handshake,
            with_fields(last=b"\0\6x-test\x87\xff\xff\xff\xfd\x25\x42\x7f"),
            connection_error(COMPRESSION),
        ),
    },
    "hpack 6.1": {
        "index 0": (handshake, with_fields(last=b"\x80"), connection_error(COMPRESSION)),
    },
    "hpack 6.3": {
        "table size update above the setting": (handshake, too_large_table, connection_error(COMPRESSION)),
    },
    "3.4": {
        "the preface is answered": (PREFACE + settings(), first_frame_is_settings, settings_ack),
        "another preface": (b"INVALID CONNECTION PREFACE\r\n\r\n", connection_closed),
    },
    "4.1": {
        "unknown type": (handshake, UNKNOWN, ping(), pong()),
        "undefined flags": (handshake, ping(flags=0x16), pong()),
        "reserved bit": (handshake, frame(FrameType.PING, 0x16, 1 << 31, bytes(8)), pong()),
    },
    "4.2": {
        "DATA of 2^14 bytes": (
            handshake,
            opened() + data(1, message(b"\x7a\xf8\x7f" + bytes(16376)), END_STREAM),
            served,
        ),
        "DATA above SETTINGS_MAX_FRAME_SIZE": (
            handshake,
            opened(),
            too_large(lambda content: data(1, content, END_STREAM)),
            stream_error(SIZE),
        ),
        "HEADERS above SETTINGS_MAX_FRAME_SIZE": (
            handshake,
            too_large(lambda content: headers(1, content, WHOLE)),
            connection_error(SIZE),
        ),
    },
    "4.3": {
        "incomplete block": (handshake, headers(1, b"\x40", WHOLE), connection_error(COMPRESSION)),
        "PRIORITY within a block": (
            handshake,
            opened(flags=0) + priority(1) + continuation(1, MORE),
            connection_error(PROTOCOL),
        ),
        "HEADERS of another stream within a block": (
            handshake,
            opened(flags=0) + opened(3, WHOLE) + continuation(1, MORE),
            connection_error(PROTOCOL),
        ),
    },
    "5.1": {
        "idle, DATA": (handshake, data(1, b"test", END_STREAM), connection_error(PROTOCOL)),
        "idle, RST_STREAM": (handshake, reset(1), connection_error(PROTOCOL)),
        "idle, WINDOW_UPDATE": (handshake, window_update(1, 100), connection_error(PROTOCOL)),
        "idle, CONTINUATION": (handshake, continuation(1, REQUEST), connection_error(PROTOCOL)),
        "half-closed, DATA": (handshake, *HALF_CLOSED, ended(), stream_error(CLOSED)),
        "half-closed, HEADERS": (handshake, *HALF_CLOSED, opened(flags=WHOLE), stream_error(CLOSED)),
        "half-closed, CONTINUATION": (
            handshake,
            *HALF_CLOSED,
            continuation(1, REQUEST),
            stream_error(CLOSED, PROTOCOL),
        ),
        "closed by RST_STREAM, DATA": (handshake, *RESET, ended(), stream_error(CLOSED)),
        "closed by RST_STREAM, HEADERS": (handshake, *RESET, opened(flags=WHOLE), stream_error(CLOSED)),
        "closed by RST_STREAM, CONTINUATION": (
            handshake,
            *RESET,
            continuation(1, MORE),
            stream_error(CLOSED, PROTOCOL),
        ),
        # A connection error in h2spec; RFC 9113 leaves the choice.
        "closed, DATA": (handshake, call(), served, ended(), stream_error(CLOSED)),
        "closed, HEADERS": (handshake, call(), served, opened(flags=WHOLE), connection_error(CLOSED)),
        "closed, CONTINUATION": (
            handshake,
            call(),
            served,
            continuation(1, MORE),
            connection_error(CLOSED, PROTOCOL),
        ),
    },
    "5.1.1": {
        "even stream": (handshake, opened(2, WHOLE), connection_error(PROTOCOL)),
        "stream below the last": (
            handshake,
            call(5) + opened(3, WHOLE),
            connection_error(PROTOCOL),
        ),
    },
    "5.1.2": {
        "more streams than allowed": (
            handshake,
            NO_WINDOW,
            settings_ack,
            too_many_streams,
            one_more_stream,
        ),
    },
    # Priorities are gone in RFC 9113; a stream that depends on itself is an error of RFC 7540, 5.3.1.
    "5.3": {
        "HEADERS depends on its own stream": (
            handshake,
            headers(1, dependency(1) + REQUEST, WHOLE | WITH_PRIORITY),
            stream_error(PROTOCOL),
        ),
        "PRIORITY depends on its own stream": (
            handshake,
            priority(1, dependency(1)),
            stream_error(PROTOCOL),
        ),
    },
    "5.4.1": {
        "the connection ends after an error": (
            handshake,
            frame(FrameType.PING, 0, 3, bytes(8)),
            connection_closed,
        ),
        "GOAWAY before the end": (
            handshake,
            frame(FrameType.PING, 0, 3, bytes(8)),
            connection_error(PROTOCOL),
        ),
    },
    "5.5": {
        "unknown frame": (handshake, UNKNOWN, ping(), pong()),
        "unknown frame within a block": (
            handshake,
            opened(flags=END_STREAM) + UNKNOWN + continuation(1, MORE),
            connection_error(PROTOCOL),
        ),
    },
    "6.1": {
        "DATA of stream 0": (handshake, data(0, b"test", END_STREAM), connection_error(PROTOCOL)),
        "DATA of a stream that is not open": (handshake, *HALF_CLOSED, ended(), stream_error(CLOSED)),
        "padding of DATA longer than its frame": (
            handshake,
            opened() + data(1, b"\6test", PADDED | END_STREAM),
            connection_error(PROTOCOL),
        ),
    },
    "6.2": {
        "PRIORITY after HEADERS without END_HEADERS": (
            handshake,
            opened(flags=0) + priority(1) + continuation(1, MORE),
            connection_error(PROTOCOL),
        ),
        "HEADERS of another stream after HEADERS without END_HEADERS": (
            handshake,
            opened(flags=0) + opened(3, WHOLE) + continuation(1, MORE),
            connection_error(PROTOCOL),
        ),
        "HEADERS of stream 0": (handshake, opened(0, WHOLE), connection_error(PROTOCOL)),
        "padding of HEADERS longer than its frame": (
            handshake,
            headers(1, bytes([len(REQUEST) + 1]) + REQUEST, WHOLE | PADDED),
            connection_error(PROTOCOL),
        ),
    },
    "6.3": {
        "PRIORITY of stream 0": (handshake, priority(0), connection_error(PROTOCOL)),
        "PRIORITY of 4 bytes": (handshake, *HALF_CLOSED, priority(1, bytes(4)), stream_error(SIZE)),
    },
    "6.4": {
        "RST_STREAM of stream 0": (handshake, reset(0), connection_error(PROTOCOL)),
        "RST_STREAM of an idle stream": (handshake, reset(1), connection_error(PROTOCOL)),
        "RST_STREAM of 3 bytes": (
            handshake,
            *HALF_CLOSED,
            frame(FrameType.RST_STREAM, 0, 1, bytes(3)),
            connection_error(SIZE),
        ),
    },
    "6.5": {
        "acknowledged SETTINGS with a payload": (
            handshake,
            frame(FrameType.SETTINGS, ACK, 0, bytes(1)),
            connection_error(SIZE),
        ),
        "SETTINGS of stream 1": (
            handshake,
            frame(FrameType.SETTINGS, 0, 1, b"\0\3\0\0\0\x64"),
            connection_error(PROTOCOL),
        ),
        "SETTINGS of 8 bytes": (
            handshake,
            frame(FrameType.SETTINGS, 0, 0, b"\0\3\0\0\0\x64\0\2"),
            connection_error(SIZE),
        ),
    },
    "6.5.2": {
        "ENABLE_PUSH of 2": (handshake, settings((Setting.ENABLE_PUSH, 2)), connection_error(PROTOCOL)),
        "INITIAL_WINDOW_SIZE of 2^31": (handshake, initial_window(1 << 31), connection_error(FLOW)),
        "MAX_FRAME_SIZE below 2^14": (
            handshake,
            settings((Setting.MAX_FRAME_SIZE, (1 << 14) - 1)),
            connection_error(PROTOCOL),
        ),
        "MAX_FRAME_SIZE of 2^24": (
            handshake,
            settings((Setting.MAX_FRAME_SIZE, 1 << 24)),
            connection_error(PROTOCOL),
        ),
        "unknown setting": (handshake, settings((0xFF, 1)), ping(), pong()),
    },
    "6.5.3": {
        "the last of two values counts": (
            handshake,
            settings((Setting.INITIAL_WINDOW_SIZE, 100), (Setting.INITIAL_WINDOW_SIZE, 1)),
            settings_ack,
            call(),
            data_of(1),
        ),
        "SETTINGS is acknowledged": (handshake, settings((Setting.ENABLE_PUSH, 0)), settings_ack),
    },
    "6.7": {
        "PING": (handshake, ping(b"payload "), pong(b"payload ")),
        "an acknowledged PING has no answer": (
            handshake,
            ping(b"answer  ", ACK) + ping(b"payload "),
            pong(b"payload "),
        ),
        "PING of a stream": (
            handshake,
            frame(FrameType.PING, 0, 1, bytes(8)),
            connection_error(PROTOCOL),
        ),
        "PING of 6 bytes": (handshake, frame(FrameType.PING, 0, 0, bytes(6)), connection_error(SIZE)),
    },
    "6.8": {
        "GOAWAY of a stream": (handshake, goaway(stream=1), connection_error(PROTOCOL)),
    },
    "6.9": {
        "increment of 0": (handshake, window_update(0, 0), connection_error(PROTOCOL)),
        "increment of 0 of a stream": (handshake, opened(), window_update(1, 0), stream_error(PROTOCOL)),
        "WINDOW_UPDATE of 3 bytes": (
            handshake,
            frame(FrameType.WINDOW_UPDATE, 0, 0, bytes(3)),
            connection_error(SIZE),
        ),
    },
    "6.9.1": {
        "an answer in a window of 1": (handshake, initial_window(1), settings_ack, call(), data_of(1)),
        "window of the connection above 2^31-1": (
            handshake,
            window_update(0, MAX_WINDOW) + window_update(0, MAX_WINDOW),
            connection_error(FLOW),
        ),
        "window of a stream above 2^31-1": (
            handshake,
            opened() + window_update(1, MAX_WINDOW) + window_update(1, MAX_WINDOW),
            stream_error(FLOW),
        ),
    },
    "6.9.2": {
        "SETTINGS open the windows of open streams": (
            handshake,
            *HALF_CLOSED,
            initial_window(1),
            settings_ack,
            data_of(1),
        ),
        "a window below zero": (
            handshake,
            initial_window(3),
            settings_ack,
            call(),
            data_of(3),
            initial_window(2),
            settings_ack,
            window_update(1, 2),
            data_of(1),
        ),
        "an initial window above 2^31-1": (handshake, initial_window(1 << 31), connection_error(FLOW)),
    },
    "6.10": {
        "several CONTINUATION": (
            handshake,
            opened(flags=0) + continuation(1, MORE, 0) + continuation(1, MORE) + ended(),
            served,
        ),
        "another frame after CONTINUATION without END_HEADERS": (
            handshake,
            opened(flags=0) + continuation(1, MORE, 0) + ended() + continuation(1, MORE),
            connection_error(PROTOCOL),
        ),
        "CONTINUATION of stream 0": (
            handshake,
            opened(flags=END_STREAM) + continuation(0, MORE),
            connection_error(PROTOCOL),
        ),
        "CONTINUATION after HEADERS with END_HEADERS": (
            handshake,
            opened() + continuation(1, MORE),
            connection_error(PROTOCOL),
        ),
        "CONTINUATION after CONTINUATION with END_HEADERS": (
            handshake,
            opened(flags=0) + continuation(1, MORE) + continuation(1, MORE),
            connection_error(PROTOCOL),
        ),
        "CONTINUATION after DATA": (
            handshake,
            opened() + data(1, message()) + continuation(1, MORE),
            connection_error(PROTOCOL),
        ),
    },
    "7": {
        "unknown code of GOAWAY": (handshake, goaway(0xFF), connection_closed),
        "unknown code of RST_STREAM": (handshake, opened(), reset(1, 0xFF), ping(), pong()),
    },
    "8.1": {
        "a second HEADERS without END_STREAM": (
            handshake,
            opened() + data(1, message()) + headers(1, header_block(("x-test", "ok"))),
            stream_error(PROTOCOL),
        ),
    },
    "8.1.1": {
        "content-length of another size": (
            handshake,
            with_pairs(("content-length", "1")) + ended(),
            stream_error(PROTOCOL),
        ),
        "content-length of another size than two DATA": (
            handshake,
            with_pairs(("content-length", "1")) + data(1, message()[:2]) + data(1, message()[2:], END_STREAM),
            stream_error(PROTOCOL),
        ),
    },
    "8.2.1": {
        "uppercase name": (handshake, with_pairs(("X-TEST", "ok")) + ended(), stream_error(PROTOCOL)),
    },
    "8.2.2": {
        "connection": (handshake, with_pairs(("connection", "keep-alive")) + ended(), stream_error(PROTOCOL)),
        "te other than trailers": (
            handshake,
            changed("te", "trailers, deflate") + ended(),
            stream_error(PROTOCOL),
        ),
    },
    "8.3": {
        "unknown pseudo-header": (handshake, with_pairs((":test", "ok")) + ended(), stream_error(PROTOCOL)),
        "pseudo-header of responses": (
            handshake,
            with_pairs((":status", "200")) + ended(),
            stream_error(PROTOCOL),
        ),
        "pseudo-header as trailer": (
            handshake,
            opened() + data(1, message()) + headers(1, header_block((":method", "POST")), WHOLE),
            stream_error(PROTOCOL),
        ),
        "pseudo-header after a field": (
            handshake,
            headers(1, header_block(("x-test", "ok"), *call_pairs())) + ended(),
            stream_error(PROTOCOL),
        ),
    },
    "8.3.1": {
        "empty :path": (handshake, changed(":path", "") + ended(), stream_error(PROTOCOL)),
        "no :method": (handshake, changed(":method") + ended(), stream_error(PROTOCOL)),
        "no :scheme": (handshake, changed(":scheme") + ended(), stream_error(PROTOCOL)),
        "no :path": (handshake, changed(":path") + ended(), stream_error(PROTOCOL)),
        "two :method": (handshake, changed(":method", "POST", "POST") + ended(), stream_error(PROTOCOL)),
        "two :scheme": (handshake, changed(":scheme", "http", "http") + ended(), stream_error(PROTOCOL)),
        "two :path": (handshake, changed(":path", LIVE, LIVE) + ended(), stream_error(PROTOCOL)),
    },
    "8.4": {
        "PUSH_PROMISE": (
            handshake,
            opened() + frame(FrameType.PUSH_PROMISE, END_HEADERS, 1, b"\0\0\0\3" + REQUEST),
            connection_error(PROTOCOL),
        ),
    },
}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, grpc_is_warm: None) -> Iterator[str]:
    """The gRPC port of a server."""
    with serving(tmp_path_factory.mktemp("models"), flags=["--grpc-transport=own"]) as server:
        yield server.address


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(steps, id=f"{section}: {text}")
        for section, texts in CASES.items()
        for text, steps in texts.items()
    ],
)
def test_h2spec(address: str, steps: tuple[Step, ...]) -> None:
    with closing(Http2Peer(address, WAIT_S)) as peer:
        for step in steps:
            if isinstance(step, bytes):
                peer.send(step)
            else:
                step(peer)
