"""REST routes without a server around them, and requests to them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
from starlette.types import ASGIApp

from conch.core.errors import ConchError
from conch.core.model_control import IndexEntry, LoadParameter
from conch.core.registry import Entry, Registry, VersionState
from conch.core.server_state import ServerState
from conch.frontends.http.http_pools import Pools


class Agent:
    """A control plane that only notes what it is asked.

    Attributes:
        asked: Calls, in order.
        listing: What the index says.
        error: Raised by loads and unloads.
        hold: Called by loads and the index.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.listing: list[IndexEntry] = []
        self.error: ConchError | None = None
        self.hold: Callable[[], object] = lambda: None

    def index(self, ready_only: bool) -> list[IndexEntry]:
        """Says what it was told to."""
        self.asked.append(("index", ready_only))
        self.hold()
        return self.listing

    def load(self, name: str, parameters: Mapping[str, LoadParameter], may_upload: bool = True) -> None:
        """Notes a load."""
        self.asked.append(("load", name, dict(parameters)))
        self.hold()
        if self.error is not None:
            raise self.error

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Notes an unload."""
        self.asked.append(("unload", name, unload_dependents))
        if self.error is not None:
            raise self.error


def make_core(agent: Agent, *models: Any, ready: Callable[[], bool] = lambda: True) -> ServerState:
    """A running server with these models, each a stand-in with a spec and whatever else is asked of it."""
    registry = Registry()
    by_name: dict[str, dict[int, Any]] = {}
    for model in models:
        by_name.setdefault(model.spec.name, {})[model.spec.version] = model
    for name, versions in by_name.items():
        registry.publish(name, Entry(versions, {version: VersionState("READY") for version in versions}))
    core = ServerState(registry, agent, "triton", "1.2.3", ready)
    core.started()
    return core


@contextmanager
def pools() -> Iterator[Pools]:
    """Pools, closed after the block."""
    made = Pools()
    try:
        yield made
    finally:
        assert made.close(lambda: 30.0)


class Rest:
    """Requests to an application.

    Args:
        app: The application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    def __call__(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """The status, and the body as what its JSON says; None for an empty one."""
        response = asyncio.run(self.send(method, path, body, headers))
        return response.status_code, json.loads(response.content) if response.content else None

    async def send(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """The whole response."""
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://conch") as client:
            return await client.request(method, path, content=content, headers=headers)
