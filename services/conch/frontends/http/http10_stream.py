"""Streams responses of unknown length to HTTP/1.0 clients, which know no chunked coding.

Used by: `generate_route`.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Message, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from conch.frontends.http.http_connection import CONNECTION, Connection


def http10_sender(scope: Scope, send: Send) -> Send:
    """ASGI's ``send`` for a response whose length is not known, as its client understands it.

    Args:
        scope: The request's, which runs.
        send: What sends to all other clients.
    """
    connection: Connection | None = scope.get(CONNECTION)
    return send if connection is None or scope["http_version"] != "1.0" else _CloseDelimitedSender(connection)


class _CloseDelimitedSender:
    """Sends a response that ends when the connection closes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._cycle: Any = connection.running

    async def __call__(self, message: Message) -> None:
        connection, cycle = self._connection, self._cycle
        if connection.flow.write_paused and not connection.lost:
            await connection.flow.drain()
        if connection.lost:
            return
        if message["type"] == "http.response.start":
            cycle.response_started = True
            lines = [name + b": " + value + b"\r\n" for name, value in message["headers"]]
            status = STATUS_LINE[message["status"]]
            connection.transport.write(b"".join((status, *lines, b"connection: close\r\n\r\n")))
            return
        connection.transport.write(message["body"])
        if not message["more_body"]:
            cycle.response_complete = True
            cycle.message_event.set()
            connection.transport.close()
