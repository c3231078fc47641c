"""Reads requests from the bytes of a connection: framing, and the limits on heads and chunks.

Owns: the parser of httptools, which calls the methods whose names begin with ``on_``. A request becomes an
`HttpExchange` once its headers are complete; the pieces of its body go to the exchange.

Threads and locks: event loop only.
"""

from __future__ import annotations

from typing import Any, Protocol

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, parse_url

from conch.core.clock import monotonic_ns
from conch.frontends.http.http_exchange import ExchangeConnection, Headers, HttpExchange

_MOST_HEADER_BYTES = 32 << 10  # parsing a header costs far more than its bytes
_MOST_HEADERS = 200
_LARGE_HEADERS = f"The headers are too large: at most {_MOST_HEADERS}, of 32 KiB together, are taken."


class ReaderConnection(ExchangeConnection, Protocol):
    """The connection, as its reader uses it."""

    def begin(self, exchange: HttpExchange) -> None:
        """Starts a request, or queues it behind earlier ones."""

    def refuse(self, status: int, text: str) -> None:
        """Refuses the request that is read, as the last one; earlier ones are still answered."""


class RequestReader:
    """The reader of one connection.

    Args:
        connection: Takes the requests.

    Attributes:
        exchange: The request whose body is read; None between bodies.
        in_head: True while the head of a request is read.
        requests: Number of requests begun.
        closed: True once no further request is taken; input is ignored.
    """

    def __init__(self, connection: ReaderConnection) -> None:
        self._connection = connection
        self._parser: Any = HttpRequestParser(self)
        self._parser.set_dangerous_leniencies(lenient_chunked_length=True)  # see `on_headers_complete`
        self.exchange: HttpExchange | None = None
        self.in_head = False
        self.requests = 0
        self.closed = False
        self._url = b""
        self._headers: Headers = []
        self._fields: dict[bytes, bytes] = {}
        self._hosts = 0
        self._head_bytes = 0  # parsed since the last head or piece of a body

    def close(self) -> None:
        """Ends a lost connection's reader, which refers to itself through its parser."""
        self.closed = True
        self.exchange = self._parser = None

    def body_left(self) -> int:
        """Returns how much of the body is still to come; 0 if that is not known."""
        exchange = self.exchange
        return 0 if exchange is None or exchange.length is None else exchange.length - exchange.size

    def feed(self, data: bytes | memoryview) -> None:
        """Parses bytes; each request that they complete begins meanwhile."""
        if self.closed:
            return
        self._head_bytes += len(data)
        try:
            while data:
                try:
                    self._parser.feed_data(data)
                    break
                except HttpParserUpgrade as upgrade:
                    # No other protocol is supported, so the upgrade is ignored. The parser would not read a
                    # body after an upgrade: it gets the head again without that header.
                    data = memoryview(data)[upgrade.args[0] :]
                    self._parser.feed_data(self._head_without_upgrade())
        except HttpParserError:
            if not self.closed:
                self._connection.refuse(400, "Invalid HTTP request received.")
        if self._head_bytes > _MOST_HEADER_BYTES and not self.closed:
            self._connection.refuse(431, _LARGE_HEADERS)

    def _head_without_upgrade(self) -> bytes:
        method = self._parser.get_method()
        if method == b"CONNECT":
            raise HttpParserError("a tunnel is asked for")
        lines = [method, b" ", self._url, b" HTTP/", self._parser.get_http_version().encode(), b"\r\n"]
        for name, value in self._headers:
            if name.lower() != b"upgrade":
                lines += (name, b": ", value, b"\r\n")
        return b"".join([*lines, b"\r\n"])

    def on_url(self, url: bytes) -> None:
        """Adds a piece of the target; the first one begins a request."""
        if self.in_head:
            self._url += url
        else:
            self.in_head = True
            self.requests += 1
            self._url = url
            self._headers = []
            self._fields = {}
            self._hosts = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Adds a header; trailers are dropped, as the checks of the headers are over when they come."""
        if self.in_head:
            lowered = name.lower()
            self._headers.append((name, value))
            self._fields[lowered] = value
            if lowered == b"host":
                self._hosts += 1

    def on_headers_complete(self) -> None:
        """Begins the request.

        A request with both a length and chunks is read by its chunks (RFC 9112, 6.3). A proxy that uses the
        length may take part of the body for another request, so the connection closes with the response.
        """
        self._head_bytes = 0
        if self.closed:
            return
        parser, fields = self._parser, self._fields
        if len(self._headers) > _MOST_HEADERS:
            self._connection.refuse(431, _LARGE_HEADERS)
            return
        if self._hosts != 1 and (self._hosts or parser.get_http_version() != "1.0"):
            self._connection.refuse(400, "The request needs one Host header.")  # RFC 9112, 3.2
            return
        length = fields.get(b"content-length")
        chunked = b"transfer-encoding" in fields
        if chunked and self._codings() != [b"chunked"]:
            self._connection.refuse(501, "Of transfer encodings only 'chunked' is supported.")
            return
        if parser.should_upgrade():
            return  # see `feed`
        target, version = self._url.decode("ascii"), parser.get_http_version()
        if target[0] != "/" or "#" in target:
            target = self._plain_target()
        self.in_head = False
        self.exchange = exchange = HttpExchange(
            self._connection,
            parser.get_method().decode(),
            target,
            version,
            self._headers,
            fields,
            None if chunked or length is None else int(length),
            version != "1.0" and not (chunked and length is not None) and parser.should_keep_alive(),
        )
        self._connection.begin(exchange)

    def _codings(self) -> list[bytes]:
        headers = self._headers
        return [value.strip().lower() for name, value in headers if name.lower() == b"transfer-encoding"]

    def _plain_target(self) -> str:
        """Returns path and query of a target that has more. Raises an error: it is malformed."""
        parsed = parse_url(self._url)
        return (parsed.path + (b"?" + parsed.query if parsed.query else b"")).decode("ascii")

    def on_chunk_header(self) -> None:
        """Counts a chunk."""
        if self.exchange is not None:
            self.exchange.chunks += 1

    def on_body(self, piece: bytes) -> None:
        """Adds a piece of the body."""
        self._head_bytes = 0
        exchange = self.exchange
        if exchange is None:
            return  # the request was refused
        size = len(piece)
        if size == exchange.length and size <= exchange.most:
            exchange.whole = piece
            exchange.size = size
        else:
            exchange.collect(piece)

    def on_message_complete(self) -> None:
        """Ends the body."""
        exchange, self.exchange = self.exchange, None
        if exchange is None:
            self.in_head = False  # it was refused, or see `feed`
            return
        if not exchange.keep_alive:
            self.closed = True  # later input is ignored
        exchange.complete = True
        exchange.read_ns = monotonic_ns()
        then, exchange.then = exchange.then, None
        if then is not None:
            then()
