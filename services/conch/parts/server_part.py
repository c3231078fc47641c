"""`ServerPart`: a port, or another part of a server with a life of its own.

Parts have one order (`in_order`), in which stages that do not run at once call them, and the table of ports
lists them: first the ports for requests to models (`for_clients`), which are gRPC, HTTP and those of
platforms; then metrics, the control port and other parts of add-ons, such as the console.

The server checks, starts and stops all parts in stages:

1. ``check`` before models are loaded, so that a taken address is found at once
2. ``start``: before the models are loaded for parts that show their loads (``before_models``), and with
   `listen_while_loading` for all parts; for the others after ``check_models``, which is left out if the
   repositories can't be read and the server goes on without models
3. at the stop: ``refuse_changes``; ``drain`` and ``disconnect``, each for all parts at once; ``flush``; the
   models are unloaded; ``close``

An add-on brings parts by the entry-point group ``conch.parts``: a function of its `AddOnOptions` and the
`PartContext` that returns them. It is called only if its settings turn the add-on on.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from conch.access.access_guard import Access
from conch.core.backend import FindBackend
from conch.core.custom_metrics import CustomFamilies
from conch.core.response_cache.cache_service import CacheService
from conch.core.server_state import ServerState
from conch.door.local_door import LocalDoor
from conch.frontends.http.chat_route import ChatRoute
from conch.frontends.http.http_connection import Handler
from conch.frontends.http.http_loop import HttpLoop
from conch.frontends.http.http_pools import Pools
from conch.frontends.load_reports import LoadReports
from conch.memory.regions import Regions
from conch.observability.logging.log_settings import LogControl
from conch.observability.metrics.exemplars import Exemplars
from conch.observability.metrics.load_meter import LoadMeter
from conch.observability.metrics.metric_families import Family
from conch.observability.metrics.server_metrics import FrontProcess
from conch.observability.tracing.open_tracing import Tracing
from conch.observability.tracing.trace_ring import TraceRing
from conch.process.endpoint import Endpoint, listening, local_address
from conch.process.forked_sockets import ListeningAddresses
from conch.process.start_diagnostics import Address, check_free
from conch_control.control_options import ControlOptions
from conch_control.lifecycle.agent import Agent

if TYPE_CHECKING:
    from conch.fronts.http_fronts import HttpFronts

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ports:
    """The parts, and what those that listen share.

    Attributes:
        parts: All parts of the server, in their order.
        loop: The event loop that HTTP ports share.
        addresses: The addresses that the server listens on, which forks close.
        reports: Load reports for clients.
        metrics: Handler of ``GET /metrics`` for other ports; None without metrics.
        http_fronts: Have the connections of HTTP ports for clients; None without front processes.
    """

    parts: Sequence[ServerPart]
    loop: HttpLoop
    addresses: ListeningAddresses
    reports: LoadReports
    metrics: Handler | None = None
    http_fronts: HttpFronts | None = None

    def endpoints(self) -> list[Endpoint]:
        """The open ports and sockets of all parts."""
        return [each for part in self.parts for each in part.endpoints()]

    def fronts(self) -> list[FrontProcess]:
        """The front processes of all parts."""
        return [each for part in self.parts for each in part.fronts()]

    def chat_route(self, pools: Pools, most_bytes: int) -> ChatRoute | None:
        """The chats of the part that has some; None without one. Called once all parts are made."""
        found = (part.chat_route(pools, most_bytes) for part in self.parts)
        return next(filter(None, found), None)

    def url(self, service: str) -> str:
        """The address of a service for clients on this machine; empty while it is not open."""
        return next((each.url for each in self.endpoints() if each.service == service), "")


@dataclass(frozen=True, slots=True)
class Observability:
    """Logs, traces and measurements of a server.

    Attributes:
        logs: The log settings.
        tracing: Tracing of requests.
        ring: The newest traces; None if no part keeps them.
        exemplars: Traces that metrics refer to.
        meter: Measures the load of models.
        families: Metrics that models define.
    """

    logs: LogControl
    tracing: Tracing
    ring: TraceRing | None
    exemplars: Exemplars
    meter: LoadMeter
    families: CustomFamilies


@dataclass(frozen=True, slots=True)
class Core:
    """The core itself, for parts that show or end it; front ends have the door.

    Attributes:
        state: The models and the stage of the server.
        cache: The response cache; None without one.
        regions: The shared memory of clients.
    """

    state: ServerState
    cache: CacheService | None
    regions: Regions


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """The control plane.

    Attributes:
        agent: Loads and unloads models.
        options: Its options.
        get_backend: Finds a backend by name.
    """

    agent: Agent
    options: ControlOptions
    get_backend: FindBackend


@dataclass(frozen=True, slots=True)
class PartContext:
    """Objects of one server, for its parts.

    Attributes:
        door: The way of front ends to the core.
        access: The access policy; None without one.
        ports: The parts, and what those that listen share.
        observability: Logs, traces and measurements.
        core: The core itself.
        control: The control plane.
    """

    door: LocalDoor
    access: Access | None
    ports: Ports
    observability: Observability
    core: Core
    control: ControlPlane


class ServerPart(ABC):
    """A part of a server.

    `drain` and `disconnect` run on threads of their own, the other methods on those that start and stop the
    server.

    Attributes:
        for_clients: True if it serves requests to models; such parts come first.
        before_models: True if it starts before the models are loaded.
    """

    for_clients: ClassVar[bool] = False
    before_models: ClassVar[bool] = False

    def check(self) -> None:
        """Checks that the part can start. Raises ConchError: an address is taken."""

    def check_models(self) -> None:
        """Checks the loaded models. Raises ConchError: the part can't serve them."""

    @abstractmethod
    def start(self) -> None:
        """Starts the part; a second call has no effect. Raises ConchError: it can't start."""

    def endpoints(self) -> Sequence[Endpoint]:
        """The open ports and sockets."""
        return ()

    def fronts(self) -> Sequence[FrontProcess]:
        """The front processes that have its connections."""
        return ()

    def families(self) -> Sequence[tuple[Family, list[str]]]:
        """Its metrics and their samples."""
        return ()

    def chat_route(self, pools: Pools, most_bytes: int) -> ChatRoute | None:
        """Chats with models, for the page of another part, on that part's event loop.

        Args:
            pools: Threads of the other part.
            most_bytes: Largest body.

        Returns:
            None if this part has no chats.
        """
        return None

    def refuse_changes(self) -> None:
        """Refuses loads and unloads from now on, as the server stops."""

    def drain(self, grace_s: float) -> bool:
        """Refuses new clients and waits for requests in flight; True if all ended in time."""
        return True

    def disconnect(self, grace_s: float) -> bool:
        """Closes connections of clients, once no part has requests; True if all ended in time."""
        return True

    def flush(self, grace_s: float) -> None:
        """Sends what the part has collected, before the models are unloaded."""

    def close(self, grace_s: float) -> bool:
        """Ends what is left, once the models are unloaded; True if all work ended in time.

        Also called for parts that have not been started.
        """
        return True


def in_order(parts: Iterable[ServerPart]) -> list[ServerPart]:
    """The parts with those for clients first, else in the order given."""
    return sorted(parts, key=lambda part: not part.for_clients)


class Port(ServerPart):
    """A part that listens on one address.

    Args:
        options: Its options, with the address.
        context: The server's objects for its parts.
        security: Its protection, such as ``TLS``, for the table of ports.
        scheme: Beginning of its URL; empty for gRPC.

    Attributes:
        title: Its name in the table of ports.
        service: Its name in Triton's line of a started service, which scripts wait for; empty for no line.
        port: The port in use; None while it is not open.
    """

    title: str = ""
    service: str = ""

    def __init__(self, options: Address, context: PartContext, security: str, scheme: str = "") -> None:
        self._address = options
        self._addresses = context.ports.addresses
        self._security = security
        self._scheme = scheme
        self.port: int | None = None

    def check(self) -> None:
        """Checks that the address is free. Raises UnavailableError: it is not, or is unknown."""
        check_free(self._address)

    def start(self) -> None:
        """Listens, unless it does already. Raises UnavailableError: the address or TLS can't be used."""
        if self.port is not None:
            return
        self.port = self.listen()
        target = self._address.target
        self._addresses.add(target, self.port)
        if self.service:
            at = target if self._is_unix else listening(target, self.port)
            log.info("Started %s at %s", self.service, at)

    @abstractmethod
    def listen(self) -> int:
        """Listens; returns the port in use. Raises UnavailableError: the address or TLS can't be used."""

    def endpoints(self) -> Sequence[Endpoint]:
        """The port, once it is open."""
        if self.port is None:
            return ()
        target = self._address.target
        if self._is_unix:
            return [Endpoint(self.title, target, target, self._security, self.port)]
        url = f"{self._scheme}{local_address(self._address.address, self.port)}"
        return [Endpoint(self.title, url, listening(target, self.port), self._security, self.port)]

    @property
    def _is_unix(self) -> bool:
        return self._address.target.startswith("unix:")
