"""The HTTP handler of the console: checks the host, adds the security headers, and answers by the routes.

Threads and locks: event loop only. Used by: `console_port`.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final

from conch.console.console_access import ConsoleAccess
from conch.console.console_routes import ConsoleParts, ConsoleRoutes
from conch.core.errors import ConchError
from conch.frontends.http.http_exchange import Headers, HttpExchange
from conch.frontends.http.http_routing import RouteTable
from conch.frontends.http.json_body import error_reply

POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    b"frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
_HEADERS: Final[Headers] = [
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class ConsoleApp:
    """Answers all requests of the console."""

    def __init__(self, parts: ConsoleParts) -> None:
        self._access: ConsoleAccess = parts.access
        # The routes check origins themselves, as a console may have names besides addresses.
        self._routes = RouteTable(ConsoleRoutes(parts).table(), checks_origin=False)

    def __call__(self, exchange: HttpExchange) -> Coroutine[Any, Any, None] | None:
        """Answers a request, or returns a coroutine that does."""
        exchange.extra_headers = _HEADERS
        try:
            self._access.check_host(exchange.fields)
        except ConchError as error:
            exchange.respond(*error_reply(error))
            return None
        return self._routes(exchange)
