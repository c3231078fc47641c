"""Routes under an access policy: identifies callers, and checks the model in the path, before a body is read.

Every route is wrapped, and has to be in the table of operations. Threads and locks: event loop only.
"""

from __future__ import annotations

from collections.abc import Container, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from conch.access.access_guard import AccessGuard
from conch.access.principals import INFERS, Roles
from conch.core.errors import ConchError
from conch.frontends.http.http_connection import Handler
from conch.frontends.http.http_exchange import HttpExchange, Reply
from conch.frontends.http.http_routing import RefusalLog, Route, RouteHandler
from conch.frontends.http.json_body import error_reply
from conch.frontends.operations.operation_table import ENDPOINTS, Endpoint, path_pattern

_ENDPOINTS: Mapping[tuple[str, str], Endpoint] = {
    (path_pattern(template), endpoint.http_method): endpoint
    for endpoint in ENDPOINTS
    for template in endpoint.paths
}


def guard_routes(routes: Sequence[Route], guard: AccessGuard, refusals: RefusalLog) -> list[Route]:
    """Returns the routes with handlers that check the caller first."""
    return [replace(route, handler=_guarded(route, guard, refusals)) for route in routes]


def _guarded(route: Route, guard: AccessGuard, refusals: RefusalLog) -> RouteHandler:
    endpoints = {method: _ENDPOINTS[route.pattern.pattern, method] for method in route.methods}
    handler = route.handler

    def handle(exchange: HttpExchange, **path: str) -> Coroutine[Any, Any, Reply | None] | None:
        endpoint = endpoints[exchange.method]
        if endpoint.roles:
            error = _refusal(exchange, guard, endpoint.entry_roles, endpoint.name, path.get("model", ""))
            if error is not None:
                if endpoint.roles == INFERS and "model" in path:
                    # Before the answer, to which it may add.
                    refusals.add(exchange, path["model"], path["version"], error)
                exchange.respond(*error_reply(error))
                return None
        return handler(exchange, **path)

    return handle


def guard_handler(
    handler: Handler, guard: AccessGuard, roles: Roles, action: str, model: str, open_paths: Container[str]
) -> Handler:
    """Returns the handler of a port with one kind of call; it checks the caller first, save on open paths."""

    def handle(exchange: HttpExchange) -> Coroutine[Any, Any, None] | None:
        if exchange.path not in open_paths:
            error = _refusal(exchange, guard, roles, action, model)
            if error is not None:
                exchange.respond(*error_reply(error))
                return None
        return handler(exchange)

    return handle


def _refusal(
    exchange: HttpExchange, guard: AccessGuard, roles: Roles, action: str, model: str
) -> ConchError | None:
    """Identifies the caller; returns the error of a request that is refused, None if it is admitted."""
    chunked = b"transfer-encoding" in exchange.fields
    try:
        exchange.access = guard.admit(
            exchange, roles, action, None if chunked else exchange.length or 0, model
        )
    except ConchError as error:
        return error
    return None
