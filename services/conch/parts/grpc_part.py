"""The gRPC port as a part of the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from conch.frontends.grpc.grpc_front_end import GrpcFrontEnd, Transport
from conch.frontends.grpc.grpc_options import GrpcOptions
from conch.frontends.http.http_loop import LoopThread
from conch.observability.metrics.sample_text import Family
from conch.observability.metrics.server_metrics import FrontProcess, client_families, front_families
from conch.parts.server_part import PartContext, Port
from conch.process.endpoint import security

if TYPE_CHECKING:
    from conch.fronts.front_server import FrontServer
    from conch.fronts.http_fronts import HttpFronts


def _fronts(options: GrpcOptions, thread: LoopThread) -> tuple[FrontServer, Transport]:
    """Front processes; only servers that have some import their modules."""
    from conch.fronts.decoded_requests import FrontDecoder, FrontEncoder
    from conch.fronts.front_server import FrontServer

    server = FrontServer(options, thread)
    return server, Transport(server, FrontDecoder, FrontEncoder())


class GrpcPart(Port):
    """The gRPC port.

    Raises:
        IncompatibleGrpcError: The installed grpcio does not fit.
    """

    for_clients = True
    title = "gRPC"
    service = "GRPCInferenceService"

    def __init__(self, options: GrpcOptions, context: PartContext) -> None:
        super().__init__(options, context, security(options.tls))
        services = context.services
        self._fronts: FrontServer | None = None
        transport = None
        if options.front_ends:
            self._fronts, transport = _fronts(options, context.loop)
        self._front_end = GrpcFrontEnd(
            context.core,
            options,
            logs=services.logs,
            traces=services.traces,
            regions=services.regions,
            reports=context.reports,
            access=context.access,
            transport=transport,
        )

    @property
    def http_fronts(self) -> HttpFronts | None:
        """Front processes for the connections of HTTP ports; None without any."""
        return None if self._fronts is None else self._fronts.http

    def listen(self) -> int:
        """Starts the front end."""
        return self._front_end.start()

    def fronts(self) -> Sequence[FrontProcess]:
        """The front processes."""
        return () if self._fronts is None else self._fronts.processes()

    def families(self) -> Sequence[tuple[Family, list[str]]]:
        """What clients have caused, if the transport counts it; the front processes."""
        counts = self._front_end.client_counts
        found = [] if counts is None else client_families(*counts)
        return found if self._fronts is None else [*found, *front_families(self.fronts())]

    def drain(self, grace_s: float) -> bool:
        """Refuses new calls, lets those in flight end, and closes."""
        return self.port is None or self._front_end.stop(grace_s)

    def close(self, grace_s: float) -> bool:
        """Ends the front processes, which have no connections any more."""
        if self._fronts is not None:
            self._fronts.close()
        return True
