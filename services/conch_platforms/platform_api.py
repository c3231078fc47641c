"""What the routes of a platform are made of: the REST routes behind them, aliases, and the default model.

A platform's path is an alias of a REST path, so that checks, inference and errors are those of REST. Threads
and locks: event loop only. Used by: the modules of the platforms; `http_server` binds them.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from conch.core.errors import InvalidArgumentError
from conch.core.request import InferenceRequest
from conch.core.server_state import ServerState
from conch.frontends.access_policy import Restrictions
from conch.frontends.http.http_connection import Handler
from conch.frontends.http.http_exchange import HttpExchange
from conch.frontends.http.http_pools import Pools
from conch.frontends.http.http_routing import OnRefused, RouteTable
from conch.frontends.http.infer.infer_route import InferRoute
from conch.frontends.operations.operation_handlers import Services

Answering = Coroutine[Any, Any, None] | None
"""What a handler returns: nothing, if it responds by itself."""


@dataclass(frozen=True, slots=True)
class RestApi:
    """The REST routes of a front end.

    Attributes:
        table: All routes.
        infer: The infer route, for models whose identifiers are no paths.
        restrictions: Categories of routes that need a secret.
        refused: Told of inference requests without it.
        most_bytes: Largest body of JSON.
        metrics: Handler of ``GET /metrics``; None without metrics.
    """

    core: ServerState
    services: Services
    pools: Pools
    table: RouteTable
    infer: InferRoute
    restrictions: Restrictions
    refused: OnRefused
    most_bytes: int
    metrics: Handler | None = None


PrepareRequest = Callable[[InferenceRequest, HttpExchange], None]
"""Adds what a platform's headers say to a decoded request; raises `ConchError`."""


class Platform(Protocol):
    """A platform whose routes a front end serves."""

    @property
    def title(self) -> str:
        """The platform's name."""

    @property
    def prepare(self) -> PrepareRequest | None:
        """Called with each decoded inference request before it is admitted."""

    def check(self, core: ServerState) -> None:
        """Checks the loaded models at the start. Raises InvalidArgumentError: they can't be served there."""

    def bind(self, api: RestApi) -> Handler:
        """Returns the handler of the port."""


def alias(api: RestApi, exchange: HttpExchange, path: str, method: str = "") -> Answering:
    """Answers a request as if it had come for a REST path."""
    exchange.path = path
    if method:
        exchange.method = method
    return api.table(exchange)


def only_model(core: ServerState) -> str:
    """The name of the only loaded model.

    Raises:
        InvalidArgumentError: There are none, or several; the text is Triton's.
    """
    names = {model.spec.name for entry in core.registry.entries.values() for model in entry.ready.values()}
    if len(names) != 1:
        raise InvalidArgumentError(
            "Expect the model repository contains only a single model if default model is not specified"
        )
    return names.pop()


def check_loaded(core: ServerState, model: str) -> None:
    """Checks that a model is loaded. Raises InvalidArgumentError: it is not; the text is Triton's."""
    if not any(core.registry.entries[each].ready for each in core.registry.identifiers(model)):
        raise InvalidArgumentError(f"Expect the default model '{model}' is loaded")
