"""Fast path of the connection: serves a request without ASGI tasks, scopes and messages.

Careful path: `infer.infer_asgi` behind uvicorn, three times as expensive. Contract tests hold both.
This module defines the connection's side; a `FastPath` accepts or declines each request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from conch.frontends.http.flow_control import AT_ONCE_BYTES, Body, HttpFlowControl, RequestBody, body_size

_JOINED_BYTES = 64 * 1024


class FastPathConnection(Protocol):
    """The connection, as its fast path uses it.

    Attributes:
        url: Path and query of the request.
        on_disconnect: Called once if the client disconnects while a request runs, or None.
        flow: Sends large bodies.
    """

    url: bytes
    on_disconnect: Callable[[], None] | None
    flow: HttpFlowControl

    @property
    def parser(self) -> Any:
        """The parser of httptools."""

    @property
    def transport(self) -> asyncio.Transport:
        """Its transport."""

    @property
    def pipeline(self) -> Sized:
        """Requests that wait for the running one."""

    @property
    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        """Headers with names as received."""

    @property
    def peer(self) -> str:
        """The client's address."""

    @property
    def too_many_chunks(self) -> bool:
        """True if the body exceeds the limit of chunks."""

    def on_response_complete(self) -> None:
        """Starts the next pipelined request, or resumes reading."""


class FastPathCall(Protocol):
    """A request on the fast path."""

    @property
    def length(self) -> int | None:
        """Announced body length in bytes, or None."""

    @property
    def most(self) -> int:
        """Limit of the body in bytes."""

    @property
    def expects_continue(self) -> bool:
        """True if the client expects ``100 Continue``."""

    def complete(self, body: RequestBody) -> None:
        """Executes the request with its complete body."""

    def refuse_size(self, size: int) -> None:
        """Refuses a body of at least this size."""

    def refuse_chunks(self) -> None:
        """Refuses a body with too many chunks."""

    def abandon(self) -> None:
        """Cancels the request after a disconnect."""


class ResponseSender(Protocol):
    """Sends the response of a fast path call."""

    def send(self, status: int, headers: list[tuple[bytes, bytes]], body: Body, closes: bool) -> None:
        """Sends the response, once; on the loop."""


FastPath = Callable[[FastPathConnection, ResponseSender], FastPathCall | None]
"""Accepts or declines a request by its headers; may respond before it returns."""


class FastPathCycle:
    """Replaces uvicorn's request-response cycle for a request on the fast path.

    Attributes:
        response_complete: True once the response is sent.
        keep_alive: True if the connection stays open after the response.
        disconnected: Set by uvicorn.
        message_event: Set by uvicorn; unused.
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

    def __init__(self, connection: FastPathConnection) -> None:
        self._connection = connection
        self._call: FastPathCall | None = None
        self._body: RequestBody | None = None
        self.response_complete = False
        self.keep_alive: bool = connection.parser.should_keep_alive()
        self.disconnected = False
        self.message_event = _NO_EVENT

    def begin(self, call: FastPathCall) -> None:
        """Starts reading the body, unless the response is already sent."""
        if self.response_complete:
            return
        connection = self._connection
        self._call = call
        self._body = RequestBody(call.length, call.most)
        connection.on_disconnect = call.abandon
        if call.expects_continue:
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def add(self, part: bytes) -> None:
        """Adds a piece of the body."""
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
        """Passes the complete body to the call."""
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
        # Else nothing to do: reading goes on.


class _NoEvent(asyncio.Event):
    """An unused event."""


_NO_EVENT = _NoEvent()
