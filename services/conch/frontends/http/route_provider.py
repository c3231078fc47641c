"""The seam for routes that a package of its own adds to a port of the HTTP front end.

A provider is bound to the REST routes once, when the port is built, and returns the handler of the port. Its
paths are best aliases of REST paths, so that checks, inference and errors are those of REST.

Threads and locks: event loop only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar

from conch.access.access_guard import AccessGuard
from conch.core.server_state import ServerState
from conch.frontends.http.http_connection import Handler
from conch.frontends.http.http_exchange import HttpExchange
from conch.frontends.http.http_pools import Pools
from conch.frontends.http.http_routing import RefusalLog, RouteTable
from conch.frontends.http.infer.infer_route import InferRoute
from conch.frontends.operations.operation_handlers import Services

Answering = Coroutine[Any, Any, None] | None
"""What a handler returns: None if it responds by itself, now or later."""


@dataclass(frozen=True, slots=True)
class RestApi:
    """The REST routes of a port, as a provider uses them.

    Attributes:
        core: The models and the state of the server.
        services: The state that operations use besides.
        pools: Thread pools for slow work.
        table: All routes.
        infer: The infer route, for models whose identifiers are no paths.
        guard: Checks the callers of the port.
        refusals: Logs refused inference requests.
        most_bytes: Largest body of JSON.
        metrics: Handler of ``GET /metrics``; None without metrics.
    """

    core: ServerState
    services: Services
    pools: Pools
    table: RouteTable
    infer: InferRoute
    guard: AccessGuard
    refusals: RefusalLog
    most_bytes: int
    metrics: Handler | None = None

    def alias(self, exchange: HttpExchange, path: str, method: str = "") -> Answering:
        """Answers a request as if it had come for a REST path."""
        exchange.path = path
        if method:
            exchange.method = method
        return self.table(exchange)


class RouteProvider(ABC):
    """Adds routes to a port of the HTTP front end.

    Attributes:
        title: Name of the port's service, for people.
    """

    __slots__ = ()

    title: ClassVar[str]

    def check(self, core: ServerState) -> None:  # most providers take any models
        """Checks the loaded models at the start. Raises InvalidArgumentError: they can't be served there."""

    @abstractmethod
    def bind(self, api: RestApi) -> Handler:
        """Returns the handler of the port; it may set `HttpExchange.hooks` before it passes a request on."""
