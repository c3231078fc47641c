"""Health: whether the server, or a model, is to be sent requests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from conch.core.server_core import ServerCore
from conch.frontends.http.pools import Pools, run_on
from conch.frontends.http.replies import empty_reply, text_error
from conch.frontends.http.routing import ApiRoute, route


def health_routes(core: ServerCore, pools: Pools) -> list[ApiRoute]:
    """The table."""

    async def answer(ask: Callable[[], bool]) -> bool:
        """Asks off the loop as long as any model checks itself."""
        return await run_on(pools.checks, ask) if any(core.readiness()) else ask()

    async def live(request: Request) -> Response:
        return empty_reply(200 if core.live else 400)

    async def ready(request: Request) -> Response:
        return empty_reply(200 if await answer(lambda: core.ready) else 400)

    async def model_ready(request: Request, model: str, version: str) -> Response:
        if await answer(partial(core.model_ready, model, version)):
            return empty_reply()
        return text_error("Model version not ready", 400)

    return [
        route("/v2/health/live", ["GET"], "health", live),
        route("/v2/health/ready", ["GET"], "health", ready),
        route(
            r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[0-9]+))?/ready",
            ["GET"],
            "health",
            model_ready,
        ),
    ]
