"""Settings of the gRPC, HTTP, control and console ports."""

from __future__ import annotations

import re

from conch.cli.settings.setting import SettingGroup, optional, repeatable, setting
from conch.cli.settings.value_types import (
    ANY_PORT,
    BOOL,
    FILE,
    HTTP_THREADS,
    INPUT_SIZE,
    NATURAL,
    PORT,
    POSITIVE,
    TEXT,
    integer,
)

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
        "maximum connections to the gRPC port; further ones are closed at once; 0 for ten in 32 of the "
        "process's file descriptors (ulimit -n), less 64",
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
    grpc_orca_load_reports = setting(
        BOOL, False, "end inference calls with an ORCA load report in their trailing metadata"
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
        NATURAL,
        0,
        "age at which clients are asked to leave a connection, give or take a tenth; 0 for never; 30 minutes "
        "in Kubernetes",
        unit="milliseconds",
    )
    grpc_max_connection_age_grace = setting(
        NATURAL, 0, "time that calls may go on after that; 0 for no limit", unit="milliseconds"
    )


class HttpSettings(SettingGroup):
    """The port, its limits and its access rules."""

    title = "HTTP"
    allow_http = setting(BOOL, True, "serve REST")
    http_address = setting(TEXT, "0.0.0.0", "address for REST")
    http_port = setting(ANY_PORT, 8000, "port for REST; 0 for any free one")
    reuse_http_port = setting(BOOL, False, "let other processes listen on the REST port too")
    http_thread_count = setting(
        HTTP_THREADS, 8, "1, or Triton's default 8, which is taken for it: one thread serves all connections"
    )
    http_max_input_size = setting(
        INPUT_SIZE,
        64 << 20,
        "maximum size of a JSON, raw or decompressed body; binary tensors behind JSON do not count",
        unit="bytes",
    )
    http_max_connections = setting(
        NATURAL,
        0,
        "maximum connections to the HTTP port; further ones get 503; 0 for ten in 32 of the process's "
        "file descriptors (ulimit -n), less 64",
    )
    http_idle_timeout_secs = setting(
        POSITIVE, 300, "time after which an unused REST connection is closed", unit="seconds"
    )
    http_header_forward_pattern = setting(TEXT, "", "request headers forwarded as request parameters")
    http_restricted_api = repeatable(
        TEXT, "<API,…>:<key>=<value>: APIs that need this header", secret=re.compile(r"[^=]*=")
    )
    http_cors_origin = repeatable(
        TEXT,
        "origin whose web pages may run models over REST, such as https://app.example, or * for any; nothing "
        "else is open to them",
    )


class HttpTlsSettings(SettingGroup):
    """TLS of the HTTP port."""

    title = "HTTP TLS"
    http_use_ssl = setting(BOOL, False, "serve REST over TLS")
    http_server_cert = optional(FILE, "PEM file of the REST port's certificate")
    http_server_key = optional(FILE, "PEM file of the REST port's key")
    http_root_cert = optional(FILE, "PEM file of the root certificates that REST clients must have one from")


class AccessSettings(SettingGroup):
    """Who may call, on all ports."""

    title = "access"
    access_policy = optional(
        FILE,
        "TOML file with the principals that may call, on all ports, and their credentials, roles and limits; "
        "reread when it changes; see docs/access.md",
    )
    audit_log = optional(
        TEXT,
        "file to log refused calls and clients' changes to, or - for standard output; needs --access-policy",
    )


class ControlPortSettings(SettingGroup):
    """The port for conch models and conch control."""

    title = "control port"
    control_port = setting(PORT, 0, "port for conch models and conch control; 0 for none")
    control_address = setting(
        TEXT,
        "127.0.0.1",
        "address for the control port, or unix:PATH; its clients decide what code the server runs, so an "
        "address that other machines reach needs --control-token-file, --control-root-cert or "
        "--access-policy",
    )
    control_token_file = optional(FILE, "file with the token that clients of the control port must send")
    control_use_ssl = setting(BOOL, False, "serve the control port over TLS")
    control_server_cert = optional(FILE, "PEM file of the control port's certificate")
    control_server_key = optional(FILE, "PEM file of the control port's key")
    control_root_cert = optional(FILE, "PEM file of the root certificates that clients must have one from")


class ConsoleSettings(SettingGroup):
    """The web console."""

    title = "console"
    console_port = setting(PORT, 0, "port for the web console; 0 for none")
    console_address = setting(
        TEXT,
        "127.0.0.1",
        "address for the console; one that other machines reach needs --console-token-file, "
        "--console-root-cert or --access-policy",
    )
    console_host = repeatable(
        TEXT, "name that browsers reach the console by, besides addresses, localhost and --console-address"
    )
    console_token_file = optional(
        FILE, "file with a line 'viewer: TOKEN', a line 'admin: TOKEN', or both, which users log in with"
    )
    console_allow_control = setting(
        BOOL,
        False,
        "let admins, or principals with the role control, load and unload models, drain the server and "
        "change settings on the console",
    )
    console_allow_infer = setting(
        BOOL, False, "let admins, or principals with the role infer, send requests to models on the console"
    )
    console_use_ssl = setting(BOOL, False, "serve the console over TLS")
    console_server_cert = optional(FILE, "PEM file of the console's certificate")
    console_server_key = optional(FILE, "PEM file of the console's key")
    console_root_cert = optional(FILE, "PEM file of the root certificates that browsers must have one from")
