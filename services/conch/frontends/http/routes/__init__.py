"""The routes of the REST front end, all but infer."""

from __future__ import annotations

from conch.core.server_core import ServerCore
from conch.frontends.http.routing import ApiRoute


def api_routes(core: ServerCore) -> list[ApiRoute]:
    """All tables in one."""
    return []
