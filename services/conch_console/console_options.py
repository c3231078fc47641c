"""`ConsoleOptions`: where the console listens, who may use it, and for what.

Used by: `server_options`, which builds them from flags; `console_access`, `console_port`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from conch.core.errors import InvalidArgumentError
from conch.frontends.http.http_server import HttpTls
from conch_control.remote_api.connection_options import is_loopback, read_token

DEFAULT_PORT = 8004
"""The port that `conch demo` opens the console on."""


class ShownFlag(NamedTuple):
    """A setting of the command line, for the settings page; secrets are hidden in its value."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class ConsoleTokens:
    """The two tokens; an empty one is none."""

    viewer: str = field(default="", repr=False)
    admin: str = field(default="", repr=False)


def read_tokens(text: str) -> ConsoleTokens:
    """The tokens of a file with a line ``viewer: TOKEN``, a line ``admin: TOKEN``, or both.

    Raises:
        InvalidArgumentError: It has other lines, none, or one token for both roles.
    """
    found: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        role, colon, token = line.partition(":")
        if not colon or role.strip() not in ("viewer", "admin") or role.strip() in found:
            raise InvalidArgumentError(
                "expected a line 'viewer: TOKEN', a line 'admin: TOKEN', or both, and nothing else"
            )
        found[role.strip()] = read_token(token)
    if not found:
        raise InvalidArgumentError("there is no token: expected a line 'admin: TOKEN' or 'viewer: TOKEN'")
    tokens = ConsoleTokens(**found)
    if tokens.viewer == tokens.admin:
        raise InvalidArgumentError("viewer and admin must have different tokens")
    return tokens


@dataclass(frozen=True, slots=True)
class ConsoleOptions:
    """Settings of the console.

    Attributes:
        address: Host to listen on.
        port: Port to listen on.
        hosts: Further names that browsers reach the console by.
        tokens: None lets in everyone who reaches the address, or principals of the policy.
        policy: Whether the server's access policy says who may do what.
        tls: TLS, or None for plain text; with root certificates, browsers need a certificate.
        allow_control: Whether admins may load, unload, drain and change settings.
        allow_infer: Whether admins may send requests to models.
        max_input_bytes: Largest body of a request to a model.
        flags: The server's settings.
    """

    address: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    hosts: tuple[str, ...] = ()
    tokens: ConsoleTokens | None = None
    policy: bool = False
    tls: HttpTls | None = None
    allow_control: bool = False
    allow_infer: bool = False
    max_input_bytes: int = 64 << 20
    flags: Sequence[ShownFlag] = ()

    @property
    def mutual(self) -> bool:
        """Whether browsers must have a certificate."""
        return self.tls is not None and self.tls.client_root is not None

    @property
    def target(self) -> str:
        """Host and port."""
        bare = ":" in self.address and not self.address.startswith("[")
        return f"{f'[{self.address}]' if bare else self.address}:{self.port}"

    @property
    def reuse_port(self) -> bool:
        """Always False: two servers on one port would answer in turns."""
        return False

    @property
    def security(self) -> str:
        """Protection and rights, for the banner."""
        transport = "plain text" if self.tls is None else "mutual TLS" if self.mutual else "TLS"
        rights = [name for name, on in (("control", self.allow_control), ("try", self.allow_infer)) if on]
        users = ["access policy"] if self.policy else ["token"] if self.tokens is not None else []
        return ", ".join([transport, *users, *(rights or ["read only"])])

    def check(self) -> None:
        """Checks that the console is protected unless it is local.

        Raises:
            InvalidArgumentError: It is open to the network; the text names the remedies.
        """
        protected = self.policy or self.tokens is not None or self.mutual
        if not protected and not is_loopback(self.address):
            raise InvalidArgumentError(
                f"the console would show models, configs and logs to all who reach {self.address}: give "
                "--access-policy or --console-token-file, or --console-root-cert with --console-use-ssl to "
                "ask for client certificates, or listen on a loopback address with --console-address"
            )
