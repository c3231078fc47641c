"""HTTP exchanges whose connections are a front's, as the core's handlers see them.

Threads and locks: the event loop of the HTTP ports only, but for what `HttpExchange` allows on any thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

from conch.core.clock import monotonic_ns
from conch.core.tensor import Buffer
from conch.frontends.http.flow_control import AT_ONCE_BYTES, Body, body_size
from conch.frontends.http.http_exchange import STATUS_LINES, Headers, HttpExchange
from conch.fronts.http_messages import (
    CREDIT_BYTES,
    Head,
    HttpRecord,
    Record,
    encode_json,
    headers_from_json,
    headers_to_json,
)


class ExchangeLink(Protocol):
    """What an exchange needs of the link to its front."""

    def send(self, record: HttpRecord) -> None:
        """Sends a record with the round."""

    def run(self, exchange: HttpExchange, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine of an exchange as a task."""

    def ended(self, number: int) -> None:
        """Forgets an exchange, to which nothing more is sent."""


class RemoteConnection:
    """The connection of one exchange; see `ExchangeConnection`.

    Flow control: the front says how much of the pieces of a response its client has read, or is about to.
    """

    def __init__(self, link: ExchangeLink, number: int, peer: str) -> None:
        self.link = link
        self.number = number
        self.peer = peer
        self.lost = False
        self._unread = 0
        self._writable = asyncio.Event()
        self._writable.set()

    @property
    def writable(self) -> bool:
        """Whether the client has read enough for more to be written."""
        return self._writable.is_set()

    async def drain(self) -> None:
        """Waits until the client has read enough for more to be written."""
        await self._writable.wait()

    def write(self, piece: Buffer) -> None:
        """Sends a piece of a response."""
        self._unread += len(piece)
        if self._unread > CREDIT_BYTES:
            self._writable.clear()
        self.link.send(HttpRecord(Record.WRITE, self.number, body=piece))

    def note_read(self, count: int) -> None:
        """Notes that the client has read so many bytes."""
        self._unread -= count
        if self._unread <= CREDIT_BYTES:
            self._writable.set()

    def lose(self) -> None:
        """Notes that the client is gone."""
        self.lost = True
        self._writable.set()

    def hold_body(self, held: bool) -> None:
        """Needs nothing: the front sends no more than it may until it is asked."""

    def run(self, exchange: HttpExchange, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine of an exchange as a task."""
        self.link.run(exchange, work)

    def finished(self, exchange: HttpExchange) -> None:
        """Ends an exchange whose response came in pieces."""
        if not self.lost:
            self.link.send(HttpRecord(Record.END, self.number))
        self.end(exchange)

    def end(self, exchange: HttpExchange) -> None:
        """Ends an exchange, to which nothing more is sent."""
        exchange.done = True
        exchange.on_disconnect = exchange.then = exchange.whole = exchange.collected = None
        self.link.ended(self.number)


class RemoteExchange(HttpExchange):
    """One request and its response, which a front receives and sends.

    Args:
        link: The link to the front.
        number: Its number at the front.
        head: Its head.
    """

    __slots__ = ("_names", "_remote", "port")

    def __init__(self, link: ExchangeLink, number: int, head: Head) -> None:
        remote: Any = RemoteConnection(
            link, number, head.client
        )  # without a transport: see what is overridden
        headers = headers_from_json(head.headers)
        fields = {name.lower(): value for name, value in headers}
        HttpExchange.__init__(
            self,
            remote,
            head.method,
            head.target,
            head.version,
            headers,
            fields,
            head.length,
            head.keep_alive,
        )
        self._remote: RemoteConnection = remote
        self._names = tuple(head.certificate_names)
        self.port = head.port

    @property
    def certificate_names(self) -> tuple[str, ...]:
        """Names in the client's certificate, such as ``cn:web``; none without one."""
        return self._names

    def receive(self, piece: bytes, chunks: int, complete: bool) -> None:
        """Takes a piece of the body, or all of it."""
        self.chunks = chunks
        if piece and complete and len(piece) == self.length and len(piece) <= self.most:
            self.whole = piece
            self.size = len(piece)
        elif piece:
            self.collect(piece)
        if complete:
            self.complete = True
            self.read_ns = monotonic_ns()
            then, self.then = self.then, None
            if then is not None:
                then()

    def note_read(self, count: int) -> None:
        """Notes that the client has read so many bytes of the response."""
        self._remote.note_read(count)

    def disconnected(self) -> None:
        """Tells the handler that the client disconnected."""
        self._remote.lose()
        HttpExchange.disconnected(self)

    def _ask(self) -> None:
        self.held = False
        self._remote.link.send(HttpRecord(Record.ASK, self._remote.number))

    def respond(self, status: int, headers: Headers, body: Body = b"", closes: bool = False) -> None:
        """Sends a whole response, once; see `HttpExchange.respond`."""
        remote = self._remote
        if remote.lost:
            remote.end(self)
            return
        if self.hooks is not None:
            status, headers = self.hooks.translate(self, status, headers, body)
        self.began = True
        if closes:
            self.keep_alive = False
        size = body_size(body)
        if size > AT_ONCE_BYTES and self.method != "HEAD":
            self.unsent = size
            self._begin(status, headers, b"", size, closes)
            remote.run(self, self._write_pieces(body))
            return
        text = encode_json((_known(status), headers_to_json(self._with_added(headers))))
        whole = body if isinstance(body, bytes) else b"".join(body)
        remote.link.send(HttpRecord(Record.RESPOND, remote.number, closes, 0, text, whole))
        remote.end(self)

    def begin_response(
        self, status: int, headers: Headers, filler: bytes = b"", size: int | None = None
    ) -> None:
        """Begins a response that comes in pieces; see `HttpExchange.begin_response`."""
        self.began = True
        self._begin(status, headers, filler, size, False)

    def _begin(self, status: int, headers: Headers, filler: bytes, size: int | None, closes: bool) -> None:
        if self.lost:
            return
        remote = self._remote
        text = encode_json(
            (_known(status), headers_to_json(self._with_added(headers)), filler.decode("latin-1"), size)
        )
        remote.link.send(HttpRecord(Record.BEGIN, remote.number, closes, 0, text))

    def _with_added(self, headers: Headers) -> Headers:
        late = [] if self.late_headers is None else self.late_headers()
        return [*headers, *late, *(self.extra_headers or ())]

    def abort(self) -> None:
        """Has the front break the connection off."""
        if not self.lost:
            self._remote.link.send(HttpRecord(Record.ABORT, self._remote.number))
            self.disconnected()
        self._remote.end(self)

    def _write(self, data: Buffer) -> None:
        if not self.lost and len(data):
            self._remote.write(data)


def _known(status: int) -> int:
    """The status. Raises KeyError: there is none such; a front would end with it."""
    if status not in STATUS_LINES:
        raise KeyError(status)
    return int(status)
