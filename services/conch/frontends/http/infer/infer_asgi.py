"""The infer route over ASGI: the careful path, for requests that the fast path declines.

Used by: `http_server`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect

from conch.frontends.http.flow_control import AT_ONCE_BYTES, body_pieces, body_size
from conch.frontends.http.http_connection import CONNECTION, RAW_NAMES, Connection
from conch.frontends.http.infer.infer_call import InferCall
from conch.frontends.http.infer.infer_response import Reply
from conch.frontends.http.infer.infer_route import InferRoute


async def answer(
    route: InferRoute, scope: Any, receive: Any, send: Any, name: bytes, version: bytes | None
) -> None:
    """Serves one request."""
    future: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()

    def settle(reply: Reply) -> None:
        if not future.done():
            future.set_result(reply)

    def gone() -> None:
        call.abandon()
        if not future.done():
            future.set_result(None)

    headers = scope["headers"]
    client = scope.get("client")
    call = InferCall(
        route,
        name.decode(),
        (version or b"").decode(),
        dict(headers),
        scope.get(RAW_NAMES) or headers,
        f"{client[0]}:{client[1]}" if client else "",
        settle,
    )
    connection: Connection | None = scope.get(CONNECTION)
    reply = route.begin(call)
    if reply is None:
        try:
            reply = await _read(route, call, connection, scope, receive)
        except ClientDisconnect:
            return
    if reply is None:
        if connection is not None:
            connection.on_disconnect = gone
        try:
            route.run(call)
            reply = await future
        except asyncio.CancelledError:
            call.abandon()
            raise
        finally:
            if connection is not None:
                connection.on_disconnect = None
    if reply is None:
        return
    await _send(reply, send)


async def _send(reply: Reply, send: Any) -> None:
    status, fields, body, closes = reply
    if closes:
        fields = [*fields, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    if body_size(body) > AT_ONCE_BYTES:
        for piece in body_pieces(body):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)  # lets other connections run
        body = b""
    await send({"type": "http.response.body", "body": body if isinstance(body, bytes) else b"".join(body)})


async def _read(
    route: InferRoute, call: InferCall, connection: Connection | None, scope: Any, receive: Any
) -> Reply | None:
    """Reads the body; returns the response if it is refused.

    Raises:
        ClientDisconnect: The client disconnected.
    """
    collected = None if connection is None else connection.collect_body(scope, call.length, call.most)
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        if connection is not None and connection.too_many_chunks:
            return route.too_many_chunks(call)
        if message["body"]:
            parts.append(message["body"])
            size += len(message["body"])
        come = size if collected is None else collected.size
        if come > call.most:
            return route.too_large(call, come)
        more = message.get("more_body", False)
    if collected is not None:
        call.body, call.size = collected.body, collected.size
    else:
        call.body = lambda: memoryview(parts[0] if len(parts) == 1 else b"".join(parts))
        call.size = size
    return None
