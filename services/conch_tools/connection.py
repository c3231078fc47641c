"""Address of a server's data port for commands: `--url` and the flags around it."""

from __future__ import annotations

import argparse
import os
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

DEFAULT_URL = "grpc://localhost:8001"
_URLS = "grpc[s]://HOST:PORT, http[s]://HOST:PORT or unix:PATH for gRPC"
_PORTS = {"grpc": 8001, "grpcs": 8001, "http": 8000, "https": 8000}


class UrlError(Exception):
    """A URL, or a flag that goes with it, is wrong."""


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS settings of a client.

    Attributes:
        root_cert: File of the authorities to trust; None for the machine's.
        client_cert: File of the client's certificate; None for none.
        client_key: File of its key.
        server_name: Name that the server's certificate must have; empty for the host's.
    """

    root_cert: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None
    server_name: str = ""

    def context(self, *protocols: str) -> ssl.SSLContext:
        """Raises OSError, ssl.SSLError: a file can't be read."""
        context = ssl.create_default_context(cafile=None if self.root_cert is None else str(self.root_cert))
        if self.client_cert is not None:
            context.load_cert_chain(self.client_cert, self.client_key)
        if protocols:
            context.set_alpn_protocols(list(protocols))
        return context


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A data port.

    Attributes:
        protocol: ``grpc`` or ``http``.
        host: Name or address; empty for a Unix socket.
        port: Its port.
        path: Path of a Unix socket; empty for none.
        headers: Sent with each request: HTTP headers, or gRPC metadata.
        tls: None for plain text.
    """

    protocol: str
    host: str
    port: int
    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    tls: Tls | None = None

    @property
    def authority(self) -> str:
        """As requests name it."""
        if self.path:
            return "localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The URL, without headers."""
        if self.path:
            return f"unix:{self.path}"
        return f"{self.protocol}{'s' if self.tls else ''}://{self.authority}"

    def connect(self, timeout_s: float) -> socket.socket:
        """A connected socket, with TLS if that is asked for.

        Raises:
            OSError: There is no server, or its certificate is wrong.
        """
        if self.path:
            plain = socket.socket(socket.AF_UNIX)
            plain.settimeout(timeout_s)
            try:
                plain.connect(self.path)
            except BaseException:
                plain.close()
                raise
            return plain
        plain = socket.create_connection((self.host, self.port), timeout_s)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.tls is None:
            return plain
        try:
            context = self.tls.context("h2" if self.protocol == "grpc" else "http/1.1")
            return context.wrap_socket(plain, server_hostname=self.tls.server_name or self.host)
        except BaseException:
            plain.close()
            raise


def add_connection_flags(
    parser: argparse.ArgumentParser,
    default: str = DEFAULT_URL,
    variable: str = "CONCH_URL",
    urls: str = _URLS,
) -> None:
    """Adds `--url` and the flags around it; the variable has another default."""
    group = parser.add_argument_group("connection")
    url = os.environ.get(variable) or default
    group.add_argument("-u", "--url", default=url, help=f"{urls} ({url}; variable {variable})")
    group.add_argument(
        "-H",
        "--header",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="header or metadata of each request; repeatable",
    )
    group.add_argument("--use-ssl", action="store_true", help="speak TLS; the flags below imply it")
    group.add_argument(
        "--root-cert", type=Path, metavar="FILE", help="certificates of authorities to trust (the machine's)"
    )
    group.add_argument("--client-cert", type=Path, metavar="FILE", help="certificate of the client")
    group.add_argument("--client-key", type=Path, metavar="FILE", help="its key")
    group.add_argument("--server-name", default="", metavar="NAME", help="name in the server's certificate")


def endpoint_of(options: argparse.Namespace) -> Endpoint:
    """The endpoint that flags name.

    Raises:
        UrlError: They are wrong.
    """
    headers = {}
    for pair in options.header:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise UrlError(f"--header takes NAME=VALUE, not '{pair}'")
        headers[name.strip().lower()] = value
    tls = Tls(options.root_cert, options.client_cert, options.client_key, options.server_name)
    if (tls.client_cert is None) is not (tls.client_key is None):
        raise UrlError("--client-cert and --client-key go together")
    endpoint = parse_url(options.url, headers, tls)
    if endpoint.tls is None and (options.use_ssl or tls != Tls()):
        if endpoint.path:
            raise UrlError("a Unix socket has no TLS: leave --use-ssl and the certificates out")
        endpoint = replace(endpoint, tls=tls)
    if endpoint.tls is not None:
        try:
            tls.context()
        except OSError as error:  # ssl.SSLError is one
            raise UrlError(f"the certificates can't be used: {error}") from None
    return endpoint


def parse_url(url: str, headers: Mapping[str, str] | None = None, tls: Tls | None = None) -> Endpoint:
    """Reads a URL.

    Args:
        url: ``grpc[s]://HOST[:PORT]``, ``http[s]://HOST[:PORT]``, ``unix:PATH``, or ``HOST:PORT`` for gRPC.
        headers: Sent with each request.
        tls: For a URL that asks for TLS.

    Raises:
        UrlError: It is none of these.
    """
    headers = headers or {}
    if url.startswith("unix:"):
        path = url.removeprefix("unix:").removeprefix("//")
        if not path:
            raise UrlError("unix: needs the path of a socket")
        return Endpoint("grpc", "", 0, path, headers)
    if "://" not in url:
        url = f"grpc://{url}"
    parts = urlsplit(url)
    if parts.scheme not in _PORTS:
        raise UrlError(f"a URL begins with grpc://, grpcs://, http://, https:// or unix:, unlike '{url}'")
    if parts.path not in ("", "/") or parts.query or parts.username:
        raise UrlError(f"a URL has a host and a port, and nothing else, unlike '{url}'")
    try:
        port = parts.port
    except ValueError:
        raise UrlError(f"the port of '{url}' is no number up to 65535") from None
    if not parts.hostname:
        raise UrlError(f"'{url}' has no host")
    secure = parts.scheme in ("grpcs", "https")
    return Endpoint(
        parts.scheme.removesuffix("s") if secure else parts.scheme,
        parts.hostname,
        _PORTS[parts.scheme] if port is None else port,
        "",
        headers,
        (tls or Tls()) if secure else None,
    )
