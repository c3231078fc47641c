"""CORS and CSRF protection: pages of other origins change nothing, and infer only if their origin is allowed.

A browser lets any page send some requests to any address, this machine's included, without asking the server
first. It marks them with `Origin` and `Sec-Fetch-Site`, which no page can set. Used by: `http_routing`,
`http_server`, `server_options`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conch.frontends.http.fast_path import FastPath, FastPathCall, FastPathConnection, ResponseSender

Headers = Iterable[tuple[bytes, bytes]]

ANY_ORIGIN = "*"

_FORM_TYPES = frozenset((b"application/x-www-form-urlencoded", b"multipart/form-data", b"text/plain"))
"""Content types that need no CORS preflight."""

_RUNS_MODELS = re.compile(rb"/v2/models/[^/]+(?:/versions/[0-9]+)?/(?:infer|generate|generate_stream)")
_EXPOSED = b"inference-header-content-length, retry-after"
_MAX_AGE_S = b"600"


def cross_origin_reason(headers: Headers) -> str:
    """Returns why a request counts as cross-origin, or an empty string; header names are lower-case."""
    given = dict(headers)
    origin, site = given.get(b"origin"), given.get(b"sec-fetch-site")
    if origin is not None and not _is_own(origin, given.get(b"host", b"")):
        return f"Origin is '{origin.decode('latin-1')}'"
    if site is not None and site not in (b"same-origin", b"none"):
        return f"Sec-Fetch-Site is '{site.decode('latin-1')}'"
    # Browsers that know neither header still call themselves Mozilla.
    if origin is None and site is None and given.get(b"user-agent", b"").startswith(b"Mozilla/"):
        kind = given.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind in _FORM_TYPES:
            return (
                f"Content-Type is '{kind.decode()}', which a form can send; a program sends application/json"
            )
    return ""


def _is_own(origin: bytes, host: bytes) -> bool:
    """True if the origin is this server, by an IP address or localhost (no DNS rebinding)."""
    place = origin.partition(b"://")[2].lower()
    if not place or place != host.lower():
        return False
    found = re.fullmatch(rb"\[([^]]+)\](?::[0-9]+)?|([^:]+)(?::[0-9]+)?", place)
    if found is None:
        return False
    name = (found[1] or found[2]).decode("latin-1")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    return True


class CrossOriginInference:
    """ASGI middleware that allows inference from pages of given origins (CORS).

    Args:
        app: The wrapped application.
        origins: Origins such as ``https://app.example``, or `ANY_ORIGIN`.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self._app = app
        self._any = ANY_ORIGIN in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a preflight, or adds the CORS headers to the application's response."""
        headers = dict(scope["headers"])
        origin = headers.get(b"origin")
        allowed = origin is not None and (self._any or origin in self._origins)
        if origin is None or not allowed or not _RUNS_MODELS.fullmatch(scope["raw_path"]):
            await self._app(scope, receive, send)
            return
        leave = [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            leave += [
                (b"access-control-allow-methods", b"POST"),
                (b"access-control-allow-headers", headers.get(b"access-control-request-headers", b"")),
                (b"access-control-max-age", _MAX_AGE_S),
            ]
            await send({"type": "http.response.start", "status": 204, "headers": leave})
            await send({"type": "http.response.body", "body": b""})
            return
        leave.append((b"access-control-expose-headers", _EXPOSED))

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *leave]
            await send(message)

        await self._app(scope, receive, sending)


def fast_path_without_origin(fast_path: FastPath) -> FastPath:
    """Sends requests with an `Origin` through the application, which adds CORS headers."""

    def filtered(connection: FastPathConnection, sender: ResponseSender) -> FastPathCall | None:
        if any(name.lower() == b"origin" for name, _ in connection.raw_headers):
            return None
        return fast_path(connection, sender)

    return filtered
