"""Checks for malformed header lists (RFC 9113, sections 8.1 to 8.3)."""

from __future__ import annotations

import re
from collections.abc import Iterable

Pairs = tuple[tuple[bytes, bytes], ...]

# Section 8.2.1.
_is_name = re.compile(rb"[^\x00-\x20A-Z:\x7f-\xff]+").fullmatch
# Connection-specific fields (section 8.2.2).
_REFUSED = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"))
# Names that need no look at their letters.
_USUAL = frozenset(
    (
        b"content-type",
        b"user-agent",
        b"accept-encoding",
        b"grpc-accept-encoding",
        b"grpc-encoding",
        b"grpc-timeout",
        b"grpc-status",
        b"grpc-message",
    )
)
_REQUEST_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_RESPONSE_PSEUDO = frozenset((b":status",))


class MalformedError(Exception):
    """A malformed message: a stream error of type PROTOCOL_ERROR."""


def _check_fields(pairs: Pairs, known: frozenset[bytes]) -> tuple[dict[bytes, bytes], int]:
    """Pseudo-header fields, and content-length or -1, of fields that are valid each for itself."""
    pseudo: dict[bytes, bytes] = {}
    length = -1
    for name, value in pairs:
        if name in _USUAL:
            continue
        if name in known:
            if name in pseudo:
                raise MalformedError("a pseudo-header field twice")
            pseudo[name] = value
        elif name == b"te":
            if value != b"trailers":
                raise MalformedError("te other than trailers")
        elif name == b"content-length":
            if not value.isdigit() or len(value) > 19 or length not in (-1, int(value)):
                raise MalformedError("an invalid content-length")
            length = int(value)
        elif not _is_name(name) or name in _REFUSED:
            raise MalformedError("an invalid or connection-specific name, or an unknown pseudo-header field")
    for name, _ in pairs[: len(pseudo)]:
        if name not in pseudo:
            raise MalformedError("a pseudo-header field after a regular one")
    text = b"".join([value for _, value in pairs])
    if len(text.translate(None, b"\0\r\n")) != len(text):
        raise MalformedError("NUL, CR or LF in a field value")
    return pseudo, length


def _check_ends(values: Iterable[bytes]) -> None:
    """Raises where a value has a blank at an end (section 8.2.1)."""
    for value in values:
        if value.strip(b" \t") != value:
            raise MalformedError("a field value with a blank at an end")


def check_request(pairs: Pairs) -> int:
    """Content-length of a request or -1; raises where it is malformed.

    Values of regular fields may have blanks at their ends, as gRPC's clients send them: gRPC strips them.
    """
    pseudo, length = _check_fields(pairs, _REQUEST_PSEUDO)
    _check_ends(pseudo.values())
    if pseudo.get(b":method") == b"CONNECT":
        if b":authority" not in pseudo or len(pseudo) != 2:
            raise MalformedError("CONNECT has :method and :authority only")
    elif not (pseudo.get(b":method") and pseudo.get(b":scheme") and pseudo.get(b":path")):
        raise MalformedError(":method, :scheme or :path is missing")
    return length


def check_response(pairs: Pairs) -> tuple[int, int]:
    """Status of a response, and content-length or -1; raises where it is malformed."""
    pseudo, length = _check_fields(pairs, _RESPONSE_PSEUDO)
    _check_ends(value for _, value in pairs)
    status = pseudo.get(b":status", b"")
    if len(status) != 3 or not status.isdigit() or status == b"101":
        raise MalformedError("invalid :status")
    return int(status), length


def check_trailers(pairs: Pairs) -> None:
    """Raises where trailers are malformed."""
    _check_fields(pairs, frozenset())
    _check_ends(value for _, value in pairs)
