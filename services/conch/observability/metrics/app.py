"""The metrics port as an ASGI application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from conch.observability.metrics.exposition import TEXT_TYPE, Format
from conch.observability.metrics.negotiation import wanted_format

log = logging.getLogger(__name__)

_PATHS = ("/metrics", "/metrics/")
_WRONG_METHOD = b'{"error":"Method Not Allowed"}'
_FAILED = b"the metrics can't be rendered; the server's log says why\n"

Send = Callable[[dict[str, Any]], Awaitable[None]]


class MetricsApp:
    """Answers ``GET /metrics``; other paths get an empty answer, as in Triton.

    The text is made on a thread of its own, one at a time: all who ask before it is begun get the same.

    Args:
        render: Makes the text, in pieces.
    """

    def __init__(self, render: Callable[[Format], Sequence[bytes]]) -> None:
        self._render = render
        self._thread = ThreadPoolExecutor(1, "conch-metrics")
        self._next: dict[Format, asyncio.Future[Sequence[bytes]]] = {}

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            return
        if scope["method"] != "GET":
            await _answer(send, 405, "text/plain", [_WRONG_METHOD])
        elif scope["path"] not in _PATHS:
            await _answer(send, 200, TEXT_TYPE, [])
        else:
            await self._metrics(_format(scope), send)

    def close(self) -> None:
        """Ends the thread, once nobody asks any more."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _metrics(self, wanted: Format, send: Send) -> None:
        future = self._next.get(wanted)
        if future is None:
            loop = asyncio.get_running_loop()
            future = self._next[wanted] = loop.create_future()
            self._thread.submit(self._run, wanted, loop, future)
        try:
            text = await asyncio.shield(future)  # a client that goes away must not take it from the others
        except Exception:
            log.exception("the metrics can't be rendered")
            await _answer(send, 500, "text/plain", [_FAILED])
            return
        await _answer(send, 200, wanted.content_type, text, wanted.compressed)

    def _run(
        self, wanted: Format, loop: asyncio.AbstractEventLoop, future: asyncio.Future[Sequence[bytes]]
    ) -> None:
        """Makes the text for all who have asked by now; on the thread."""
        del self._next[wanted]
        try:
            text = self._render(wanted)
        except Exception as error:
            loop.call_soon_threadsafe(future.set_exception, error)
        else:
            loop.call_soon_threadsafe(future.set_result, text)


def _format(scope: Mapping[str, Any]) -> Format:
    headers: dict[bytes, list[str]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name, []).append(value.decode("latin-1"))
    accept, coding = (",".join(headers.get(name, ())) for name in (b"accept", b"accept-encoding"))
    return wanted_format(accept, coding)


async def _answer(
    send: Send, status: int, content_type: str, body: Sequence[bytes], compressed: bool = False
) -> None:
    length = sum(map(len, body))
    headers = [(b"content-type", content_type.encode()), (b"content-length", str(length).encode())]
    if compressed:
        headers.append((b"content-encoding", b"gzip"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for part in body:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
