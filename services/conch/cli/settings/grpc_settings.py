"""Settings of the gRPC port."""

from __future__ import annotations

import re

from conch.cli.settings.setting import SettingGroup, optional, repeatable, setting
from conch.cli.settings.value_types import ANY_PORT, BOOL, FILE, NATURAL, POSITIVE, TEXT, integer

_MOST_INT = 2**31 - 1


class GrpcSettings(SettingGroup):
    """The port, its limits and its access rules."""

    title = "gRPC"
    allow_grpc = setting(BOOL, True, "serve gRPC")
    grpc_address = setting(TEXT, "0.0.0.0", "address for gRPC, or unix:PATH")
    grpc_port = setting(ANY_PORT, 8001, "port for gRPC; 0 for any free one")
    reuse_grpc_port = setting(BOOL, False, "let other processes listen on the gRPC port too")
    grpc_infer_thread_count = setting(integer(1, 128), 2, "threads that poll for gRPC requests")
    grpc_max_message_bytes = setting(
        integer(1, _MOST_INT), _MOST_INT, "maximum size of a gRPC message received", unit="bytes"
    )
    grpc_max_connections = setting(
        NATURAL,
        0,
        "maximum connections to the gRPC port; further ones are closed at once; 0 for three eighths of the "
        "process's file descriptors (ulimit -n)",
    )
    grpc_max_concurrent_streams = setting(
        integer(1, _MOST_INT),
        1024,
        "maximum open calls on a gRPC connection; further ones wait at the client",
    )
    grpc_max_metadata_bytes = setting(
        integer(1024, 2**24),
        16 * 1024,
        "maximum metadata of a gRPC call, 32 bytes for each entry included; larger calls are refused",
        unit="bytes",
    )
    grpc_infer_response_compression_level = setting(
        TEXT, "none", "compression of inference responses", choices=("none", "low", "medium", "high")
    )
    grpc_header_forward_pattern = setting(TEXT, "", "metadata keys forwarded as request parameters")
    grpc_restricted_protocol = repeatable(
        TEXT, "<protocol,…>:<key>=<value>: protocols that need this metadata", secret=re.compile(r"[^=]*=")
    )


class GrpcTlsSettings(SettingGroup):
    """TLS of the gRPC port."""

    title = "gRPC TLS"
    grpc_use_ssl = setting(BOOL, False, "serve gRPC over TLS")
    grpc_use_ssl_mutual = setting(BOOL, False, "require a certificate of gRPC clients too")
    grpc_server_cert = optional(FILE, "PEM file of the server's certificate")
    grpc_server_key = optional(FILE, "PEM file of the server's key")
    grpc_root_cert = optional(FILE, "PEM file of the root certificates for clients")


class GrpcKeepAliveSettings(SettingGroup):
    """Keep-alive and age of gRPC connections."""

    title = "gRPC connections"
    grpc_keepalive_time = setting(POSITIVE, 7_200_000, "time between keep-alive pings", unit="milliseconds")
    grpc_keepalive_timeout = setting(
        POSITIVE, 20_000, "time to wait for a ping's answer", unit="milliseconds"
    )
    grpc_keepalive_permit_without_calls = setting(BOOL, False, "ping idle connections too")
    grpc_http2_max_pings_without_data = setting(NATURAL, 2, "maximum pings without data in between")
    grpc_http2_min_recv_ping_interval_without_data = setting(
        NATURAL, 300_000, "minimum time between a client's pings without data", unit="milliseconds"
    )
    grpc_http2_max_ping_strikes = setting(NATURAL, 2, "bad pings before a connection is closed")
    grpc_max_connection_age = setting(
        NATURAL, 0, "age at which a connection is closed; 0 for never", unit="milliseconds"
    )
    grpc_max_connection_age_grace = setting(
        NATURAL, 0, "time that calls may go on after that; 0 for no limit", unit="milliseconds"
    )
