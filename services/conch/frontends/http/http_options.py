"""Options of the REST port and of other ports that speak HTTP.

Imports little: `conch config` and `conch health` read settings without HTTP. What checks a value is imported
where one is given.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from conch.core.errors import UnavailableError
from conch.settings.option import FlagError, Setting, Settings, flag_of, option
from conch.settings.option_checks import contents_of, refuse_without
from conch.settings.value_types import (
    ANY_PORT,
    BOOL,
    FILE,
    NATURAL,
    POSITIVE,
    TEXT,
    NoEffectError,
    ValueType,
    whole_number,
)

if TYPE_CHECKING:
    import ssl

    from conch.access.access_guard import Restrictions
    from conch.frontends.http.route_provider import RouteProvider

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^A-Z/?#@\s]+")


def _thread_count(text: str) -> int:
    value = whole_number(text)
    if value not in (1, 8):
        reason = "one thread serves all connections"
        raise NoEffectError(reason, f"{reason}, so {value} has no effect; leave it out")
    return value


HTTP_THREADS = ValueType("integer", _thread_count, "int | str")


def _input_size(text: str) -> int:
    value = whole_number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError("Error: --http-max-input-size must be greater than 0.")
    return value


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
        import ssl

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
class TlsFiles:
    """TLS of a port that speaks HTTP, as the flags give it: PEM files. Each port declares its own flags."""

    use_ssl: bool = False
    certificate: Path | None = None
    private_key: Path | None = None
    root: Path | None = None

    def checked(self, service: str) -> HttpTls | None:
        """The files, all of which can be read; None without TLS.

        Raises:
            FlagError: One is missing, can't be read or is for TLS, which is off.
        """
        if not self.use_ssl:
            refuse_without(self, flag_of(self, "use_ssl"), ("certificate", "private_key", "root"))
            return None
        contents_of(self, "certificate", service)
        contents_of(self, "private_key", service)
        if self.root is not None:
            contents_of(self, "root", service)
        assert self.certificate is not None and self.private_key is not None, "they have contents"
        return HttpTls(self.certificate, self.private_key, self.root)


def pem_option(flag: str, content: str) -> Any:
    """The setting of a PEM file with TLS."""
    return option(flag, FILE, None, f"PEM file of {content}")


@dataclass(frozen=True, slots=True)
class HttpTlsFiles(TlsFiles):
    """TLS of the REST port."""

    GROUP: ClassVar = "HTTP TLS"

    use_ssl: bool = option("--http-use-ssl", BOOL, False, "serve REST over TLS")
    certificate: Path | None = pem_option("--http-server-cert", "the REST port's certificate")
    private_key: Path | None = pem_option("--http-server-key", "the REST port's key")
    root: Path | None = pem_option(
        "--http-root-cert", "the root certificates that REST clients must have one from"
    )


@dataclass(frozen=True, slots=True)
class SharedTlsFiles(TlsFiles):
    """TLS of all ports, below the settings of their own: see `conch.settings.shared_tls`."""

    GROUP: ClassVar = "TLS of all ports"

    certificate: Path | None = pem_option(
        "--tls-cert",
        "the certificate with which all ports serve TLS, but those with a certificate of their own and those "
        "that do without by --http-use-ssl=false and the like; needs --tls-key",
    )
    private_key: Path | None = pem_option("--tls-key", "the key of --tls-cert")
    root: Path | None = pem_option(
        "--tls-client-ca",
        "the root certificates that clients of all ports with TLS must have one from, but those of ports "
        "with root certificates of their own; needs --tls-cert and --tls-key",
    )


def _checked_pattern(pattern: str) -> str:
    from conch.frontends.header_forwarding import HeaderForwarder

    HeaderForwarder(pattern)
    return pattern


def _restrictions(specifications: list[str]) -> Restrictions:
    from conch.frontends.access_policy import parse_restricted_apis

    return parse_restricted_apis(specifications)


def _origins(given: list[str]) -> frozenset[str]:
    from conch.frontends.http.cors import ANY_ORIGIN

    origins = frozenset(given)
    for origin in sorted(origins - {ANY_ORIGIN}):
        if not _ORIGIN.fullmatch(origin):
            raise FlagError(
                f"--http-cors-origin: '{origin}' is no origin as browsers write it: expected a scheme, a "
                f"host and perhaps a port in lower case, such as https://app.example, or {ANY_ORIGIN} for any"
            )
    return origins


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Options of the REST port.

    Attributes:
        address: Host to listen on.
        port: Port to listen on; 0 for any free one.
        reuse_port: True if other processes may listen on the same port.
        threads: Triton's number of threads, which has no effect.
        max_input_bytes: Largest JSON, raw or decompressed body.
        max_connections: Limit of connections; 0 for a share of the file descriptors.
        idle_timeout_s: Seconds after which an unused connection is closed.
        header_forward_pattern: RE2 pattern of headers that become request parameters; empty for none.
        restrictions: Categories of routes that need a secret.
        cors_origins: Origins whose web pages may run models; `ANY_ORIGIN` for any.
        tls: TLS, or None for plain text.
        allow_model_upload: True if remote clients may load models from files in the request.
        platform: Platform whose routes are served; None for REST alone.
        further: Serve paths that REST does not have, the first that has one.
    """

    GROUP: ClassVar = "HTTP"
    SWITCH: ClassVar = Setting("--allow-http", BOOL, True, "serve REST")

    address: str = option("--http-address", TEXT, "0.0.0.0", "address for REST")
    port: int = option("--http-port", ANY_PORT, 8000, "port for REST; 0 for any free one")
    reuse_port: bool = option(
        "--reuse-http-port", BOOL, False, "let other processes listen on the REST port too"
    )
    threads: int = option(
        "--http-thread-count",
        HTTP_THREADS,
        8,
        "1, or Triton's default 8, which is taken for it: one thread serves all connections",
    )
    max_input_bytes: int = option(
        "--http-max-input-size",
        ValueType("integer", _input_size, "int | str"),
        64 << 20,
        "maximum size of a JSON, raw or decompressed body; binary tensors behind JSON do not count",
        unit="bytes",
    )
    max_connections: int = option(
        "--http-max-connections",
        NATURAL,
        0,
        "maximum connections to the HTTP port; idle ones make room for others; 0 for ten in 32 of the "
        "process's file descriptors (ulimit -n), less 64",
    )
    idle_timeout_s: float = option(
        "--http-idle-timeout-secs",
        POSITIVE,
        300,
        "time after which an unused REST connection is closed",
        unit="seconds",
    )
    header_forward_pattern: str = option(
        "--http-header-forward-pattern",
        TEXT,
        "",
        "request headers forwarded as request parameters",
        convert=_checked_pattern,
    )
    restrictions: Restrictions = option(
        "--http-restricted-api",
        TEXT,
        help="<API,…>:<key>=<value>: APIs that need this header",
        repeatable=True,
        secret=re.compile(r"[^=]*="),
        convert=_restrictions,
    )
    cors_origins: frozenset[str] = option(
        "--http-cors-origin",
        TEXT,
        help="origin whose web pages may run models over REST, such as https://app.example, or * for any; "
        "nothing else is open to them",
        repeatable=True,
        convert=_origins,
    )
    tls: HttpTls | None = None
    allow_model_upload: bool = False
    platform: RouteProvider | None = None
    further: tuple[RouteProvider, ...] = ()

    @classmethod
    def from_settings(cls, settings: Settings) -> HttpOptions:
        """The options, with TLS if the port is on; those of platforms begin with them in any case.

        Raises:
            FlagError: A setting is wrong.
        """
        upload = settings["allow-model-upload"]
        options = replace(settings.build(cls), allow_model_upload=upload)
        if not settings.is_on(cls):
            return options
        return replace(options, tls=settings.build(HttpTlsFiles).checked("REST"))

    @property
    def title(self) -> str:
        """Name of the service, for people."""
        return "HTTP" if self.platform is None else self.platform.title

    @property
    def mutual(self) -> bool:
        """True if clients must have a certificate (mutual TLS)."""
        return self.tls is not None and self.tls.client_root is not None

    def identifies(self, category: str) -> bool:
        """True if callers of a category have a client certificate or the category's key."""
        return self.mutual or category in self.restrictions

    @property
    def target(self) -> str:
        """The address as Triton writes it."""
        host = (
            f"[{self.address}]" if ":" in self.address and not self.address.startswith("[") else self.address
        )
        return f"{host}:{self.port}"
