"""Facts of a server for its models, as the HTTP API has them."""

from __future__ import annotations

from collections.abc import Callable

from conch.core.errors import InvalidArgumentError, UnsupportedError
from conch.core.server_state import ServerState
from conch.frontends.http.routes import operation_json as json
from conch.frontends.operations import operation_handlers as handlers
from conch.frontends.operations.operation_handlers import ModelRequest, Services


def find_fact(
    core: ServerState,
    services: Services,
    metrics: Callable[[], str] | None,
    kind: str,
    name: str,
    version: str,
) -> object:
    """See `ServerCalls.fact`. `metrics` renders Prometheus' text; None if metrics are off."""
    model = ModelRequest(name, version)
    match kind:
        case "live":
            return core.alive
        case "ready":
            return core.loaded  # not the models' own checks, which may ask this
        case "server":
            return json.server_object(handlers.server_metadata(core, services, None))
        case "model":
            return json.metadata_object(handlers.model_metadata(core, services, model))
        case "statistics":
            found = handlers.statistics(core, services, model)
            return {"model_stats": [json.statistics_object(each) for each in found]}
        case "index" | "ready_index":
            entries = handlers.repository_index(core, services, kind == "ready_index")
            return [json.entry_object(each) for each in entries]
        case "metrics":
            if metrics is None:
                raise UnsupportedError("metrics are not served: start the server with --allow-metrics=true")
            return metrics()
    raise InvalidArgumentError(f"there is no fact '{kind}' of a server")
