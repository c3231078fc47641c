"""Facts of a server for its models, as the HTTP API has them."""

from __future__ import annotations

from collections.abc import Callable

from conch.core.errors import InvalidArgumentError, UnsupportedError
from conch.core.model_control import IndexEntry
from conch.core.statistics_snapshot import VersionStatistics
from conch.door import operation_table as table
from conch.door.door import Door
from conch.door.operation_handlers import ModelRequest
from conch.frontends import result_objects as results
from conch.frontends.http.routes import operation_json as json


def _nothing() -> None:
    """A request without fields."""


def _statistics(models: list[VersionStatistics]) -> dict[str, object]:
    return {"model_stats": [results.statistics_object(each) for each in models]}


def _index(entries: list[IndexEntry]) -> list[dict[str, object]]:
    return [json.entry_object(each) for each in entries]


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
            return door.ask(table.SERVER_METADATA, _nothing, results.server_object).result()
        case "model":
            return door.ask(table.MODEL_METADATA, lambda: model, results.metadata_object).result()
        case "statistics":
            return door.ask(table.MODEL_STATISTICS, lambda: model, _statistics).result()
        case "index" | "ready_index":
            ready_only = kind == "ready_index"
            return door.ask(table.REPOSITORY_INDEX, lambda: ready_only, _index).result()
        case "metrics":
            if metrics is None:
                raise UnsupportedError("metrics are not served: start the server with --allow-metrics=true")
            return metrics()
    raise InvalidArgumentError(f"there is no fact '{kind}' of a server")
