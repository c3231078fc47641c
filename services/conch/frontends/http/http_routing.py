"""Paths to endpoints, and what holds for all of them: restrictions, origins, methods, errors.

Paths are matched as Triton matches them: as the client wrote them, neither decoded nor with slashes too many.
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
from conch.frontends.http.http_responses import error_reply, text_error

log = logging.getLogger(__name__)

Endpoint = Callable[..., Awaitable[Response]]
"""Takes the request, and the named groups of the path as keyword arguments; those absent are empty."""

OnRefused = Callable[[Scope, str, str], None]
"""Is told of requests to run a model, by its name and version, that were refused."""


def ignore_refused(scope: Scope, model: str, version: str) -> None:
    """Where nobody wants to know."""


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """One line of a routing table.

    Attributes:
        pattern: Matches whole paths.
        methods: The HTTP methods there are.
        category: What it belongs to, for restrictions.
        endpoint: Answers.
    """

    pattern: re.Pattern[str]
    methods: tuple[str, ...]
    category: str
    endpoint: Endpoint


def route(pattern: str, methods: Sequence[str], category: str, endpoint: Endpoint) -> ApiRoute:
    """A route from a pattern's text."""
    return ApiRoute(re.compile(pattern), tuple(methods), category, endpoint)


def refusal(scope: Scope, category: str, restrictions: Restrictions) -> Response | None:
    """The response to a request that lacks the header its category needs; None if it may pass."""
    wanted = restrictions.get(category)
    if wanted is None:
        return None
    key, value = wanted
    name, secret = key.encode(), value.encode()
    if any(header == name and compare_digest(given, secret) for header, given in scope["headers"]):
        return None
    return text_error(restricted_text(key), 403)


def restricted_text(key: str) -> str:
    """What clients are told that lack a header."""
    return f"This API is restricted, expecting header '{key}'"


def raw_path(scope: Scope) -> str | None:
    """The path as the client wrote it, without the query; None for one that is no text."""
    raw = scope.get("raw_path")
    if raw is None:
        return str(scope["path"])
    try:
        return bytes(raw).partition(b"?")[0].decode()
    except UnicodeDecodeError:
        return None


class Router:
    """The ASGI application of all routes in a table.

    Args:
        routes: The table; the first route whose pattern matches a path has it.
        restrictions: Categories that need a secret.
        refused: Is told of requests that lack theirs.
    """

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
            return  # nobody is there to be answered
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
