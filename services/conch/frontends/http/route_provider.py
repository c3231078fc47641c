"""The seam for routes that a package of its own adds to a port of the HTTP front end.

A provider is bound to the REST routes once, when the port is built, and returns a handler. As
`HttpOptions.platform` it answers all requests of the port, and its paths are best aliases of REST paths, so
that checks, inference and errors are those of REST. In `HttpOptions.further` it answers paths that REST does
not have, with checks of its own, and passes others on to `RestApi.unmatched`; REST paths are matched first
and cost the same.

Threads and locks: event loop only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:  # settings name providers, and import little
    from conch.access.access_guard import Access, AccessGuard
    from conch.core.admission import Admission
    from conch.core.clock import Clock
    from conch.core.errors import ConchError
    from conch.door.door import Door
    from conch.frontends.http.cors import CrossOriginInference
    from conch.frontends.http.http_connection import Handler
    from conch.frontends.http.http_exchange import HttpExchange, Reply
    from conch.frontends.http.http_pools import Pools
    from conch.frontends.http.http_routing import RefusalLog
    from conch.frontends.http.infer.infer_route import InferRoute

Answering = Coroutine[Any, Any, None] | None
"""Result of a handler: the coroutine that responds; None if the handler responds by itself."""


@dataclass(frozen=True, slots=True)
class RestApi:
    """The REST routes of a port, as a provider uses them.

    Attributes:
        door: The core.
        pools: Thread pools for slow work.
        rest: Answers a request by the table of all routes.
        infer: The infer route, for models whose identifiers are no paths.
        guard: Checks the callers of the port.
        refusals: Logs refused inference requests.
        most_bytes: Largest body of JSON.
        admission: The way in for requests of the port; it refuses them as the port stops.
        clock: Monotonic time in nanoseconds.
        access: The access policy, for guards of routes with other rules than those of REST; None without one.
        cors: Opens inference to pages of other origins; None for none.
        metrics: Handler of ``GET /metrics``; None without metrics.
        unmatched: Answers paths that a further provider does not have: the next provider, or 404.
    """

    door: Door
    pools: Pools
    rest: Handler
    infer: InferRoute
    guard: AccessGuard
    refusals: RefusalLog
    most_bytes: int
    admission: Admission
    clock: Clock
    access: Access | None = None
    cors: CrossOriginInference | None = None
    metrics: Handler | None = None
    unmatched: Handler = field(kw_only=True)

    def alias(self, exchange: HttpExchange, path: str, method: str = "") -> Answering:
        """Answers a request as if it had come for a REST path."""
        exchange.path = path
        if method:
            exchange.method = method
        return self.rest(exchange)


class RouteProvider(ABC):
    """Adds routes to a port of the HTTP front end.

    Attributes:
        title: Name of the port's service, for people.
    """

    __slots__ = ()

    title: ClassVar[str]

    def check(self, door: Door) -> None:  # most providers take any models
        """Checks the loaded models at the start. Raises InvalidArgumentError: they can't be served there."""

    def refusal(self, path: str, error: ConchError) -> Reply | None:
        """The response of a path that is refused before its handler; None for that of REST."""
        return None

    @abstractmethod
    def bind(self, api: RestApi) -> Handler:
        """Returns the handler; it may set `HttpExchange.hooks` before it passes a request on."""
