"""One HTTP request and its response, as handlers see them.

A handler gets the exchange once the headers are complete. It may read the body, and responds once: as a whole
(`respond`) or in pieces (`begin_response`, `send`, `end`). A response to a client that has disconnected goes
nowhere.

Threads and locks: event loop only; other threads go through a mailbox.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

from conch.access.principals import Grant
from conch.core.admission import COUNTED_BYTES, HeldBytes, Hold
from conch.core.compiled import mypyc_attr
from conch.core.errors import ResourceExhaustedError
from conch.core.request import InferenceRequest, InferenceResponse, Responder
from conch.core.tensor import Buffer
from conch.frontends.connections.byte_stream import ByteStream
from conch.frontends.http.flow_control import (
    AT_ONCE_BYTES,
    MOST_CHUNKS,
    Body,
    HeldBodyError,
    RequestBody,
    body_pieces,
    body_size,
)

Headers = list[tuple[bytes, bytes]]

STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus
}
EVENT_STREAM: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_JOINED_BYTES = 64 * 1024
UNASKED_BYTES = 64 * 1024
"""Bytes that are read of a body that the handler has not asked for."""


class Reply(NamedTuple):
    """A whole response; Content-Length is added to its headers.

    Attributes:
        status: HTTP status.
        headers: Headers in order, names in lower case.
        body: The body.
        closes: True to close the connection.
    """

    status: int
    headers: Headers
    body: Body = b""
    closes: bool = False


class ClientDisconnectError(Exception):
    """The client disconnected; its handler ends without a response."""


@mypyc_attr(allow_interpreted_subclasses=True)
class ExchangeHooks:
    """Changes of a request and its response by a provider of routes; none by default."""

    __slots__ = ()

    def prepare(self, request: InferenceRequest, exchange: HttpExchange) -> None:
        """Completes a decoded request before it is admitted; any thread. Raises ConchError to refuse it."""

    def translate(
        self, exchange: HttpExchange, status: int, headers: Headers, body: Body
    ) -> tuple[int, Headers]:
        """Returns status and headers of a whole response."""
        return status, headers


class DecodedBody(Protocol):
    """An infer request that a front has decoded, in place of its body.

    Attributes:
        binary: True if all outputs are to be sent as binary; else all as JSON.
    """

    @property
    def binary(self) -> bool:
        """See above."""

    def request(self, responder: Responder) -> InferenceRequest:
        """Makes the request. Raises ConchError: its tensors can't be mapped."""


class FrontReply(Protocol):
    """A response that a front is to encode."""

    def send(self) -> None:
        """Sends it to the front, or drops it if the exchange has its response or no client; event loop."""


class ExchangeConnection(Protocol):
    """The connection, as its exchanges use it.

    Attributes:
        stream: Its bytes.
        peer: The client's address, such as ``127.0.0.1:50000``.
        lost: True once it is closed.
    """

    stream: ByteStream
    peer: str
    lost: bool

    @property
    def writable(self) -> bool:
        """True if the client has read enough for more to be written."""

    def hold_body(self, paused: bool) -> None:
        """Pauses reading while a body is not asked for, or resumes it."""

    async def drain(self) -> None:
        """Waits until the client has read enough for more to be written."""

    def run(self, exchange: HttpExchange, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine of an exchange as a task."""

    def finished(self, exchange: HttpExchange) -> None:
        """Ends a request: closes the connection, or goes on with the next one."""


@mypyc_attr(allow_interpreted_subclasses=True)
class HttpExchange:
    """One request and its response.

    Attributes:
        method: HTTP method.
        path: Path as received, neither decoded nor normalised.
        query: Part of the target behind ``?``, as received.
        version: HTTP version, such as ``1.1``.
        client: The client's address, such as ``127.0.0.1:50000``.
        headers: Headers with names as received, in order.
        fields: Values of headers by names in lower case; the last of repeated ones.
        length: Announced length of the body; None without one, or with chunks.
        keep_alive: True if the connection stays open after the response.
        extra_headers: Added to the headers of the response.
        late_headers: Gives more of them when the response begins, or None.
        on_disconnect: Called once if the client disconnects before the response is complete, or None.
        size: Bytes of the body received so far.
        chunks: Chunks of the body received so far.
        most: Limit of the body in bytes.
        read_ns: Monotonic time at which the body was complete; 0 before.
        collected: The body, if it comes in several pieces.
        complete: True once the body is complete.
        then: Called once the body is complete or unread, or None.
        body_paused: True while the body is not read on, as the handler has not asked for it.
        unread: True if the body exceeds `most` or the limit of chunks; its rest is dropped.
        whole: The body, if it came in one piece.
        began: True once the response has begun.
        done: True once the response is complete.
        filler: Bytes that clients ignore within the response, sent as a probe.
        unsent: Bytes of the response not yet passed to the stream.
        hooks: A provider's changes of the request and its response; None for none.
        sink: Takes the pieces of the body in place of `collected`; None for none.
        body_hold: Counts the body while it comes; None if it does not count.
        refusal: Error of a body that is `unread` for what the server holds, or None.
        decoded: True if a front has decoded the body, and may encode the response.
    """

    __slots__ = (
        "_access",
        "_chunked",
        "_connection",
        "began",
        "body_hold",
        "body_paused",
        "chunks",
        "client",
        "collected",
        "complete",
        "decoded",
        "done",
        "extra_headers",
        "fields",
        "filler",
        "headers",
        "hooks",
        "keep_alive",
        "late_headers",
        "length",
        "method",
        "most",
        "on_disconnect",
        "path",
        "query",
        "read_ns",
        "refusal",
        "sink",
        "size",
        "then",
        "unread",
        "unsent",
        "version",
        "whole",
    )

    _access: Grant

    def __init__(
        self,
        connection: ExchangeConnection,
        method: str,
        target: str,
        version: str,
        headers: Headers,
        fields: Mapping[bytes, bytes],
        length: int | None,
        keep_alive: bool,
    ) -> None:
        self._connection = connection
        self.client = connection.peer
        self.method = method
        self.path, _, self.query = target.partition("?")
        self.version = version
        self.headers = headers
        self.fields = fields
        self.length = length
        self.keep_alive = keep_alive
        self.extra_headers: Headers | None = None
        self.late_headers: Callable[[], Headers] | None = None
        self.on_disconnect: Callable[[], object] | None = None
        self.size = self.chunks = self.unsent = self.read_ns = 0
        self.most = sys.maxsize
        self.whole: bytes | None = None
        self.filler = b""
        self.unread = self.began = self.done = self.complete = self.body_paused = self._chunked = False
        self.decoded = False
        self.collected: RequestBody | None = None
        self.then: Callable[[], None] | None = None
        self.hooks: ExchangeHooks | None = None
        self.sink: Callable[[bytes], None] | None = None
        self.refusal: HeldBodyError | None = None
        self.body_hold: Hold | None = None

    @property
    def caller(self) -> HttpExchange:
        """Itself, as the context of a request."""
        return self

    def header(self, name: str) -> str:
        """The last value of a header, by its name in lower case; empty without it."""
        return self.fields.get(name.encode(), b"").decode("latin-1")

    def header_values(self, name: str) -> list[str]:
        """All values of a header, by its name in lower case."""
        wanted = name.encode()
        return [value.decode("latin-1") for given, value in self.headers if given.lower() == wanted]

    def add_response_metadata(self, name: str, value: str) -> None:
        """Adds a header to the response to come; any thread, in its turn."""
        self.extra_headers = [*(self.extra_headers or ()), (name.encode(), value.encode())]

    @property
    def access(self) -> Grant | None:
        """The client's grant by the access policy; None without a policy."""
        return getattr(self, "_access", None)  # unset without a policy, which then costs nothing

    @access.setter
    def access(self, grant: Grant) -> None:
        self._access = grant

    @property
    def certificate_names(self) -> tuple[str, ...]:
        """Names in the client's certificate, such as ``cn:web``; none without one."""
        return self._connection.stream.certificate_names

    @property
    def lost(self) -> bool:
        """True once the connection is closed; any thread."""
        return self._connection.lost

    def read_body(self, most: int, then: Callable[[], None], held: HeldBytes | None = None) -> None:
        """Calls `then` once: when the body is complete, or as soon as it is `unread`; perhaps at once.

        Args:
            most: Limit in bytes.
            then: Called on the loop; not called if the client disconnects.
            held: Counts what comes, until `take_body`; None for no count.
        """
        self.most = most
        if self.size > most:
            self.unread = True
        if self.complete or self.unread:
            then()
            return
        self.then = then
        short = self.length is not None and self.length < COUNTED_BYTES
        self.body_hold = None if held is None or short else Hold(held)
        self._ask()

    def _ask(self) -> None:
        """Has the client send the body, and reads on."""
        if self.body_paused:
            self.hold(False)
        if self.fields.get(b"expect", b"").lower() == b"100-continue":
            self._connection.stream.write(CONTINUE)

    def hold(self, paused: bool) -> None:
        """Pauses reading the body, or resumes it."""
        self.body_paused = paused
        self._connection.hold_body(paused)

    async def wait_body(self, most: int) -> None:
        """As `read_body`. Raises ClientDisconnectError: the client disconnected."""
        ended = asyncio.Event()
        self.on_disconnect = ended.set
        self.read_body(most, ended.set)
        await ended.wait()
        self.on_disconnect = None
        if self.lost:
            raise ClientDisconnectError

    def take_body(self) -> memoryview:
        """Returns the body without copying it, and no longer keeps it."""
        if self.body_hold is not None:
            self.let_go()
        if self.collected is not None:
            body = self.collected.body()
            self.collected = None
            return body
        body = memoryview(self.whole or b"")
        self.whole = None
        return body

    def keep_body(self) -> bytes:
        """Returns a copy of a small body, which `take_body` still returns."""
        self.whole = bytes(self.take_body())
        return self.whole

    def collect(self, piece: bytes) -> None:
        """Adds a piece of the body; called by the connection."""
        if self.done or self.unread:
            return
        if self.sink is not None:
            self.sink(piece)
            return
        if self.collected is None:
            self.collected = RequestBody(self.length)
        self.collected.add(piece)
        self.size += len(piece)
        if self.size > UNASKED_BYTES and self.then is None and not self.body_paused:
            self.hold(True)
        counts = self.body_hold is None or self._count(self.body_hold, len(piece))
        if self.size > self.most or self.chunks > MOST_CHUNKS or not counts:
            self.unread = True
            self.collected = None
            self.let_go()
            then, self.then = self.then, None
            if then is not None:
                then()

    def _count(self, hold: Hold, size: int) -> bool:
        try:
            hold.receive(size)
        except ResourceExhaustedError as error:
            self.refusal = HeldBodyError(error.message)
            self.refusal.retry_after_ms = error.retry_after_ms
        return self.refusal is None

    def let_go(self) -> None:
        """Ends the count of the body."""
        hold, self.body_hold = self.body_hold, None
        if hold is not None:
            hold.release()

    def disconnected(self) -> None:
        """Tells the handler that the client disconnected; called by the connection."""
        self.let_go()
        on_disconnect, self.on_disconnect = self.on_disconnect, None
        self.then = self.collected = self.whole = self.sink = None
        if on_disconnect is not None and not self.done:
            on_disconnect()

    def respond(self, status: int, headers: Headers, body: Body = b"", closes: bool = False) -> None:
        """Sends a whole response, once; a body above 8 MB in pieces, as the client reads.

        Args:
            status: HTTP status.
            headers: Headers without Content-Length.
            body: The body; must not be changed later.
            closes: True to close the connection.
        """
        stream = self._connection.stream
        if stream.closing:
            self._connection.finished(self)
            return
        if closes:
            self.keep_alive = False
        if self.hooks is not None:
            status, headers = self.hooks.translate(self, status, headers, body)
        size = len(body) if type(body) is bytes else body_size(body)
        self.began = True
        lines: list[Buffer] = [STATUS_LINES[status]]
        if self.late_headers is not None:
            headers = headers + self.late_headers()
        for name, value in headers if self.extra_headers is None else headers + self.extra_headers:
            lines += (name, b": ", value, b"\r\n")
        if status != HTTPStatus.NO_CONTENT:
            lines.append(b"content-length: %d\r\n" % size)
        lines.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        if self.method == "HEAD":
            body, size = b"", 0
        if size <= _JOINED_BYTES:
            if isinstance(body, bytes):
                lines.append(body)
            else:
                lines.extend(body)
            stream.write(b"".join(lines))
        elif size <= AT_ONCE_BYTES:
            stream.write(b"".join(lines), *((body,) if isinstance(body, bytes) else body))
        else:
            self.unsent = size
            stream.write(b"".join(lines))
            self._connection.run(self, self._write_pieces(body))
            return
        self._connection.finished(self)

    def take_decoded(self) -> DecodedBody | None:
        """Returns what a front has `decoded`, and no longer keeps it; None for nothing."""
        return None

    def leave_encoding(self, request: InferenceRequest, response: InferenceResponse) -> FrontReply | None:
        """Leaves the response to a `decoded` request to its front; any thread. None if it can't have it."""
        return None

    def begin_response(
        self, status: int, headers: Headers, filler: bytes = b"", size: int | None = None
    ) -> None:
        """Begins a response that comes in pieces.

        Args:
            status: HTTP status.
            headers: Headers.
            filler: Content that clients ignore, sent to find out whether a half-closed client is there.
            size: Its length; None if that is not known: in chunks, or up to the connection's end with
                HTTP/1.0.
        """
        self._chunked = size is None and self.version != "1.0"
        self.filler = self._coded(filler)
        self.began = True
        headers = headers + (self.extra_headers or [])
        if self.late_headers is not None:
            headers += self.late_headers()
        if not self.keep_alive:
            headers.append((b"connection", b"close"))
        if self._chunked:
            headers.append((b"transfer-encoding", b"chunked"))
        elif size is not None:
            headers.append((b"content-length", b"%d" % size))
        lines = [b"%b: %b\r\n" % header for header in headers]
        self._write(b"".join([STATUS_LINES[status], *lines, b"\r\n"]))

    async def send(self, data: bytes) -> None:
        """Sends a piece once the client has read enough of those before."""
        await self._connection.drain()
        self.write(data)

    @property
    def writable(self) -> bool:
        """True if the client has read enough for more to be written."""
        return self._connection.writable

    async def wait_writable(self) -> None:
        """Waits until `writable`, or the client disconnects."""
        await self._connection.drain()

    def write(self, data: bytes) -> None:
        """Sends a piece, whether the client reads or not."""
        self._write(self._coded(data))

    def abort(self) -> None:
        """Breaks the connection off: the response can't be completed."""
        self._connection.stream.abort()

    def end(self) -> None:
        """Ends a response that `begin_response` began."""
        if self._chunked:
            self._write(b"0\r\n\r\n")
        self._connection.finished(self)

    def _write(self, data: Buffer) -> None:
        self._connection.stream.write(data)

    def _coded(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked and data else data

    async def _write_pieces(self, body: Body) -> None:
        for piece in body_pieces(body):
            await self._connection.drain()
            if self.lost:
                return
            self.unsent -= len(piece)
            self._write(piece)
            await asyncio.sleep(0)  # lets other connections run
        self._connection.finished(self)
