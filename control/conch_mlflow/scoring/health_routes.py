"""The routes ``/ping`` and ``/version``, as MLflow's server answers them. Event loop only."""

from __future__ import annotations

from typing import Final

from conch.access.principals import ANY, OPEN
from conch.door import operation_table as table
from conch.door.operation_table import Endpoint, path_pattern
from conch.frontends.http.http_exchange import HttpExchange, Reply
from conch.frontends.http.http_routing import Route, RouteHandler, RouteTable, route
from conch.frontends.http.route_provider import Answering, RestApi

PING = Endpoint("mlflow_ping", "health", "Whether the server is ready", paths=("/ping",), roles=OPEN)
VERSION = Endpoint("mlflow_version", "metadata", "The server's version", paths=("/version",), roles=ANY)
ENDPOINTS: Final = (PING, VERSION)
"""MLflow's calls, as entries like those of the table of operations."""


def health_table(api: RestApi) -> RouteTable:
    """The table of the routes; paths that it does not have go on to the next provider."""
    probes = _Probes(api)
    routes = [_route(PING, probes.ping), _route(VERSION, probes.version)]
    labels = api.door.models.labels
    return RouteTable(
        routes, api.guard, api.refusals, api.cors, api.unmatched, labels=labels, endpoints=ENDPOINTS
    )


def _route(endpoint: Endpoint, handler: RouteHandler) -> Route:
    return route(path_pattern(endpoint.paths[0]), [endpoint.http_method], endpoint.access, handler)


class _Probes:
    def __init__(self, api: RestApi) -> None:
        self._api = api

    def ping(self, exchange: HttpExchange) -> Answering:
        """Answers a probe."""
        return self._api.alias(exchange, table.SERVER_READY.paths[0])

    async def version(self, exchange: HttpExchange) -> Reply:
        """Answers with a text, as MLflow's server does."""
        return Reply(200, [(b"content-type", b"text/plain")], self._api.door.version.encode())
