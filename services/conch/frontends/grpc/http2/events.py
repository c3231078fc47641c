"""Events of a connection, for its owner."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from conch.frontends.grpc.http2.hpack import HeaderList
    from conch.frontends.grpc.http2.limits import Reason


class Event:
    """An event; two of one kind are equal if their fields are."""

    FIELDS: ClassVar[tuple[str, ...]] = ()
    __slots__ = FIELDS

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and all(
            getattr(self, name) == getattr(other, name) for name in self.FIELDS
        )

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.FIELDS)
        return f"{type(self).__name__}({fields})"


class HeadersReceived(Event):
    """A request, or the head of a response; if `headers.too_large`, most fields are missing."""

    FIELDS: ClassVar[tuple[str, ...]] = ("end_stream", "headers", "stream_id")
    __slots__ = FIELDS

    def __init__(self, stream_id: int, headers: HeaderList, end_stream: bool) -> None:
        self.stream_id = stream_id
        self.headers = headers
        self.end_stream = end_stream


class DataReceived(Event):
    """Bytes `start` to `end` of what was received; a frame may come in several pieces."""

    FIELDS: ClassVar[tuple[str, ...]] = ("data", "end", "end_stream", "start", "stream_id")
    __slots__ = FIELDS

    def __init__(self, stream_id: int, data: bytes, start: int, end: int, end_stream: bool) -> None:
        self.stream_id = stream_id
        self.data = data
        self.start = start
        self.end = end
        self.end_stream = end_stream


class TrailersReceived(Event):
    """Trailers, which end the peer's side of the stream."""

    FIELDS: ClassVar[tuple[str, ...]] = ("headers", "stream_id")
    __slots__ = FIELDS

    def __init__(self, stream_id: int, headers: HeaderList) -> None:
        self.stream_id = stream_id
        self.headers = headers


class StreamReset(Event):
    """The peer reset a stream, or an error of the peer's made this side reset it; the stream is closed."""

    FIELDS: ClassVar[tuple[str, ...]] = ("code", "stream_id")
    __slots__ = FIELDS

    def __init__(self, stream_id: int, code: int) -> None:
        self.stream_id = stream_id
        self.code = code


class StreamRefused(Event):
    """A stream was refused, as the peer resets too many."""

    __slots__ = ()


class WindowOpened(Event):
    """Queued data of a stream went to the output: `unsent` fell."""

    FIELDS: ClassVar[tuple[str, ...]] = ("stream_id",)
    __slots__ = FIELDS

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id


class PingReceived(Event):
    """The peer sent a PING, which is acknowledged."""

    __slots__ = ()


class PingAcknowledged(Event):
    """The peer answered a PING."""

    FIELDS: ClassVar[tuple[str, ...]] = ("payload",)
    __slots__ = FIELDS

    def __init__(self, payload: bytes) -> None:
        self.payload = payload


class GoAwayReceived(Event):
    """The peer goes away; it does not process streams above `last_stream_id`."""

    FIELDS: ClassVar[tuple[str, ...]] = ("code", "last_stream_id", "text")
    __slots__ = FIELDS

    def __init__(self, last_stream_id: int, code: int, text: bytes) -> None:
        self.last_stream_id = last_stream_id
        self.code = code
        self.text = text


class ConnectionClosed(Event):
    """A connection error: GOAWAY is in the output, after which the owner closes the connection."""

    FIELDS: ClassVar[tuple[str, ...]] = ("code", "reason", "text")
    __slots__ = FIELDS

    def __init__(self, code: int, reason: Reason, text: str) -> None:
        self.code = code
        self.reason = reason
        self.text = text
