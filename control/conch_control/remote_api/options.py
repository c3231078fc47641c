"""Settings of the control port and of connections to one."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field

from conch.core.errors import InvalidArgumentError

DEFAULT_PORT = 8003
"""Where clients look for the control port if nothing else is said."""

DEFAULT_ADDRESS = "127.0.0.1"
"""Whoever reaches the port decides what code the server runs, so only this machine does unless asked for."""

UNIX = "unix:"


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM contents for the control port.

    Attributes:
        private_key: The server's key.
        certificate: The server's certificate chain.
        client_root: Root certificates for clients, which must then have one; None does not ask for any.
    """

    private_key: bytes = field(repr=False)
    certificate: bytes
    client_root: bytes | None = None


@dataclass(frozen=True, slots=True)
class ControlPortOptions:
    """Settings of the control port.

    Attributes:
        address: Host to listen on, or ``unix:PATH``.
        port: Port to listen on; without meaning for a Unix socket.
        tls: TLS, or None for plain text.
        token: What callers must show, or None.
    """

    address: str = DEFAULT_ADDRESS
    port: int = DEFAULT_PORT
    tls: ServerTls | None = None
    token: str | None = field(default=None, repr=False)

    @property
    def is_unix(self) -> bool:
        """Whether it is a Unix socket."""
        return self.address.startswith(UNIX)

    @property
    def target(self) -> str:
        """The address as gRPC writes it."""
        if self.is_unix:
            return self.address
        host = self.address
        return f"{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{self.port}"

    @property
    def mutual(self) -> bool:
        """Whether callers must have a certificate."""
        return self.tls is not None and self.tls.client_root is not None

    @property
    def security(self) -> str:
        """How it is protected, for people."""
        transport = "plain text" if self.tls is None else "mutual TLS" if self.mutual else "TLS"
        return transport if self.token is None else f"{transport}, token"

    def check(self) -> None:
        """Checks that not everybody who can reach the machine may load models.

        Raises:
            InvalidArgumentError: Everybody may; the text says what to do about it.
        """
        if self.token is None and not self.mutual and not self.is_unix and not is_loopback(self.address):
            raise InvalidArgumentError(
                f"the control port would let everybody who reaches {self.address} load models, and with them "
                "code: give --control-token-file, or --control-root-cert with --control-use-ssl to ask for "
                "client certificates, or listen on a loopback address or a Unix socket with --control-address"
            )


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM contents for a connection to a control port.

    Attributes:
        root: Root certificates for the server; None for those of the system.
        private_key: The client's key, or None.
        certificate: The client's certificate chain, or None.
        server_name: The name that the server's certificate must have, where it is not the target's host.
    """

    root: bytes | None = None
    private_key: bytes | None = field(default=None, repr=False)
    certificate: bytes | None = None
    server_name: str | None = None


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """How to reach a control port.

    Attributes:
        target: ``HOST:PORT`` or ``unix:PATH``.
        tls: TLS, or None for plain text.
        token: What to show, or None.
    """

    target: str = f"{DEFAULT_ADDRESS}:{DEFAULT_PORT}"
    tls: ClientTls | None = None
    token: str | None = field(default=None, repr=False)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host, as far as its name or address says."""
    host = host.removeprefix("[").removesuffix("]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)


def read_token(text: str) -> str:
    """The token in the contents of a token file.

    Raises:
        InvalidArgumentError: There is none, or gRPC metadata can't carry it.
    """
    token = text.strip()
    if not token:
        raise InvalidArgumentError("the token is empty")
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise InvalidArgumentError("the token must be one line of printable ASCII characters without spaces")
    return token
