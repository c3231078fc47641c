"""The short way of a request over a connection: without ASGI, its tasks, scopes and messages.

It costs a third of the time. Here is what the way looks like from the connection; who takes it is told by a
`FastPath`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from conch.frontends.http.flow_control import AT_ONCE_BYTES, Body, body_size
from conch.frontends.http.request_body import RequestBody

if TYPE_CHECKING:
    from conch.frontends.http.http_connection import Connection

_JOINED_BYTES = 64 * 1024


class FastPathCall(Protocol):
    """A request that is answered directly."""

    @property
    def length(self) -> int | None:
        """How long its body is to be; None where nobody knows."""

    @property
    def most(self) -> int:
        """How long its body may be."""

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for leave to send the body."""

    def complete(self, body: RequestBody) -> None:
        """Takes the body, once it has come."""

    def refuse_size(self, size: int) -> None:
        """Says that the body is longer than it may be: as long as this, or longer."""

    def refuse_chunks(self) -> None:
        """Says that the body comes in too many pieces."""

    def abandon(self) -> None:
        """Says that the client is gone."""


class ResponseSender(Protocol):
    """Where a direct call is answered."""

    def send(self, status: int, headers: list[tuple[bytes, bytes]], body: Body, closes: bool) -> None:
        """Sends the response, once; on the loop."""


FastPath = Callable[["Connection", "ResponseSender"], FastPathCall | None]
"""Takes a request whose headers have come, or leaves it; may answer it before it returns."""


class FastPathCycle:
    """What stands where uvicorn has its cycle of request and response, while a request is answered directly.

    Attributes:
        response_complete: Whether the response has been sent.
        keep_alive: Whether the connection goes on after it.
        disconnected: Set by uvicorn.
        message_event: Set by uvicorn; nobody waits for it.
    """

    __slots__ = (
        "_body",
        "_call",
        "_connection",
        "disconnected",
        "keep_alive",
        "message_event",
        "response_complete",
    )

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._call: FastPathCall | None = None
        self._body: RequestBody | None = None
        self.response_complete = False
        self.keep_alive: bool = connection.parser.should_keep_alive()
        self.disconnected = False
        self.message_event = _NO_EVENT

    def begin(self, call: FastPathCall) -> None:
        """Begins to read the body, unless it has been answered already."""
        if self.response_complete:
            return
        connection = self._connection
        self._call = call
        self._body = RequestBody(call.length, call.most)
        connection.on_disconnect = call.abandon
        if call.expects_continue:
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def add(self, part: bytes) -> None:
        """Takes a piece of the body."""
        if self.response_complete or self._body is None or self._call is None:
            return
        body = self._body
        if self._connection.too_many_chunks:
            self._call.refuse_chunks()
            return
        body.add(part)
        if body.size > body.most:
            self._call.refuse_size(body.size)

    def complete(self) -> None:
        """The body has come."""
        body, self._body = self._body, None
        if body is not None and self._call is not None and not self.response_complete:
            self._call.complete(body)

    def send(self, status: int, headers: list[tuple[bytes, bytes]], body: Body, closes: bool) -> None:
        """Sends the response, once."""
        connection = self._connection
        self.response_complete = True
        self._call = self._body = None
        connection.on_disconnect = None
        transport = connection.transport
        if transport.is_closing():
            return
        if closes:
            self.keep_alive = False
        lines = [STATUS_LINE[status]]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        lines.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        if isinstance(body, bytes) and len(body) <= _JOINED_BYTES:
            lines.append(body)
            transport.write(b"".join(lines))
        elif body_size(body) <= AT_ONCE_BYTES:
            transport.writelines((b"".join(lines), *((body,) if isinstance(body, bytes) else body)))
        else:
            self.response_complete = False
            transport.write(b"".join(lines))
            connection.flow.send(body, self._sent)
            return
        self._sent()

    def _sent(self) -> None:
        self.response_complete = True
        connection = self._connection
        if not self.keep_alive:
            connection.transport.close()
        elif connection.pipeline:
            connection.on_response_complete()
        # Else there is nothing to do: reading goes on, and a client may be idle for as long as it likes.


class _NoEvent(asyncio.Event):
    """An event that nobody waits for."""


_NO_EVENT = _NoEvent()
