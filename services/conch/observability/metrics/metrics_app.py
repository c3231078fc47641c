"""HTTP handler of the metrics port, with content negotiation.

Threads: the event loop answers; `conch-metrics` renders, one text at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from conch.observability.metrics.metrics_exposition import TEXT_TYPE, Format

log = logging.getLogger(__name__)

_OPENMETRICS = "application/openmetrics-text"
_TEXT = ("text/plain", "text/*", "*/*")
_ANY_CODING = "*"
_PATHS = ("/metrics", "/metrics/")
_LIVE, _READY = "/v2/health/live", "/v2/health/ready"
OPEN_PATHS = frozenset((_LIVE, _READY))
"""Paths for probes, which have no credentials."""
_WRONG_METHOD = b'{"error":"Method Not Allowed"}'
_FAILED = b"the metrics can't be rendered; the server's log says why\n"


class Exchange(Protocol):
    """One HTTP request and its response, as far as the metrics port uses it.

    Attributes:
        method: HTTP method.
        path: Path without the query.
        headers: Names and values as received.
    """

    method: str
    path: str
    headers: list[tuple[bytes, bytes]]

    def respond(self, status: int, headers: list[tuple[bytes, bytes]], body: Sequence[bytes]) -> None:
        """Sends the response; Content-Length is added to the headers."""


class MetricsApp:
    """Answers ``GET /metrics`` and probes; other paths get an empty answer, as in Triton.

    Requests that arrive before a rendering begins share its text.

    Args:
        render: Renders the metrics.
        live: Returns True if the server is live.
        ready: Returns True if the server is ready.
    """

    def __init__(
        self,
        render: Callable[[Format], Sequence[bytes]],
        live: Callable[[], bool],
        ready: Callable[[], bool],
    ) -> None:
        self._render = render
        self._health = {_LIVE: live, _READY: ready}
        self._thread = ThreadPoolExecutor(1, "conch-metrics")
        self._next: dict[Format, asyncio.Future[Sequence[bytes]]] = {}

    async def __call__(self, exchange: Exchange) -> None:
        """Answers one request."""
        if exchange.method != "GET":
            exchange.respond(405, [(b"content-type", b"text/plain"), (b"allow", b"GET")], [_WRONG_METHOD])
        elif exchange.path in self._health:
            passed = self._health[exchange.path]()
            body = b'{"%b":%b}' % (exchange.path.rpartition("/")[2].encode(), b"true" if passed else b"false")
            _respond(exchange, 200 if passed else 400, "application/json", [body])
        elif exchange.path not in _PATHS:
            _respond(exchange, 200, TEXT_TYPE, [])
        else:
            await self._metrics(exchange)

    def text(self) -> str:
        """Prometheus' text, rendered on the thread; blocks."""
        return b"".join(self._thread.submit(self._render, Format()).result()).decode(errors="replace")

    def close(self) -> None:
        """Ends the thread; call without open requests."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _metrics(self, exchange: Exchange) -> None:
        wanted = _format(exchange)
        future = self._next.get(wanted)
        if future is None:
            loop = asyncio.get_running_loop()
            future = self._next[wanted] = loop.create_future()
            self._thread.submit(self._run, wanted, loop, future)
        try:
            text = await asyncio.shield(future)  # a disconnect must not cancel it for others
        except Exception:  # the boundary of the request: sources of metrics are of many kinds
            log.exception("the metrics can't be rendered")
            _respond(exchange, 500, "text/plain", [_FAILED])
            return
        _respond(exchange, 200, wanted.content_type, text, wanted.compressed)

    def _run(
        self, wanted: Format, loop: asyncio.AbstractEventLoop, future: asyncio.Future[Sequence[bytes]]
    ) -> None:
        """Renders for all requests up to now; on the thread."""
        del self._next[wanted]
        try:
            text = self._render(wanted)
        except Exception as error:  # the top of the thread: those that wait get it
            loop.call_soon_threadsafe(future.set_exception, error)
        else:
            loop.call_soon_threadsafe(future.set_result, text)


def _format(exchange: Exchange) -> Format:
    headers: dict[bytes, list[str]] = {}
    for name, value in exchange.headers:
        headers.setdefault(name.lower(), []).append(value.decode("latin-1"))
    accept, coding = (",".join(headers.get(name, ())) for name in (b"accept", b"accept-encoding"))
    return wanted_format(accept, coding)


def _respond(
    exchange: Exchange, status: int, content_type: str, body: Sequence[bytes], compressed: bool = False
) -> None:
    headers = [(b"content-type", content_type.encode())]
    if compressed:
        headers.append((b"content-encoding", b"gzip"))
    exchange.respond(status, headers, body)


def wanted_format(accept: str, accept_encoding: str) -> Format:
    """The format for the headers ``Accept`` and ``Accept-Encoding``, each possibly empty."""
    types = _qualities(accept)
    openmetrics = types.get(_OPENMETRICS, 0.0)
    text = next((types[name] for name in _TEXT if name in types), 0.0)
    codings = _qualities(accept_encoding)
    gzip = codings.get("gzip", codings.get(_ANY_CODING, 0.0))
    return Format(openmetrics > 0 and openmetrics >= text, gzip > 0)


def _qualities(header: str) -> dict[str, float]:
    """The quality of each value of a header; the highest of repeated ones."""
    found: dict[str, float] = {}
    for item in header.split(","):
        name, *parameters = (part.strip().lower() for part in item.split(";"))
        if name:
            found[name] = max(found.get(name, 0.0), _quality(parameters))
    return found


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
