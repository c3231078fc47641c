"""The gRPC port as a part of the server."""

from __future__ import annotations

from collections.abc import Sequence

from conch.frontends.grpc.grpc_front_end import GrpcFrontEnd, Transport
from conch.frontends.grpc.grpc_options import GrpcOptions
from conch.observability.metrics.metric_families import Family
from conch.observability.metrics.server_metrics import client_families
from conch.parts.server_part import PartContext, Port
from conch.process.endpoint import security


class GrpcPart(Port):
    """The gRPC port.

    Args:
        options: Its options.
        context: The server's objects for its parts.
        transport: Transport of the port; None for the one that the options name.
    """

    for_clients = True
    title = "gRPC"
    service = "GRPCInferenceService"

    def __init__(
        self, options: GrpcOptions, context: PartContext, transport: Transport | None = None
    ) -> None:
        super().__init__(options, context, security(options.tls))
        self._front_end = GrpcFrontEnd(
            context.door,
            options,
            reports=context.ports.reports,
            access=context.access,
            transport=transport,
        )

    def listen(self) -> int:
        """Starts the front end."""
        return self._front_end.start()

    def families(self) -> Sequence[tuple[Family, list[str]]]:
        """Metrics of closed connections, ended calls and received bytes, if the transport counts them."""
        counts = self._front_end.client_counts
        return [] if counts is None else client_families(*counts)

    def drain(self, grace_s: float) -> bool:
        """Refuses new calls, lets those in flight end, and closes."""
        return self.port is None or self._front_end.stop(grace_s)
