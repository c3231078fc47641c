"""The options of the gRPC port as arguments of gRPC's C core."""

from __future__ import annotations

from conch.core.clock import Clock
from conch.core.process_setup import GRPC_SHARES, most_descriptors
from conch.frontends.grpc.adapter.grpc_server import ChannelArguments, Server
from conch.frontends.grpc.grpc_options import GrpcOptions

_HANDSHAKE_MS = 10_000


def grpcio_server(options: GrpcOptions, clock: Clock) -> Server:
    """Makes the server of a port."""
    most = options.limits.metadata_bytes
    return Server(channel_arguments(options), options.pollers, clock, max_metadata_bytes=most)


def channel_arguments(options: GrpcOptions) -> ChannelArguments:
    """Converts the options to arguments of gRPC's C core."""
    keep = options.keep_alive
    limits = options.limits
    arguments: list[tuple[str, int | str]] = [
        ("grpc.so_reuseport", int(options.reuse_port)),
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_allowed_incoming_connections", limits.connections or most_descriptors(GRPC_SHARES)),
        # Connections that never send HTTP/2's preface, or never finish TLS's handshake, leave their places.
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.max_concurrent_streams", limits.streams),
        # From the first size on, the C core refuses calls at random.
        ("grpc.max_metadata_size", limits.metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.metadata_bytes),
        ("grpc.keepalive_time_ms", keep.time_ms),
        ("grpc.keepalive_timeout_ms", keep.timeout_ms),
        ("grpc.keepalive_permit_without_calls", int(keep.permit_without_calls)),
        ("grpc.http2.max_pings_without_data", keep.max_pings_without_data),
        (
            "grpc.http2.min_recv_ping_interval_without_data_ms",
            keep.min_recv_ping_interval_without_data_ms,
        ),
        ("grpc.http2.max_ping_strikes", keep.max_ping_strikes),
    ]
    if options.max_connection_age_ms:
        arguments.append(("grpc.max_connection_age_ms", options.max_connection_age_ms))
    if options.max_connection_age_grace_ms:
        arguments.append(("grpc.max_connection_age_grace_ms", options.max_connection_age_grace_ms))
    return arguments
