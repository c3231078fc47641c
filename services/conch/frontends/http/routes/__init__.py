"""The routes of the REST front end, all but those that run models."""

from __future__ import annotations

from conch.core.server_core import ServerCore
from conch.frontends.http.bodies import MOST_BYTES
from conch.frontends.http.pools import Pools
from conch.frontends.http.routes.health import health_routes
from conch.frontends.http.routes.memory import memory_routes
from conch.frontends.http.routes.models import model_routes
from conch.frontends.http.routes.repository import repository_routes
from conch.frontends.http.routing import ApiRoute
from conch.memory.regions import Regions


def api_routes(
    core: ServerCore, pools: Pools, regions: Regions, most_bytes: int = MOST_BYTES
) -> list[ApiRoute]:
    """All tables in one.

    Args:
        core: The server.
        pools: Where requests wait.
        regions: The shared memory of clients.
        most_bytes: The largest body of JSON.
    """
    return [
        *health_routes(core, pools),
        *model_routes(core),
        *repository_routes(core, pools, most_bytes),
        *memory_routes(regions, pools, most_bytes),
    ]
