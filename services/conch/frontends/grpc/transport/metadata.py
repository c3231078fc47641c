"""Headers and trailers of gRPC calls: what a request's headers say, and the fields of answers.

Source: PROTOCOL-HTTP2 of the gRPC project ("Request-Headers", "Response").
Threads and locks: no state.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterable
from urllib.parse import quote_from_bytes

from conch.core.errors import status_details
from conch.frontends.grpc.rpc_calls import Metadata

Pairs = tuple[tuple[bytes, bytes], ...]

_UNITS_NS = {
    "H": 3_600_000_000_000,
    "M": 60_000_000_000,
    "S": 1_000_000_000,
    "m": 1_000_000,
    "u": 1000,
    "n": 1,
}
_MOST_DIGITS = 8
# Headers of the transport itself; handlers and models do not see them.
_OWN_NAMES = frozenset(
    (
        b"te",
        b"content-type",
        b"grpc-timeout",
        b"grpc-encoding",
        b"grpc-accept-encoding",
        b"accept-encoding",
        b"content-length",
        b"host",
    )
)
# Printable ASCII without the percent sign, which `grpc-message` carries as it is.
_PLAIN_TEXT = bytes(each for each in range(0x20, 0x7F) if each != ord("%"))

ENCODINGS = ("identity", "deflate", "gzip")
"""The compressions of messages."""

# A line break would be a malformed field, for which clients drop the whole call.
_NO_LINES = str.maketrans("\r\n\0", "   ")

_CONTENT_TYPE = (b"content-type", b"application/grpc")
_STATUS_200 = (b":status", b"200")
_ACCEPTS = (b"grpc-accept-encoding", ", ".join(ENCODINGS).encode())
HEAD: Pairs = (_STATUS_200, _CONTENT_TYPE)
"""The headers of an answer whose messages are not compressed."""

OK_TRAILERS: Pairs = ((b"grpc-status", b"0"),)


class RefusedRequestError(Exception):
    """A request that is no gRPC call; it gets an HTTP status, or a gRPC status in trailers.

    Attributes:
        answer: The headers that end the stream.
    """

    def __init__(self, answer: Pairs) -> None:
        super().__init__(answer)
        self.answer = answer


class RequestHead:
    """Request headers of a call, parsed; shared by all calls with the same header block.

    Attributes:
        path: Such as ``/package.Service/Method``.
        metadata: The client's metadata; values of keys that end in ``-bin`` are bytes.
        timeout_ns: The client's time limit; None without one.
        encoding: Compression of the client's messages, such as ``gzip``; ``identity`` for none.
        accepts: The compressions that the client takes.
    """

    __slots__ = ("accepts", "encoding", "metadata", "path", "timeout_ns")

    def __init__(self, pairs: Pairs) -> None:
        self.path = ""
        self.timeout_ns: int | None = None
        self.encoding = "identity"
        self.accepts: frozenset[str] = frozenset()
        metadata: list[tuple[str, str | bytes]] = []
        method = content_type = b""
        for name, padded in pairs:
            value = padded.strip(b" \t")
            if name == b":path":
                self.path = _text(value)
            elif name == b":method":
                method = value
            elif name == b"content-type":
                content_type = value
            elif name == b"grpc-timeout":
                self.timeout_ns = _timeout_ns(value)
            elif name == b"grpc-encoding":
                self.encoding = _text(value)
            elif name == b"grpc-accept-encoding":
                self.accepts = frozenset(each.strip() for each in _text(value).split(","))
            elif name[:1] != b":" and name not in _OWN_NAMES:
                _add_metadata(metadata, name, value)
        self.metadata: Metadata = tuple(metadata)
        if method != b"POST":
            raise RefusedRequestError(((b":status", b"405"), (b"allow", b"POST")))
        if not _is_grpc(content_type):
            raise RefusedRequestError(((b":status", b"415"),))
        if self.encoding not in ENCODINGS:
            raise RefusedRequestError(unsupported_encoding(self.encoding))


def _is_grpc(content_type: bytes) -> bool:
    """True for ``application/grpc``, with or without a message format or parameters."""
    lowered = content_type.lower()
    return lowered.startswith(b"application/grpc") and lowered[16:17] in (b"", b"+", b";")


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _timeout_ns(value: bytes) -> int:
    text = _text(value)
    unit = _UNITS_NS.get(text[-1:])
    digits = text[:-1]
    if unit is None or not digits.isdecimal() or not digits.isascii() or len(digits) > _MOST_DIGITS:
        raise RefusedRequestError(error_head(13, f"grpc-timeout is malformed: '{text[:32]}'", None))
    return int(digits) * unit


def _add_metadata(metadata: list[tuple[str, str | bytes]], name: bytes, value: bytes) -> None:
    key = _text(name)
    if not key.endswith("-bin"):
        metadata.append((key, _text(value)))
        return
    for part in value.split(b","):  # values of equal keys may come joined
        try:
            decoded = binascii.a2b_base64(part + b"=" * (-len(part) % 4), strict_mode=True)
        except binascii.Error:
            raise RefusedRequestError(
                error_head(13, f"the metadata '{key[:64]}' is not valid base64", None)
            ) from None
        metadata.append((key, decoded))


def head_with(compression: str | None) -> Pairs:
    """The headers of an answer whose messages may be compressed."""
    if compression is None:
        return HEAD
    return (*HEAD, (b"grpc-encoding", compression.encode()), _ACCEPTS)


def trailers(status: int, details: str, metadata: Metadata | None) -> Pairs:
    """The trailers that end a call."""
    if not status and not details and not metadata:
        return OK_TRAILERS
    pairs = [(b"grpc-status", b"%d" % status)]
    if details:
        pairs.append((b"grpc-message", quote_from_bytes(status_details(details), _PLAIN_TEXT).encode()))
    return (*pairs, *_encoded(metadata or ()))


def error_head(status: int, details: str, metadata: Metadata | None) -> Pairs:
    """The headers of an answer that consists of an error only ("Trailers-Only")."""
    return (*HEAD, *trailers(status, details, metadata))


def unsupported_encoding(encoding: str) -> Pairs:
    """The answer to a message that is compressed in a way that is not known here."""
    details = f"grpc-encoding '{encoding[:64]}' is not supported: use identity, deflate or gzip"
    return (*error_head(12, details, None), _ACCEPTS)


def _encoded(metadata: Metadata) -> Iterable[tuple[bytes, bytes]]:
    for key, value in metadata:
        if isinstance(value, bytes):
            yield key.encode(), binascii.b2a_base64(value, newline=False).rstrip(b"=")
        else:
            yield key.encode(), value.translate(_NO_LINES).encode()
