"""The table of routes: finds the handler of a request, after the checks that all requests pass.

Checks, in order: known path, CORS, key of a restricted category, origin, method, access policy. Paths are
matched raw, as in Triton, and not normalised; then the segments that fields have matched are percent-decoded.
The version in a path is a number, as in Triton; a path that matches nothing may have a label there, if the
model has labels.

Threads and locks: event loop only.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import unquote

from conch.access.access_guard import UNGUARDED, AccessGuard
from conch.access.principals import Roles
from conch.core.admission import Admission
from conch.core.clock import Clock
from conch.core.errors import ConchError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.version_text import LABEL_PATTERN
from conch.door.operation_table import ENDPOINTS, Endpoint, path_pattern
from conch.frontends.http.cors import CrossOriginInference, cross_origin_reason
from conch.frontends.http.http_connection import Handler
from conch.frontends.http.http_exchange import ClientDisconnectError, HttpExchange, Reply
from conch.frontends.http.json_body import error_reply, text_error
from conch.frontends.load_reports import ASKED, LoadReports

log = logging.getLogger(__name__)

RouteHandler = Callable[..., Coroutine[Any, Any, Reply | None] | None]
"""Takes the exchange, and the named groups of the path as keywords; missing groups are empty.

A plain function responds by itself, now or later. A coroutine runs as a task; it returns the response, or
None if it has responded by itself. Its errors become responses.
"""


def respond_not_found(exchange: HttpExchange) -> None:
    """Answers a request for a path that no table and no provider has, with Triton's text."""
    exchange.respond(*text_error("Not Found", 404))


def wrong_method(allowed: Sequence[str]) -> Reply:
    """Returns the response to a method that a path does not have, with Triton's text."""
    reply = text_error("Method Not Allowed", 405)
    return reply._replace(headers=[*reply.headers, (b"allow", ", ".join(allowed).encode())])


class RefusalLog:
    """Logs inference requests that are refused before they are decoded."""

    def __init__(self, admission: Admission, clock: Clock) -> None:
        self._admission = admission
        self._clock = clock

    def add(self, exchange: HttpExchange, model: str, version: str, error: ConchError) -> None:
        """Logs a request with the model and version of its path; may add headers to the answer."""
        now = self._clock()
        request = InferenceRequest(model, version, {}, _ignore_response, now)
        self._admission.refuse(request, error, exchange, 0, now)


def _ignore_response(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
    """The responder of a request that is never submitted."""


@dataclass(frozen=True, slots=True)
class Route:
    """One line of the table.

    Attributes:
        pattern: Matches whole paths.
        methods: Allowed HTTP methods.
        category: Category for restrictions.
        handler: Answers the requests.
    """

    pattern: re.Pattern[str]
    methods: tuple[str, ...]
    category: str
    handler: RouteHandler


def route(pattern: str, methods: Sequence[str], category: str, handler: RouteHandler) -> Route:
    """Builds a route."""
    return Route(re.compile(pattern), tuple(methods), category, handler)


_LABELLED = re.compile(rf"(/v2/models/([^/]+)/versions/)({LABEL_PATTERN})(|/.*)")


class RouteTable:
    """Handles requests by a table; the first matching pattern wins.

    Args:
        routes: The table.
        guard: Checks the callers. If it identifies them, all routes must be in `endpoints`.
        refusals: Logs inference requests that the guard refuses; None for no log.
        cors: Opens inference to pages of other origins; None for none.
        unmatched: Answers unknown paths.
        reports: Adds load reports to the responses of inference requests that ask for them; None for none.
        checks_origin: True if a change by a page of another origin is refused here; else its handler does it.
        labels: The labels of a model's versions; None where paths have none.
        endpoints: The routes' calls; by default the table of operations.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        guard: AccessGuard = UNGUARDED,
        refusals: RefusalLog | None = None,
        cors: CrossOriginInference | None = None,
        unmatched: Handler = respond_not_found,
        reports: LoadReports | None = None,
        checks_origin: bool = True,
        labels: Callable[[str], Mapping[str, int]] | None = None,
        endpoints: Iterable[Endpoint] = ENDPOINTS,
    ) -> None:
        self._labels = labels
        self._checks_origin = checks_origin
        self._routes = tuple(routes)
        self._guard = guard
        self._restricted = guard.restricted
        known = {
            (path_pattern(template), endpoint.http_method): endpoint
            for endpoint in (endpoints if guard.identifies else ())
            for template in endpoint.paths
        }
        self._endpoints = {
            call: known[call]
            for each in self._routes
            for call in ((each.pattern.pattern, method) for method in each.methods)
            if guard.identifies
        }
        self._refusals = refusals
        self._cors = cors
        self._unmatched = unmatched
        self._reports = reports

    def __call__(self, exchange: HttpExchange) -> Coroutine[Any, Any, None] | None:
        """Answers a request, or returns a coroutine that does."""
        path = exchange.path
        found = self._match(path) or self._match_label(path)
        if found is None:
            return self._unmatched(exchange)
        target, groups = found
        if "%" in path:
            groups = {name: unquote(text) for name, text in groups.items()}
        inference = target.category == "inference"
        if inference and self._cors is not None and self._cors.answer(exchange):
            return None
        if target.category in self._restricted:
            try:
                self._guard.check_key(exchange, target.category)
            except ConchError as error:
                self._refuse(exchange, target, groups, error)
                return None
        if inference and ASKED in exchange.fields and self._reports is not None:
            exchange.late_headers = partial(self._reports.header, exchange.fields[ASKED])
        if exchange.method in ("POST", "PUT", "DELETE") and not inference and self._checks_origin:
            page = cross_origin_reason(exchange.fields)
            if page:
                text = f"a web page of another origin may not ask for this: {page}"
                exchange.respond(*text_error(text, 403))
                return None
        if exchange.method not in target.methods:
            exchange.respond(*wrong_method(target.methods))
            return None
        try:
            if self._endpoints:
                endpoint = self._endpoints[target.pattern.pattern, exchange.method]
                model = groups.get("model", "")
                try:
                    admit(exchange, self._guard, endpoint.entry_roles, endpoint.name, model)
                except ConchError as error:
                    self._refuse(exchange, target, groups, error)
                    return None
            work = target.handler(exchange, **groups)
        except Exception as unforeseen:  # boundary: a handler
            exchange.respond(*_unforeseen(exchange, unforeseen))
            return None
        return None if work is None else _answer(exchange, work)

    def _match(self, path: str) -> tuple[Route, dict[str, str]] | None:
        for target in self._routes:
            matched = target.pattern.fullmatch(path)
            if matched is not None:
                return target, matched.groupdict("")
        return None

    def _match_label(self, path: str) -> tuple[Route, dict[str, str]] | None:
        """The route and the groups of a path with a label as its version; None if the model has no labels."""
        found = None if self._labels is None else _LABELLED.fullmatch(path)
        if found is None or self._labels is None or not self._labels(unquote(found[2])):
            return None
        matched = self._match(f"{found[1]}0{found[4]}")
        return None if matched is None else (matched[0], {**matched[1], "version": found[3]})

    def _refuse(
        self, exchange: HttpExchange, target: Route, groups: Mapping[str, str], error: ConchError
    ) -> None:
        if target.category == "inference" and self._refusals is not None:
            # Before the answer, to which it may add.
            self._refusals.add(exchange, groups.get("model", ""), groups.get("version", ""), error)
        exchange.respond(*error_reply(error))


def admit(exchange: HttpExchange, guard: AccessGuard, roles: Roles, action: str, model: str) -> None:
    """Identifies the caller of a request before its body is read; raises as `AccessGuard.admit`."""
    if roles:
        size = None if b"transfer-encoding" in exchange.fields else exchange.length or 0
        exchange.access = guard.admit(exchange, roles, action, model, size=size)


async def _answer(exchange: HttpExchange, work: Coroutine[Any, Any, Reply | None]) -> None:
    try:
        reply = await work
    except ClientDisconnectError:
        return
    except ConchError as error:
        reply = error_reply(error)
    except Exception as unforeseen:  # boundary: a handler
        reply = _unforeseen(exchange, unforeseen)
    if reply is not None:
        exchange.respond(*reply)


def _unforeseen(exchange: HttpExchange, error: Exception) -> Reply:
    """Logs an error of a handler; returns the response."""
    log.error("%s %s could not be answered", exchange.method, exchange.path, exc_info=error)
    return text_error("the request could not be answered", 500)
