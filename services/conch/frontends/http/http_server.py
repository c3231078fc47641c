"""The REST front end: composition, start and stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from conch.access.access_guard import Access, AccessGuard, PortRules
from conch.core.admission import ExitingError
from conch.core.clock import Clock, monotonic_ns
from conch.core.process_setup import HTTP_SHARES, most_descriptors
from conch.door.door import Door
from conch.door.operation_table import INFER, path_pattern
from conch.frontends.http.cors import CrossOriginInference
from conch.frontends.http.http_connection import Handler
from conch.frontends.http.http_exchange import HttpExchange
from conch.frontends.http.http_loop import HttpLoop
from conch.frontends.http.http_options import HttpOptions, HttpTls
from conch.frontends.http.http_pools import Pools
from conch.frontends.http.http_routing import RefusalLog, RouteTable, respond_not_found, route
from conch.frontends.http.infer.infer_route import InferRoute
from conch.frontends.http.json_body import error_reply
from conch.frontends.http.route_provider import Answering, RestApi
from conch.frontends.http.routes.api_routes import api_routes
from conch.frontends.http.timeouts import ClientTimeouts
from conch.frontends.load_reports import LoadReports

_QUIET_S = 0.05
_LONGEST_WAIT_FOR_QUIET_S = 0.5


class PortListener(Protocol):
    """A listening port; see `http_loop.HttpListener`."""

    port: int

    def finish_begun(self, handler: Handler, grace_s: float) -> bool:
        """See `HttpListener.finish_begun`."""

    def close(self, grace_s: float) -> bool:
        """See `HttpListener.close`."""


class ListeningFronts(Protocol):
    """Front processes, which may have the connections of a port."""

    def listen(
        self,
        handler: Handler,
        host: str,
        port: int,
        tls: HttpTls | None,
        reuse_port: bool,
        idle_s: float,
        most_connections: int,
        infer_bytes: int | None,
    ) -> PortListener:
        """Listens on an address; the rest is as in `HttpLoop.listen`.

        Fronts decode infer requests with `infer_bytes`, the largest JSON or decompressed body.
        """


class HttpFrontEnd:
    """Serves REST on one port; the loop may be shared with other listeners."""

    def __init__(
        self,
        door: Door,
        options: HttpOptions,
        loop: HttpLoop,
        reports: LoadReports,
        clock: Clock = monotonic_ns,
        metrics: Handler | None = None,
        access: Access | None = None,
        fronts: ListeningFronts | None = None,
        console_url: Callable[[], str] = str,
    ) -> None:
        self._fronts = fronts
        self._options = options
        self._providers = (*filter(None, [options.platform]), *options.further)
        self._door = door
        platform = options.platform
        self._loop = loop
        # Headers are read as Latin-1.
        keys = {
            category: (key, value.encode().decode("latin-1"))
            for category, (key, value) in options.restrictions.items()
        }
        rules = PortRules(
            keys,
            "This API is restricted, expecting header '{key}'",
            options.allow_model_upload or options.mutual,
        )
        guard = AccessGuard(access, "http", rules)
        self._pools = Pools()
        self._admission = door.admission("http")
        most_bytes = options.max_input_bytes
        infer = InferRoute(
            door,
            loop,
            self._pools.parsing,
            clock,
            most_bytes,
            options.header_forward_pattern,
            self._admission,
        )
        routes = [
            route(path_pattern(INFER.paths[0]), [INFER.http_method], INFER.access, infer),
            *api_routes(door, self._pools, most_bytes, clock, self._admission, guard, console_url),
        ]
        refusals = RefusalLog(self._admission, clock)
        cors = CrossOriginInference(options.cors_origins) if options.cors_origins else None
        api = RestApi(
            door,
            self._pools,
            self._rest,
            infer,
            guard,
            refusals,
            most_bytes,
            self._admission,
            clock,
            access,
            cors,
            metrics,
            unmatched=respond_not_found,
        )
        for provider in reversed(options.further):
            api = replace(api, unmatched=provider.bind(api))
        self._table = RouteTable(
            routes, guard, refusals, cors, api.unmatched, reports, labels=door.models.labels
        )
        self._handler: Handler = self._table if platform is None else platform.bind(api)
        self._listener: PortListener | None = None

    def _rest(self, exchange: HttpExchange) -> Answering:
        return self._table(exchange)

    def check(self) -> None:
        """Checks the loaded models. Raises InvalidArgumentError: the port's provider can't serve them."""
        for provider in self._providers:
            provider.check(self._door)

    def start(self) -> int:
        """Starts listening.

        Returns:
            The port in use.

        Raises:
            UnavailableError: The address or the certificates can't be used.
        """
        options = self._options
        address = options.address.strip("[]"), options.port
        most = options.max_connections or most_descriptors(HTTP_SHARES)
        if self._fronts is not None:
            infer_bytes = options.max_input_bytes if options.platform is None else None
            self._listener = self._fronts.listen(
                self._handler,
                *address,
                options.tls,
                options.reuse_port,
                options.idle_timeout_s,
                most,
                infer_bytes,
            )
            return self._listener.port
        tls = None if options.tls is None else options.tls.context()
        timeouts = ClientTimeouts(idle_s=options.idle_timeout_s)
        self._listener = self._loop.listen(self._handler, *address, tls, options.reuse_port, timeouts, most)
        return self._listener.port

    def finish_begun(self, grace_s: float) -> bool:
        """Refuses new connections; returns whether the requests in flight ended in time.

        Open connections are served on until `stop`, so that clients that keep theirs see no failure while the
        server waits for others.
        """
        return self._listener is None or self._listener.finish_begun(self._refuse_exiting, grace_s)

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

    def _refuse_exiting(self, exchange: HttpExchange) -> None:
        """Answers requests of connections that are opened while the server stops."""
        error = ExitingError("Server exiting")
        reply = error_reply(error)
        for provider in self._providers:
            reply = provider.refusal(exchange.path, error) or reply
        exchange.respond(*reply)
