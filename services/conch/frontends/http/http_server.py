"""The REST front end: options, composition, start and stop."""

from __future__ import annotations

import ssl
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from conch.access.access_guard import Access
from conch.core.admission import ExitingError
from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import UnavailableError
from conch.core.process_setup import HTTP_SHARES, most_descriptors
from conch.core.server_state import ServerState
from conch.frontends.access_policy import Restrictions, UploadRule
from conch.frontends.http.cors import CrossOriginInference
from conch.frontends.http.guarded_routes import guard_routes
from conch.frontends.http.http_connection import Handler
from conch.frontends.http.http_exchange import HttpExchange
from conch.frontends.http.http_loop import Listener, LoopThread
from conch.frontends.http.http_pools import Pools
from conch.frontends.http.http_routing import RefusalLog, RouteTable, route
from conch.frontends.http.infer.infer_route import InferRoute
from conch.frontends.http.json_body import error_reply
from conch.frontends.http.route_provider import RestApi, RouteProvider
from conch.frontends.http.routes.api_routes import api_routes
from conch.frontends.http.timeouts import ClientTimeouts
from conch.frontends.load_reports import LoadReports
from conch.frontends.operations.operation_handlers import Services
from conch.frontends.operations.operation_table import INFER, path_pattern

_QUIET_S = 0.05
_LONGEST_WAIT_FOR_QUIET_S = 0.5


@dataclass(frozen=True, slots=True)
class HttpTls:
    """TLS of the REST port, by PEM files.

    Attributes:
        certificate: The server's certificate chain.
        private_key: The server's key.
        client_root: Root certificates for clients; None does not ask clients for a certificate.
    """

    certificate: Path
    private_key: Path
    client_root: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Loads the files into a TLS context. Raises UnavailableError: one can't be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.private_key)
            if self.client_root is not None:
                context.load_verify_locations(self.client_root)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:  # includes `ssl.SSLError`
            raise UnavailableError(f"the TLS key or certificate can't be used: {error}") from None
        return context


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Settings of the REST front end.

    Attributes:
        address: Host to listen on.
        port: Port to listen on; 0 for any free one.
        reuse_port: Whether other processes may listen on the same port.
        tls: TLS, or None for plain text.
        max_input_bytes: Largest JSON, raw or decompressed body.
        max_connections: How many connections there may be; 0 for a share of the file descriptors.
        idle_timeout_s: Seconds after which an unused connection is closed.
        restrictions: Categories of routes that need a secret.
        header_forward_pattern: Which headers become request parameters; empty for none.
        allow_model_upload: Whether clients of other machines may load models of files that they bring.
        cors_origins: Origins whose web pages may run models; `ANY_ORIGIN` for any.
        platform: Adds its routes to those of REST; None for REST alone.
    """

    address: str = "0.0.0.0"
    port: int = 8000
    reuse_port: bool = False
    tls: HttpTls | None = None
    max_input_bytes: int = 64 << 20
    max_connections: int = 0
    idle_timeout_s: float = 300.0
    restrictions: Restrictions = field(default_factory=dict)
    header_forward_pattern: str = ""
    allow_model_upload: bool = False
    cors_origins: frozenset[str] = frozenset()
    platform: RouteProvider | None = None

    @property
    def title(self) -> str:
        """Name of the service, for people."""
        return "HTTP" if self.platform is None else self.platform.title

    @property
    def mutual(self) -> bool:
        """Whether clients must have a certificate."""
        return self.tls is not None and self.tls.client_root is not None

    @property
    def target(self) -> str:
        """The address as Triton writes it."""
        host = (
            f"[{self.address}]" if ":" in self.address and not self.address.startswith("[") else self.address
        )
        return f"{host}:{self.port}"


class HttpFrontEnd:
    """Serves REST on one port; the event loop thread may be shared with other listeners."""

    def __init__(
        self,
        core: ServerState,
        options: HttpOptions,
        thread: LoopThread,
        services: Services,
        reports: LoadReports,
        clock: Clock = monotonic_ns,
        metrics: Handler | None = None,
        access: Access | None = None,
    ) -> None:
        self._options = options
        self._core = core
        platform = options.platform
        self._thread = thread
        guard = None if access is None else access.guard("http")
        self._pools = Pools()
        self._admission = core.admission("http")
        most_bytes = options.max_input_bytes
        infer = InferRoute(
            core,
            thread,
            self._pools.parsing,
            services.regions,
            clock,
            most_bytes,
            options.header_forward_pattern,
            self._admission,
        )
        identified = options.mutual or "model-repository" in options.restrictions or guard is not None
        uploads = UploadRule(options.allow_model_upload or identified)
        routes = [
            route(path_pattern(INFER.paths[0]), [INFER.http_method], INFER.access, infer),
            *api_routes(core, services, self._pools, most_bytes, clock, self._admission, uploads, guard),
        ]
        refusals = RefusalLog(core, clock)
        if guard is not None:
            routes = guard_routes(routes, guard, refusals)
        table = RouteTable(
            routes,
            options.restrictions,
            refusals,
            CrossOriginInference(options.cors_origins) if options.cors_origins else None,
            reports=reports,
        )
        self._handler: Handler = table
        if platform is not None:
            rules = options.restrictions, refusals
            self._handler = platform.bind(
                RestApi(core, services, self._pools, table, infer, *rules, most_bytes, metrics)
            )
        self._listener: Listener | None = None

    def check(self) -> None:
        """Checks the loaded models. Raises InvalidArgumentError: the port's provider can't serve them."""
        if self._options.platform is not None:
            self._options.platform.check(self._core)

    def start(self) -> int:
        """Starts listening.

        Returns:
            The port in use.

        Raises:
            UnavailableError: The address or the certificates can't be used.
        """
        options = self._options
        tls = None if options.tls is None else options.tls.context()
        self._listener = self._thread.listen(
            self._handler,
            options.address.strip("[]"),
            options.port,
            tls,
            options.reuse_port,
            ClientTimeouts(idle_s=options.idle_timeout_s),
            options.max_connections or most_descriptors(HTTP_SHARES),
        )
        return self._listener.port

    def finish_begun(self, grace_s: float) -> bool:
        """Refuses new connections; returns whether the requests in flight ended in time.

        Open connections are served on until `stop`, so that clients that keep theirs see no failure while the
        server waits for others.
        """
        return self._listener is None or self._listener.finish_begun(_refuse_exiting, grace_s)

    def stop(self, grace_s: float) -> bool:
        """Refuses new requests, waits up to `grace_s` seconds for those in flight, and closes.

        Returns:
            True if all work ended.
        """
        end = time.monotonic() + grace_s
        ended = True
        if self._listener is not None:
            self._refuse(min(grace_s, _LONGEST_WAIT_FOR_QUIET_S))
            ended = self._listener.close(max(end - time.monotonic(), 0.0))
        # Blocked storage can outlast the request.
        return self._pools.close(lambda: max(end - time.monotonic(), 0.0)) and ended

    def _refuse(self, timeout_s: float) -> None:
        """Refuses requests until none arrive: a request sent to a closed connection would be lost."""
        admission = self._admission
        admission.close()
        never = threading.Event()
        end = time.monotonic() + timeout_s
        refused = -1
        while refused != admission.refused and time.monotonic() < end:
            refused = admission.refused
            never.wait(_QUIET_S)


def _refuse_exiting(exchange: HttpExchange) -> None:
    """Answers requests of connections that are opened while the server stops."""
    exchange.respond(*error_reply(ExitingError("Server exiting")))
