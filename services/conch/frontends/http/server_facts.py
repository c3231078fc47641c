"""Facts of a server for its models, as the HTTP API has them."""

from __future__ import annotations

from collections.abc import Callable

from conch.core.errors import InvalidArgumentError, UnsupportedError
from conch.door import operation_table as table
from conch.door.door import Door
from conch.door.operation_handlers import ModelRequest
from conch.frontends.http.routes import operation_json as json


def _nothing() -> None:
    """A request without fields."""


def find_fact(
    door: Door,
    metrics: Callable[[], str] | None,
    kind: str,
    name: str,
    version: str,
) -> object:
    """See `ServerCalls.fact`. `metrics` renders Prometheus' text; None if metrics are off."""
    model = ModelRequest(name, version)
    match kind:
        case "live":
            return door.alive
        case "ready":
            return door.loaded  # not the models' own checks, which may ask this
        case "server":
            return json.server_object(door.ask(table.SERVER_METADATA, _nothing).result())
        case "model":
            return json.metadata_object(door.ask(table.MODEL_METADATA, lambda: model).result())
        case "statistics":
            found = door.ask(table.MODEL_STATISTICS, lambda: model).result()
            return {"model_stats": [json.statistics_object(each) for each in found]}
        case "index" | "ready_index":
            entries = door.ask(table.REPOSITORY_INDEX, lambda: kind == "ready_index").result()
            return [json.entry_object(each) for each in entries]
        case "metrics":
            if metrics is None:
                raise UnsupportedError("metrics are not served: start the server with --allow-metrics=true")
            return metrics()
    raise InvalidArgumentError(f"there is no fact '{kind}' of a server")
