"""The routes of the REST front end, all but infer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from conch.core.clock import Clock, monotonic_ns
from conch.core.server_core import ServerCore
from conch.frontends.http.bodies import MOST_BYTES
from conch.frontends.http.gate import Gate
from conch.frontends.http.generate.route import generate_routes
from conch.frontends.http.openapi import openapi_routes
from conch.frontends.http.pools import Pools
from conch.frontends.http.routes.health import health_routes
from conch.frontends.http.routes.home import home_routes
from conch.frontends.http.routes.memory import memory_routes
from conch.frontends.http.routes.models import model_routes
from conch.frontends.http.routes.repository import repository_routes
from conch.frontends.http.routes.settings import settings_routes
from conch.frontends.http.routing import ApiRoute
from conch.frontends.uploads import LOCAL_UPLOADS, UploadRule
from conch.memory.regions import Regions
from conch.observability.settings import LogControl
from conch.observability.trace import TraceSettings


def _all_allowed() -> None:
    """Where nothing says otherwise."""


@dataclass(frozen=True, slots=True)
class Services:
    """What routes ask besides the core.

    Attributes:
        regions: The shared memory of clients.
        logs: The log settings.
        traces: The trace settings.
        check_changes: Raises if clients may not load and unload models.
    """

    regions: Regions
    logs: LogControl
    traces: TraceSettings
    check_changes: Callable[[], None] = _all_allowed


def api_routes(
    core: ServerCore,
    services: Services,
    pools: Pools,
    most_bytes: int = MOST_BYTES,
    clock: Clock = monotonic_ns,
    gate: Gate | None = None,
    uploads: UploadRule = LOCAL_UPLOADS,
) -> list[ApiRoute]:
    """All tables in one.

    Args:
        core: The server.
        services: What else they ask.
        pools: Where requests wait.
        most_bytes: The largest body of JSON.
        clock: Monotonic time in nanoseconds.
        gate: Lets requests to run models in until the front end stops; None lets all in.
        uploads: Which clients may load models of files that they bring.
    """
    return [
        *home_routes(core),
        *health_routes(core, pools),
        *model_routes(core),
        *repository_routes(core, pools, most_bytes, uploads, services.check_changes),
        *memory_routes(services.regions, pools, most_bytes),
        *generate_routes(core, pools, most_bytes, clock, gate),
        *openapi_routes(core.version),
        *settings_routes(core, services.logs, services.traces, pools, most_bytes),
    ]
