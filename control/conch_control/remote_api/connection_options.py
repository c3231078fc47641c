"""Settings of the control port and of connections to one."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from conch.core.errors import InvalidArgumentError
from conch.settings.option import FlagError, flag_of, option
from conch.settings.option_checks import contents_of, refuse_without
from conch.settings.value_types import BOOL, FILE, PORT, TEXT

DEFAULT_PORT = 8003
"""Default port of servers and clients."""

DEFAULT_ADDRESS = "127.0.0.1"
"""Loopback, as access to the port means running code on the server."""

UNIX = "unix:"

_TLS_FILES = ("certificate", "private_key", "root")


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
        policy: True if an access policy decides about the callers.
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
class ControlPortFlags:
    """The control port, as the flags give it."""

    GROUP: ClassVar = "control port"

    port: int = option("--control-port", PORT, 0, "port for conch models and conch control; 0 for none")
    address: str = option(
        "--control-address",
        TEXT,
        DEFAULT_ADDRESS,
        "address for the control port, or unix:PATH; its clients decide what code the server runs, so an "
        "address that other machines reach needs --control-token-file, --control-root-cert or "
        "--access-policy",
    )
    token_file: Path | None = option(
        "--control-token-file", FILE, None, "file with the token that clients of the control port must send"
    )
    use_ssl: bool = option("--control-use-ssl", BOOL, False, "serve the control port over TLS")
    certificate: Path | None = option(
        "--control-server-cert", FILE, None, "PEM file of the control port's certificate"
    )
    private_key: Path | None = option(
        "--control-server-key", FILE, None, "PEM file of the control port's key"
    )
    root: Path | None = option(
        "--control-root-cert",
        FILE,
        None,
        "PEM file of the root certificates that clients must have one from",
    )

    def options(self, policy: bool) -> ControlPortOptions | None:
        """The options, None without a control port; `policy` is whether an access policy holds.

        Raises:
            FlagError: A flag is wrong, or has no effect.
        """
        if not self.port and not self.address.startswith(UNIX):
            for name in ("use_ssl", "token_file", *_TLS_FILES):
                if getattr(self, name):
                    raise FlagError(
                        f"{flag_of(self, name)} needs --control-port, or a Unix socket in --control-address"
                    )
            return None
        options = ControlPortOptions(self.address, self.port, self._tls(), self._token(), policy)
        try:
            options.check()
        except InvalidArgumentError as error:
            raise FlagError(f"--control-address: {error.message}") from None
        return options

    def _tls(self) -> ServerTls | None:
        if not self.use_ssl:
            refuse_without(self, "--control-use-ssl", _TLS_FILES)
            return None
        service = "the control port"
        certificate = contents_of(self, "certificate", service)
        private_key = contents_of(self, "private_key", service)
        root = None if self.root is None else contents_of(self, "root", service)
        return ServerTls(private_key, certificate, root)

    def _token(self) -> str | None:
        if self.token_file is None:
            return None
        try:
            return read_token(contents_of(self, "token_file", "").decode(errors="replace"))
        except InvalidArgumentError as error:
            raise FlagError(f"--control-token-file: {self.token_file}: {error.message}") from None


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
