"""Front processes as a part of the server: they have the connections of ports for clients."""

from __future__ import annotations

from collections.abc import Sequence

from conch.core.errors import UnavailableError
from conch.frontends.grpc.grpc_front_end import Transport
from conch.frontends.grpc.grpc_options import GrpcOptions
from conch.fronts.decoded_requests import FrontDecoder, FrontEncoder
from conch.fronts.front_server import FrontServer
from conch.observability.metrics.metric_families import Family
from conch.observability.metrics.server_metrics import FrontProcess, front_families
from conch.parts.server_part import PartContext, ServerPart


class FrontsPart(ServerPart):
    """The front processes. They start with the gRPC port, whose certificates they need, or without one here.

    Args:
        count: Their number.
        options: Options of the gRPC port; None if it is off.
        context: The server's objects for its parts.

    Attributes:
        http: The HTTP ports whose connections they have.
    """

    for_clients = True

    def __init__(self, count: int, options: GrpcOptions | None, context: PartContext) -> None:
        options = GrpcOptions() if options is None else options
        self._server = FrontServer(count, options, context.ports.loop, context.door.held)
        self.http = self._server.http

    def transport(self) -> Transport:
        """Transport of the gRPC port: the front processes."""
        return Transport(self._server, FrontDecoder, FrontEncoder())

    def start(self) -> None:
        """Starts the processes, unless the gRPC port has. Raises UnavailableError: they do not serve."""
        try:
            self._server.start()
        except OSError as error:
            raise UnavailableError(str(error)) from None

    def fronts(self) -> Sequence[FrontProcess]:
        """The front processes."""
        return self._server.processes()

    def families(self) -> Sequence[tuple[Family, list[str]]]:
        """Metrics of the front processes."""
        return front_families(self.fronts())

    def close(self, grace_s: float) -> bool:
        """Ends the processes, which have no connections any more."""
        self._server.close()
        return True
