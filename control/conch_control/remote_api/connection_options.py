"""Settings of the control port and of connections to one."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field

from conch.core.errors import InvalidArgumentError

DEFAULT_PORT = 8003
"""Default port of servers and clients."""

DEFAULT_ADDRESS = "127.0.0.1"
"""Loopback, as access to the port means running code on the server."""

UNIX = "unix:"


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM contents for the control port; `client_root` to ask clients for certificates."""

    private_key: bytes = field(repr=False)
    certificate: bytes
    client_root: bytes | None = None


@dataclass(frozen=True, slots=True)
class ControlPortOptions:
    """Settings of the control port.

    Attributes:
        address: Host to listen on, or ``unix:PATH``.
        port: Port to listen on; ignored for a Unix socket.
        tls: TLS, or None for plain text.
        token: A token that callers must send; None for none.
        policy: Whether an access policy says who may call.
    """

    address: str = DEFAULT_ADDRESS
    port: int = DEFAULT_PORT
    tls: ServerTls | None = None
    token: str | None = field(default=None, repr=False)
    policy: bool = False

    @property
    def is_unix(self) -> bool:
        """True for a Unix socket."""
        return self.address.startswith(UNIX)

    @property
    def target(self) -> str:
        """The address in gRPC's form."""
        if self.is_unix:
            return self.address
        host = self.address
        return f"{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{self.port}"

    @property
    def mutual(self) -> bool:
        """True if clients need a certificate."""
        return self.tls is not None and self.tls.client_root is not None

    @property
    def security(self) -> str:
        """Protection of the port, for logs."""
        transport = "plain text" if self.tls is None else "mutual TLS" if self.mutual else "TLS"
        secrets = [name for name, there in (("token", self.token), ("access policy", self.policy)) if there]
        return ", ".join([transport, *secrets])

    def check(self) -> None:
        """Checks that the port is protected unless it is local.

        Raises:
            InvalidArgumentError: It is open to the network; the text names the remedies.
        """
        protected = self.token is not None or self.policy or self.mutual or self.is_unix
        if not protected and not is_loopback(self.address):
            raise InvalidArgumentError(
                f"the control port would let anyone who reaches {self.address} load models, and with them "
                "code: give --control-token-file or --access-policy, or --control-root-cert with "
                "--control-use-ssl to ask for client certificates, or listen on a loopback address or a Unix "
                "socket with --control-address"
            )


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM contents for a connection to a control port.

    Attributes:
        root: Root certificates of the server; None for the system's.
        server_name: Name in the server's certificate, if not the target's host.
    """

    root: bytes | None = None
    private_key: bytes | None = field(default=None, repr=False)
    certificate: bytes | None = None
    server_name: str | None = None


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Settings of a connection to a control port: ``HOST:PORT`` or ``unix:PATH``, TLS, bearer token."""

    target: str = f"{DEFAULT_ADDRESS}:{DEFAULT_PORT}"
    tls: ClientTls | None = None
    token: str | None = field(default=None, repr=False)


def is_loopback(host: str) -> bool:
    """True if a host is reachable only from this machine, by its address."""
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
    """The token in a token file. Raises InvalidArgumentError: it is empty, or unfit for gRPC metadata."""
    token = text.strip()
    if not token:
        raise InvalidArgumentError("the token is empty")
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise InvalidArgumentError("the token must be one line of printable ASCII characters without spaces")
    return token
