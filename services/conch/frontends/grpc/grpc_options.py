"""Options of the gRPC port.

Imports little: `conch config` and `conch health` read settings without gRPC. What checks a value is imported
where one is given.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from conch.settings.option import FlagError, Setting, Settings, nested, option
from conch.settings.option_checks import contents_of
from conch.settings.value_types import ANY_PORT, BOOL, FILE, NATURAL, POSITIVE, TEXT, integer

if TYPE_CHECKING:
    from conch.access.access_guard import Restrictions
    from conch.frontends.grpc.tls_options import TlsOptions

MAX_MESSAGE_BYTES = 2**31 - 1
"""The largest message gRPC can carry."""

OWN = "own"
"""conch's own transport."""

_CONNECTIONS = "gRPC connections"
_CLIENT_RATE = 1024


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """HTTP/2 keep-alive, with Triton's defaults; times in milliseconds."""

    GROUP: ClassVar = _CONNECTIONS

    time_ms: int = option(
        "--grpc-keepalive-time", POSITIVE, 7_200_000, "time between keep-alive pings", unit="milliseconds"
    )
    timeout_ms: int = option(
        "--grpc-keepalive-timeout",
        POSITIVE,
        20_000,
        "time to wait for a ping's answer",
        unit="milliseconds",
    )
    permit_without_calls: bool = option(
        "--grpc-keepalive-permit-without-calls", BOOL, False, "ping idle connections too"
    )
    max_pings_without_data: int = option(
        "--grpc-http2-max-pings-without-data", NATURAL, 2, "maximum pings without data in between"
    )
    min_recv_ping_interval_without_data_ms: int = option(
        "--grpc-http2-min-recv-ping-interval-without-data",
        NATURAL,
        300_000,
        "minimum time between a client's pings without data",
        unit="milliseconds",
    )
    max_ping_strikes: int = option(
        "--grpc-http2-max-ping-strikes", NATURAL, 2, "bad pings before a connection is closed"
    )


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits for clients.

    Attributes:
        connections: Connections to the port; 0 for a share of the file descriptors.
        streams: Open calls on a connection; further ones wait at the client.
        metadata_bytes: Size of a call's metadata, as HTTP/2 counts it.
        client_rate: Bytes a second, at least, of a message that is sent, or of answers that are read.
    """

    GROUP: ClassVar = "gRPC"

    connections: int = option(
        "--grpc-max-connections",
        NATURAL,
        0,
        "maximum connections to the gRPC port; idle ones make room for others; 0 for ten in 32 of the "
        "process's file descriptors (ulimit -n), less 64",
    )
    streams: int = option(
        "--grpc-max-concurrent-streams",
        integer(1, 2**31 - 1),
        1024,
        "maximum open calls on a gRPC connection; further ones wait at the client",
    )
    metadata_bytes: int = option(
        "--grpc-max-metadata-bytes",
        integer(1024, 2**24),
        16 * 1024,
        "maximum metadata of a gRPC call, 32 bytes for each entry included; larger calls are refused",
        unit="bytes",
    )
    client_rate: int = option(
        "--grpc-min-client-rate",
        NATURAL,
        _CLIENT_RATE,
        "bytes a second below which, for a minute, a call ends whose message a client sends or whose answers "
        "it reads; 0 for any; conch's own transport only",
        unit="bytes",
    )


@dataclass(frozen=True, slots=True)
class GrpcTlsFiles:
    """TLS of the gRPC port, as the flags give it: PEM files."""

    GROUP: ClassVar = "gRPC TLS"

    use_ssl: bool = option("--grpc-use-ssl", BOOL, False, "serve gRPC over TLS")
    mutual: bool = option("--grpc-use-ssl-mutual", BOOL, False, "require a certificate of gRPC clients too")
    certificate: Path | None = option(
        "--grpc-server-cert", FILE, None, "PEM file of the server's certificate"
    )
    private_key: Path | None = option("--grpc-server-key", FILE, None, "PEM file of the server's key")
    root: Path | None = option(
        "--grpc-root-cert", FILE, None, "PEM file of the root certificates for clients"
    )

    def read(self) -> TlsOptions | None:
        """The contents of the files; None without TLS. Raises FlagError: one is missing or can't be read."""
        from conch.frontends.grpc.tls_options import TlsOptions

        if not self.use_ssl and not self.mutual:
            return None
        return TlsOptions(
            private_key=contents_of(self, "private_key", "gRPC"),
            certificate=contents_of(self, "certificate", "gRPC"),
            client_root=contents_of(self, "root", "gRPC") if self.mutual else None,
        )


def _checked_pattern(pattern: str) -> str:
    from conch.frontends.header_forwarding import HeaderForwarder

    HeaderForwarder(pattern)
    return pattern


def _restrictions(specifications: list[str]) -> Restrictions:
    from conch.frontends.access_policy import parse_restricted_protocols

    return parse_restricted_protocols(specifications)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcOptions:
    """Options of the gRPC port.

    Attributes:
        address: Host to listen on, or ``unix:PATH``.
        port: Port to listen on; 0 for any free one.
        reuse_port: True if other processes may listen on the same port.
        transport: Implementation of the port: ``own`` or ``grpcio``.
        max_message_bytes: Largest message from a client.
        compression: gRPC algorithm for inference responses, or None.
        load_reports: True if inference calls end with a load report.
        header_forward_pattern: RE2 pattern of call metadata that become request parameters; empty for none.
        restrictions: Categories of RPCs that need a secret.
        tls: TLS, or None for plain text.
        max_connection_age_ms: Age at which connections are closed gracefully; 0 for never.
        max_connection_age_grace_ms: Time for calls on such a connection to finish; 0 for no limit.
        allow_model_upload: True if remote clients may load models from files in the request.
    """

    GROUP: ClassVar = "gRPC"
    SWITCH: ClassVar = Setting("--allow-grpc", BOOL, True, "serve gRPC")

    address: str = option("--grpc-address", TEXT, "0.0.0.0", "address for gRPC, or unix:PATH")
    port: int = option("--grpc-port", ANY_PORT, 8001, "port for gRPC; 0 for any free one")
    reuse_port: bool = option(
        "--reuse-grpc-port", BOOL, False, "let other processes listen on the gRPC port too"
    )
    transport: str = option(
        "--grpc-transport",
        TEXT,
        OWN,
        "HTTP/2 in conch itself, or grpcio's C core",
        choices=(OWN, "grpcio"),
    )
    max_message_bytes: int = option(
        "--grpc-max-message-bytes",
        integer(1, MAX_MESSAGE_BYTES),
        MAX_MESSAGE_BYTES,
        "maximum size of a gRPC message received",
        unit="bytes",
    )
    limits: ConnectionLimits = nested(ConnectionLimits)
    compression: str | None = option(
        "--grpc-infer-response-compression-level",
        TEXT,
        "none",
        "compression of inference responses",
        choices=("none", "low", "medium", "high"),
        # gRPC for Python has one gzip level, so Triton's three are the same here.
        convert=lambda level: None if level == "none" else "gzip",
    )
    load_reports: bool = option(
        "--grpc-orca-load-reports",
        BOOL,
        False,
        "end inference calls with an ORCA load report in their trailing metadata",
    )
    header_forward_pattern: str = option(
        "--grpc-header-forward-pattern",
        TEXT,
        "",
        "metadata keys forwarded as request parameters",
        convert=_checked_pattern,
    )
    restrictions: Restrictions = option(
        "--grpc-restricted-protocol",
        TEXT,
        help="<protocol,…>:<key>=<value>: protocols that need this metadata",
        repeatable=True,
        secret=re.compile(r"[^=]*="),
        convert=_restrictions,
    )
    tls: TlsOptions | None = None
    keep_alive: KeepAlive = nested(KeepAlive)
    max_connection_age_ms: int = option(
        "--grpc-max-connection-age",
        NATURAL,
        0,
        "age at which clients are asked to leave a connection, give or take a tenth; 0 for never; 30 minutes "
        "in Kubernetes",
        unit="milliseconds",
        group=_CONNECTIONS,
    )
    max_connection_age_grace_ms: int = option(
        "--grpc-max-connection-age-grace",
        NATURAL,
        0,
        "time that calls may go on after that; 0 for no limit",
        unit="milliseconds",
        group=_CONNECTIONS,
    )
    allow_model_upload: bool = option(
        "--allow-model-upload",
        BOOL,
        False,
        "accept loads that bring a model's files, and so code, from all clients; else only from clients with "
        "a key of the access policy or of a restricted API, with a client certificate, or over a Unix socket",
        group="model control",
    )

    @classmethod
    def from_settings(cls, settings: Settings) -> GrpcOptions | None:
        """The options; None if the port is off. Raises FlagError: a setting is wrong."""
        if not settings.is_on(cls):
            return None
        options = settings.build(cls)
        if options.transport != OWN and options.limits.client_rate != _CLIENT_RATE:
            raise FlagError("--grpc-min-client-rate needs --grpc-transport=own")
        return replace(options, tls=settings.build(GrpcTlsFiles).read())

    @property
    def mutual(self) -> bool:
        """True if clients must have a certificate."""
        return self.tls is not None and self.tls.client_root is not None

    def identifies(self, category: str) -> bool:
        """True if callers of a category have a client certificate or the category's key."""
        return self.mutual or category in self.restrictions

    @property
    def target(self) -> str:
        """The address as gRPC writes it."""
        if self.address.startswith("unix:"):
            return self.address
        host = (
            f"[{self.address}]" if ":" in self.address and not self.address.startswith("[") else self.address
        )
        return f"{host}:{self.port}"
