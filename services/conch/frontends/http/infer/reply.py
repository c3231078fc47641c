"""HTTP responses of the infer route."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from conch.core.admission import ExitingError
from conch.core.errors import ConchError, UnsupportedError
from conch.core.tensor import Buffer, copied
from conch.frontends.http.connection import UnreadBodyError
from conch.frontends.http.flow import AT_ONCE_BYTES, Body, body_size
from conch.frontends.http.infer.compression import compressed
from conch.frontends.http.infer.headers import HEAD_LENGTH
from conch.frontends.http.replies import error_body

Headers = list[tuple[bytes, bytes]]

_JSON: Final = (b"content-type", b"application/json")
_OCTETS: Final = (b"content-type", b"application/octet-stream")


class Reply(NamedTuple):
    """A response; its length is among the headers.

    Attributes:
        status: HTTP status.
        headers: Headers in the order in which they are sent.
        body: The body.
        closes: Whether the connection is closed with it.
    """

    status: int
    headers: Headers
    body: Body
    closes: bool = False


Answer = Reply | Callable[[], Reply]
"""A reply, or what makes it if that takes long."""


class UnsupportedEncodingError(UnsupportedError):
    """A request's body is in an encoding that nobody here knows."""


def success(head: list[bytes], tail: list[Buffer], encoding: bytes | None) -> Reply:
    """A response of JSON and the binary tensors behind it, compressed if an encoding says so."""
    parts = [*head, *tail]
    headers = [_OCTETS, (HEAD_LENGTH, b"%d" % body_size(head))] if tail else [_JSON]
    if encoding is not None:
        parts = compressed(parts, encoding)
        headers.append((b"content-encoding", encoding))
    size = body_size(parts)
    headers.append((b"content-length", b"%d" % size))
    # Models may write to what they have sent: it is copied, together if that does not take long.
    body: Body = b"".join(parts) if size <= AT_ONCE_BYTES else [copied(part) for part in parts]
    return Reply(200, headers, body)


def failure(error: ConchError) -> Reply:
    """The response that tells of an error."""
    body = error_body(error.message)
    headers = [_JSON, (b"content-length", b"%d" % len(body))]
    if error.retry_after_ms is not None:
        headers.append((b"retry-after", b"%d" % -(-error.retry_after_ms // 1000)))
    if isinstance(error, UnsupportedEncodingError):
        headers.append((b"accept-encoding", b"gzip, deflate"))
    return Reply(error.http_status, headers, body, isinstance(error, UnreadBodyError | ExitingError))
