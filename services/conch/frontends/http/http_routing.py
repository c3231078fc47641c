"""Routes paths to endpoints; checks restrictions, origins and methods, and turns errors into responses.

Paths are matched as in Triton: raw, neither decoded nor normalised.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from hmac import compare_digest

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from conch.core.errors import ConchError
from conch.frontends.access_policy import Restrictions
from conch.frontends.http.cors import cross_origin_reason
from conch.frontends.http.json_body import error_reply, text_error

log = logging.getLogger(__name__)

Endpoint = Callable[..., Awaitable[Response]]
"""Takes the request and the named groups of the path as keywords; missing groups are empty."""

OnRefused = Callable[[Scope, str, str], None]
"""Called with scope, model and version of a refused inference request."""


def ignore_refused(scope: Scope, model: str, version: str) -> None:
    """Does nothing."""


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """One line of a routing table.

    Attributes:
        pattern: Matches whole paths.
        methods: Allowed HTTP methods.
        category: Category for restrictions.
        endpoint: The handler.
    """

    pattern: re.Pattern[str]
    methods: tuple[str, ...]
    category: str
    endpoint: Endpoint


def route(pattern: str, methods: Sequence[str], category: str, endpoint: Endpoint) -> ApiRoute:
    """Builds a route."""
    return ApiRoute(re.compile(pattern), tuple(methods), category, endpoint)


def refusal(scope: Scope, category: str, restrictions: Restrictions) -> Response | None:
    """Returns the 403 response if the header of a restricted category is missing, else None."""
    wanted = restrictions.get(category)
    if wanted is None:
        return None
    key, value = wanted
    name, secret = key.encode(), value.encode()
    if any(header == name and compare_digest(given, secret) for header, given in scope["headers"]):
        return None
    return text_error(restricted_text(key), 403)


def restricted_text(key: str) -> str:
    """Returns the error text for a missing header."""
    return f"This API is restricted, expecting header '{key}'"


def raw_path(scope: Scope) -> str | None:
    """Returns the path as received, without the query; None if it is not UTF-8."""
    raw = scope.get("raw_path")
    if raw is None:
        return str(scope["path"])
    try:
        return bytes(raw).partition(b"?")[0].decode()
    except UnicodeDecodeError:
        return None


class Router:
    """ASGI application of a routing table; the first matching pattern wins."""

    def __init__(
        self,
        routes: Sequence[ApiRoute],
        restrictions: Restrictions | None = None,
        refused: OnRefused = ignore_refused,
    ) -> None:
        self._refused = refused
        self._routes = tuple(routes)
        self._restrictions = restrictions or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except ClientDisconnect:
            return  # the client disconnected
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path = raw_path(request.scope)
        found = None if path is None else self._find(path)
        if found is None:
            return text_error("Not Found", 404)
        target, groups = found
        refused = refusal(request.scope, target.category, self._restrictions)
        if refused is not None:
            if target.category == "inference":
                self._refused(request.scope, groups.get("model", ""), groups.get("version", ""))
            return refused
        if request.method == "POST" and target.category != "inference":
            page = cross_origin_reason(request.scope["headers"])
            if page:
                return text_error(f"a web page of another origin may not ask for this: {page}", 403)
        if request.method not in target.methods:
            return text_error("Method Not Allowed", 405)
        try:
            return await target.endpoint(request, **groups)
        except ConchError as error:
            return error_reply(error)
        except ClientDisconnect:
            raise
        except Exception as error:
            log.exception("%s %s could not be answered", request.method, path)
            return text_error(f"the request could not be answered: {error}", 500)

    def _find(self, path: str) -> tuple[ApiRoute, dict[str, str]] | None:
        for each in self._routes:
            matched = each.pattern.fullmatch(path)
            if matched is not None:
                return each, matched.groupdict("")
        return None
