"""Paths, methods, restrictions and errors of the REST front end."""

from __future__ import annotations

import asyncio
import logging

import pytest
from tests.support.raw_http import head
from tests.support.rest import Rest, Wire

from conch.access.access_guard import AccessGuard, PortRules
from conch.core.errors import NotFoundError, ResourceExhaustedError
from conch.frontends.http.http_exchange import ClientDisconnectError, HttpExchange, Reply
from conch.frontends.http.http_routing import RouteTable, route
from conch.frontends.http.json_body import json_reply

RESTRICTED = (403, {"error": "This API is restricted, expecting header 'key'"})


async def echo(exchange: HttpExchange, **groups: str) -> Reply:
    return json_reply(groups)


async def missing(exchange: HttpExchange) -> Reply:
    raise NotFoundError("no such thing")


async def busy(exchange: HttpExchange) -> Reply:
    error = ResourceExhaustedError("too much")
    error.retry_after_ms = 1500
    raise error


async def broken(exchange: HttpExchange) -> Reply:
    raise ValueError("oh")


def broken_at_once(exchange: HttpExchange) -> None:
    raise ValueError("oh")


async def gone(exchange: HttpExchange) -> Reply:
    raise ClientDisconnectError


ROUTES = [
    route("/v2/models/stats", ["GET"], "statistics", echo),
    route("/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[0-9]+))?", ["GET"], "metadata", echo),
    route("/both", ["GET", "POST"], "logging", echo),
    route("/missing", ["GET"], "health", missing),
    route("/busy", ["GET"], "health", busy),
    route("/broken", ["GET"], "health", broken),
    route("/broken/at/once", ["GET"], "health", broken_at_once),
    route("/gone", ["GET"], "health", gone),
]
rest = Rest(RouteTable(ROUTES))
NOT_FOUND = (404, {"error": "Not Found"})
NOT_ALLOWED = (405, {"error": "Method Not Allowed"})


def test_groups_of_the_path_are_decoded_after_it_is_split() -> None:
    assert rest("GET", "/v2/models/a%2Fb/versions/01") == (200, {"model": "a/b", "version": "01"})
    assert rest("GET", "/v2/models/a?x=/b") == (200, {"model": "a", "version": ""})


def test_the_first_match_counts() -> None:
    assert rest("GET", "/v2/models/stats") == (200, {})


@pytest.mark.parametrize(
    "path", ["/", "/v2/models", "/v2/models/", "/v2/models/a/", "/v2//models/a", "/v2/models/a/versions/x"]
)
def test_other_paths_are_not_found_whatever_the_method(path: str) -> None:
    assert rest("GET", path) == rest("DELETE", path) == NOT_FOUND


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_other_methods_are_not_allowed(method: str) -> None:
    assert rest(method, "/v2/models/a") == NOT_ALLOWED
    assert rest(method, "/both") == ((200, {}) if method == "POST" else NOT_ALLOWED)


def test_there_is_no_head() -> None:
    assert asyncio.run(rest.send("HEAD", "/v2/models/a")).status_code == 405


def test_errors_of_ours_have_their_status_and_text() -> None:
    assert rest("GET", "/missing") == (404, {"error": "no such thing"})
    response = asyncio.run(rest.send("GET", "/busy"))
    assert (response.status_code, response.headers["retry-after"]) == (429, "2")
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("path", ["/broken", "/broken/at/once"])
def test_other_errors_are_logged_with_their_traceback(caplog: pytest.LogCaptureFixture, path: str) -> None:
    with caplog.at_level(logging.ERROR):
        assert rest("GET", path) == (500, {"error": "the request could not be answered"})
    assert caplog.records[-1].exc_info is not None


async def written(request: bytes) -> bytes:
    """Everything that is written to a client that sends this."""
    wire = Wire(RouteTable(ROUTES))
    wire.send(request)
    await wire.ended()
    return b"".join(wire.written)


def test_a_client_that_has_gone_is_not_answered() -> None:
    assert asyncio.run(written(head("GET", "/gone"))) == b""


def test_a_path_that_is_no_text_is_malformed() -> None:
    assert asyncio.run(written(b"GET /v2/models/\xff HTTP/1.1\r\nHost: x\r\n\r\n")).startswith(
        b"HTTP/1.1 400 "
    )


def test_a_target_with_a_host_or_a_fragment_has_a_path() -> None:
    for target in ("http://conch/v2/models/a?x", "/v2/models/a#b"):
        assert asyncio.run(written(head("GET", target))).endswith(b'{"model":"a","version":""}'), target


def test_restricted_categories_need_their_header_before_all_else() -> None:
    rules = PortRules(
        {"metadata": ("key", "secret"), "logging": ("other", "x")},
        "This API is restricted, expecting header '{key}'",
    )
    restricted = Rest(RouteTable(ROUTES, AccessGuard(None, "http", rules)))
    assert restricted("GET", "/v2/models/a") == RESTRICTED
    assert restricted("DELETE", "/v2/models/a") == RESTRICTED
    assert restricted("GET", "/v2/models/a", headers={"key": "wrong"}) == RESTRICTED
    assert restricted("GET", "/v2/models/a", headers={"other": "secret"}) == RESTRICTED
    assert restricted("GET", "/v2/models/a", headers={"KEY": "secret"})[0] == 200
    assert restricted("DELETE", "/v2/models/a", headers={"key": "secret"}) == NOT_ALLOWED
    assert restricted("GET", "/v2/models/stats")[0] == 200
    assert restricted("GET", "/nowhere") == NOT_FOUND


def test_a_path_may_have_a_label_where_the_model_has_some() -> None:
    labelled = Rest(RouteTable(ROUTES, labels=lambda model: {"champion": 1} if model == "a" else {}))
    assert labelled("GET", "/v2/models/a/versions/champion") == (200, {"model": "a", "version": "champion"})
    assert labelled("GET", "/v2/models/a/versions/other") == (200, {"model": "a", "version": "other"})
    assert labelled("GET", "/v2/models/a/versions/7") == (200, {"model": "a", "version": "7"})
    for path in ("/v2/models/b/versions/champion", "/v2/models/a/versions/-x", "/v2/models/a/versions/x/y"):
        assert labelled("GET", path) == NOT_FOUND
