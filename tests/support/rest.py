"""REST routes without a server around them, and requests to them, with a socket or without."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
from tests.support.waiting import PATIENCE_S

from conch.core.errors import ConchError
from conch.core.model_control import IndexEntry, LoadParameter
from conch.core.registry import Entry, Registry, VersionState
from conch.core.request import InferenceRequest
from conch.core.server_state import ServerState
from conch.door.local_door import LocalDoor
from conch.door.operation_handlers import Services
from conch.frontends.connections.byte_stream import ByteStream
from conch.frontends.http.flow_control import ListenerState
from conch.frontends.http.http_connection import Connection, Handler
from conch.frontends.http.http_loop import HttpLoop
from conch.frontends.http.http_pools import Pools
from conch.ipc.loop import SharedLoop
from conch.memory.regions import Regions
from conch.observability.logging.log_settings import LogControl, LogOptions
from conch.observability.tracing.trace_settings import TraceSettings


class Agent:
    """A control plane that only notes what it is asked.

    Attributes:
        asked: Calls, in order.
        listing: Contents of the index.
        error: Raised by loads and unloads.
        hold: Called by loads and the index.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.listing: list[IndexEntry] = []
        self.error: ConchError | None = None
        self.hold: Callable[[], object] = lambda: None

    def index(self, ready_only: bool) -> list[IndexEntry]:
        """Returns the listing of the test."""
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

    def set_label(self, name: str, label: str, version: int | None) -> None:
        """Notes a label."""
        self.asked.append(("set_label", name, label, version))
        if self.error is not None:
            raise self.error


def make_core(
    agent: Agent,
    *models: Any,
    ready: Callable[[], bool] = lambda: True,
    bind: Callable[[InferenceRequest], None] | None = None,
) -> ServerState:
    """A running server with these models, each a stand-in with a spec and whatever else is asked of it."""
    registry = Registry()
    by_name: dict[str, dict[int, Any]] = {}
    for model in models:
        by_name.setdefault(model.spec.name, {})[model.spec.version] = model
    for name, versions in by_name.items():
        registry.publish(name, Entry(versions, {version: VersionState("READY") for version in versions}))
    core = ServerState(registry, agent, "triton", "1.2.3", ready, bind=bind)
    core.started()
    return core


@contextmanager
def door_to(core: ServerState, services: Services | None = None) -> Iterator[LocalDoor]:
    """The door of a server, closed after the block."""
    door = LocalDoor(core, services or Services(Regions(), LogControl(LogOptions(), None), TraceSettings()))
    try:
        yield door
    finally:
        assert door.close(lambda: PATIENCE_S)


@contextmanager
def pools() -> Iterator[Pools]:
    """Pools, closed after the block."""
    made = Pools()
    try:
        yield made
    finally:
        assert made.close(lambda: 30.0)


class Rest:
    """Requests to a handler, each over a connection of its own.

    Args:
        handler: Answers them.
    """

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

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
        thread = HttpLoop(SharedLoop("test-loop"))
        try:
            listener = thread.listen(self.handler, "127.0.0.1", 0)
            base = f"http://127.0.0.1:{listener.port}"
            async with httpx.AsyncClient(base_url=base, verify=False) as client:
                return await client.request(method, path, content=content, headers=headers)
        finally:
            await asyncio.to_thread(listener.close, 0.0)
            await asyncio.to_thread(thread.stop)


class Wire(ByteStream):
    """A connection without a socket: the test is client and network.

    Args:
        handler: Answers the requests.
        loop: The event loop; None for the one that runs.
        reads: Number of writes after which the client reads no more, but for `read`.

    Attributes:
        written: Everything that the server has written, in pieces.
        reading: True if the server reads.
    """

    # Without a socket there is nothing of the base class to set up.
    def __init__(self, handler: Handler, loop: Any = None, reads: float = float("inf")) -> None:
        self.certificate_names = ()
        self.unsent = 0
        self.written: list[bytes] = []
        self.reading = True
        self._reads = reads
        self._hung_up = False
        self._listener = ListenerState(asyncio.get_running_loop() if loop is None else loop, False, 1)
        self._connection = Connection(handler, self._listener, lambda taker: self, "127.0.0.1:1")
        self._connection.opened()

    def send(self, data: bytes) -> None:
        """Sends bytes to the server."""
        self._connection.received(data)

    def read(self) -> None:
        """Reads one more of the server's writes."""
        self._reads += 1
        self._connection.resume_writing()

    def hang_up(self) -> None:
        """Closes the connection."""
        self._hung_up = True
        self._connection.closed()

    async def ended(self) -> None:
        """Waits for the tasks of the connection."""
        await asyncio.gather(*self._listener.tasks, return_exceptions=True)

    # See `ByteStream`.

    def write(self, *data: Any) -> None:
        for each in data:
            if self._hung_up:
                return
            self.written.append(bytes(each))
            self._reads -= 1
            if self._reads <= 0:
                self._connection.pause_writing()

    @property
    def closing(self) -> bool:
        return self._hung_up

    def close(self) -> None:
        self._hung_up = True

    def abort(self) -> None:
        self._hung_up = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True
