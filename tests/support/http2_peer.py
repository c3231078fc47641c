"""A raw HTTP/2 client: sends any frame, also malformed ones, and waits for what the server does."""

from __future__ import annotations

import socket
import struct
import sys
import termios
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from fcntl import ioctl
from select import select

from hpack import Decoder, Encoder
from tests.support.servers import WAIT_S, eventually

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
MAX_WINDOW = 2**31 - 1
LIVE = "/inference.GRPCInferenceService/ServerLive"

_READ_BYTES = 1 << 16
_LAST_FRAMES = 5


class FrameType(IntEnum):
    """RFC 9113, section 6."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


_NAMES = {each.value: each.name for each in FrameType}


class ErrorCode(IntEnum):
    """RFC 9113, section 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11


class Setting(IntEnum):
    """RFC 9113, section 6.5.2."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def data(stream: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """A DATA frame."""
    return frame(FrameType.DATA, flags, stream, payload)


def headers(stream: int, block: bytes, flags: int = END_HEADERS) -> bytes:
    """A HEADERS frame."""
    return frame(FrameType.HEADERS, flags, stream, block)


def continuation(stream: int, block: bytes, flags: int = END_HEADERS) -> bytes:
    """A CONTINUATION frame."""
    return frame(FrameType.CONTINUATION, flags, stream, block)


def dependency(on: int = 0, weight: int = 255, exclusive: bool = False) -> bytes:
    """The five bytes of a stream's priority."""
    return struct.pack(">IB", on | exclusive << 31, weight)


def priority(stream: int, fields: bytes = dependency()) -> bytes:
    """A PRIORITY frame."""
    return frame(FrameType.PRIORITY, 0, stream, fields)


def reset(stream: int, code: int = ErrorCode.CANCEL) -> bytes:
    """A RST_STREAM frame."""
    return frame(FrameType.RST_STREAM, 0, stream, struct.pack(">I", code))


def settings(*values: tuple[int, int], flags: int = 0) -> bytes:
    """A SETTINGS frame."""
    return frame(FrameType.SETTINGS, flags, 0, b"".join(struct.pack(">HI", *value) for value in values))


def initial_window(size: int) -> bytes:
    """A SETTINGS frame with the initial window of streams."""
    return settings((Setting.INITIAL_WINDOW_SIZE, size))


def ping(payload: bytes = bytes(8), flags: int = 0) -> bytes:
    """A PING frame."""
    return frame(FrameType.PING, flags, 0, payload)


def goaway(code: int = ErrorCode.NO_ERROR, stream: int = 0) -> bytes:
    """A GOAWAY frame."""
    return frame(FrameType.GOAWAY, 0, stream, struct.pack(">II", 0, code))


def window_update(stream: int, increment: int) -> bytes:
    """A WINDOW_UPDATE frame."""
    return frame(FrameType.WINDOW_UPDATE, 0, stream, struct.pack(">I", increment))


def header_block(*pairs: tuple[str, str]) -> bytes:
    """A header block that may be sent at any time: it neither uses nor changes the dynamic table."""
    return Encoder().encode([(name, value, True) for name, value in pairs])


def integer(value: int, bits: int, first: int = 0) -> bytes:
    """An HPACK integer with a prefix of so many bits, in a byte that begins with `first`."""
    most = (1 << bits) - 1
    if value < most:
        return bytes([first | value])
    value -= most
    parts = bytearray([first | most])
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def call_pairs(path: str = LIVE) -> tuple[tuple[str, str], ...]:
    """The request headers of a gRPC call."""
    return (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "conch"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    )


def message(content: bytes = b"") -> bytes:
    """A gRPC message with its prefix."""
    return struct.pack(">BI", 0, len(content)) + content


def call(stream: int = 1, content: bytes = b"", path: str = LIVE) -> bytes:
    """The frames of a whole unary call; the message has to fit into a frame."""
    return headers(stream, header_block(*call_pairs(path))) + data(stream, message(content), END_STREAM)


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame that was received."""

    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def ends(self) -> bool:
        """True if it is the stream's last."""
        return self.kind in (FrameType.DATA, FrameType.HEADERS) and bool(self.flags & END_STREAM)

    @property
    def code(self) -> int:
        """The error code of a RST_STREAM or GOAWAY frame."""
        start = 4 if self.kind == FrameType.GOAWAY else 0
        return int.from_bytes(self.payload[start : start + 4], "big")

    def __str__(self) -> str:
        kind = _NAMES.get(self.kind, f"type {self.kind}")
        code = f", code {self.code}" if self.kind in (FrameType.RST_STREAM, FrameType.GOAWAY) else ""
        return f"{kind}(stream {self.stream}, flags {self.flags:#x}, {len(self.payload)} bytes{code})"


class Http2Peer:
    """A connection to a gRPC port.

    Each `wait_` method returns when the state that it names is reached, and fails if the server ends or
    resets instead, or does nothing for `timeout_s`.

    Args:
        address: Host and port.
        timeout_s: Time to wait for one state.
        acknowledges: True to acknowledge the server's SETTINGS and PING frames.

    Attributes:
        settings: The server's settings, by their numbers, as received so far.
        goaway: The server's last GOAWAY frame; None if there was none.
        closed: True if the server has closed the connection.
    """

    def __init__(self, address: str, timeout_s: float = WAIT_S, acknowledges: bool = True) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=WAIT_S)
        self.settings: dict[int, int] = {}
        self.goaway: Frame | None = None
        self.closed = False
        self._timeout_s = timeout_s
        self._acknowledges = acknowledges
        self._buffer = bytearray()
        self._decoder = Decoder()
        self._last: deque[Frame] = deque(maxlen=_LAST_FRAMES)

    def close(self) -> None:
        """Closes the connection."""
        self.socket.close()

    def send(self, *frames: bytes) -> bool:
        """Sends frames; False if the server has closed the connection."""
        with suppress(ConnectionError):
            self.socket.settimeout(self._timeout_s)
            self.socket.sendall(b"".join(frames))
            return True
        return False

    def wait_sent(self) -> None:
        """Waits until the server's socket has all that was sent, which the server may not have read."""

        def unacknowledged() -> int:
            return int.from_bytes(ioctl(self.socket, termios.TIOCOUTQ, bytes(4)), sys.byteorder)

        eventually(lambda: not unacknowledged(), "all is sent", self._timeout_s)

    def start(self, *values: tuple[int, int]) -> None:
        """Sends the preface and settings."""
        self.send(PREFACE, settings(*values))

    def handshake(self, *values: tuple[int, int]) -> None:
        """Sends the preface and settings; waits for the server's settings and its acknowledgement."""
        self.start(*values)
        acknowledged = False

        def done(received: Frame) -> bool:
            nonlocal acknowledged
            acknowledged |= received.kind == FrameType.SETTINGS and bool(received.flags & ACK)
            return acknowledged and bool(self.settings)

        self._wait(done, "the handshake")

    def drain(self) -> list[Frame]:
        """Frames that have come in, without waiting."""
        frames = []
        while not self.closed and (self._complete() or select([self.socket], [], [], 0)[0]):
            if (
                received := self._next_frame(time.monotonic() + self._timeout_s, "a whole frame")
            ) is not None:
                frames.append(received)
        return frames

    def wait_any(self) -> Frame:
        """The next frame, whatever it is."""
        return self._wait(lambda each: True, "a frame")

    def wait_frame(self, kind: int, stream: int = 0, flags: int = 0) -> Frame:
        """The next frame of a kind and a stream that has these flags."""
        what = str(Frame(kind, flags, stream, b""))
        return self._wait(
            lambda each: each.kind == kind and each.stream == stream and each.flags & flags == flags, what
        )

    def wait_pong(self, payload: bytes = bytes(8)) -> None:
        """Waits for the next acknowledged PING, which has to have this payload."""
        assert self.wait_frame(FrameType.PING, flags=ACK).payload == payload

    def wait_data(self, length: int, stream: int = 1) -> None:
        """Waits for the stream's next DATA frame, which has to have this length."""
        assert len(self.wait_frame(FrameType.DATA, stream).payload) == length

    def wait_end(self, stream: int = 1) -> dict[str, str]:
        """Waits for the end of a response; returns its headers and trailers."""
        fields: dict[str, str] = {}

        def ended(received: Frame) -> bool:
            if received.kind == FrameType.HEADERS:
                # The decoder has to see every block: all of them change its table.
                pairs = self._decoder.decode(received.payload)
                if received.stream == stream:
                    fields.update((_text(name), _text(value)) for name, value in pairs)
            assert received.stream != stream or received.kind != FrameType.RST_STREAM, str(received)
            return received.stream == stream and received.ends

        self._wait(ended, f"the response of stream {stream}")
        return fields

    def wait_stream_error(self, *codes: int, stream: int = 1) -> None:
        """Waits for RST_STREAM or GOAWAY with one of these codes."""

        def found(received: Frame) -> bool:
            if received.kind == FrameType.GOAWAY or (
                received.kind == FrameType.RST_STREAM and received.stream == stream
            ):
                assert received.code in codes, f"{received} instead of a code of {codes}"
                return True
            return False

        self._wait(found, f"a stream error with a code of {codes}")

    def wait_connection_error(self, *codes: int) -> None:
        """Waits for GOAWAY with one of these codes and for the end of the connection."""

        def found(received: Frame) -> bool:
            assert received.kind != FrameType.GOAWAY or received.code in codes, str(received)
            return received.kind == FrameType.GOAWAY

        self._wait(found, f"GOAWAY with a code of {codes}")
        self.wait_closed()

    def wait_closed(self) -> None:
        """Waits until the server has closed the connection."""
        deadline = time.monotonic() + self._timeout_s
        while not self.closed:
            self._next_frame(deadline, "the end of the connection")

    def _wait(self, found: Callable[[Frame], bool], what: str) -> Frame:
        deadline = time.monotonic() + self._timeout_s
        while True:
            received = self._next_frame(deadline, what)
            if received is None:
                raise AssertionError(f"{what}: the connection is closed{self._after()}")
            if found(received):
                return received

    def _next_frame(self, deadline: float, what: str) -> Frame | None:
        """The next frame; None if the connection is closed. Fails at the deadline."""
        while not self._complete():
            try:
                self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
                part = self.socket.recv(_READ_BYTES)
            except TimeoutError:
                raise AssertionError(f"{what}: nothing comes any more{self._after()}") from None
            except ConnectionError:
                part = b""
            if not part:
                self.closed = True
                return None
            self._buffer += part
        size = int.from_bytes(self._buffer[:3], "big")
        kind, flags, stream = struct.unpack_from(">BBI", self._buffer, 3)
        received = Frame(kind, flags, stream & MAX_WINDOW, bytes(self._buffer[9 : 9 + size]))
        del self._buffer[: 9 + size]
        self._last.append(received)
        self._note(received)
        return received

    def _after(self) -> str:
        return "".join(f", after {each}" for each in self._last)

    def _complete(self) -> bool:
        return len(self._buffer) >= 9 and len(self._buffer) >= 9 + int.from_bytes(self._buffer[:3], "big")

    def _note(self, received: Frame) -> None:
        if received.kind == FrameType.GOAWAY:
            self.goaway = received
        elif received.flags & ACK:
            return
        elif received.kind == FrameType.SETTINGS:
            self.settings.update(struct.iter_unpack(">HI", received.payload))
            if self._acknowledges:
                self.send(settings(flags=ACK))
        elif received.kind == FrameType.PING and self._acknowledges:
            self.send(ping(received.payload, ACK))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
