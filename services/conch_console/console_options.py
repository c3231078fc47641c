"""Settings and options of the console: its address, its users, and the actions that it allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

from conch.core.errors import InvalidArgumentError
from conch.frontends.http.http_options import HttpTls, TlsFiles, pem_option
from conch.server_options import AddOnOptions, AddOnSettings, Opening, PartOptions
from conch.settings.option import FlagError, Settings, nested, option, settings_of
from conch.settings.option_checks import contents_of
from conch.settings.value_types import BOOL, FILE, PORT, TEXT
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
class ConsoleOptions(AddOnOptions):
    """Settings of the console.

    Attributes:
        address: Host to listen on.
        port: Port to listen on.
        hosts: Further names that browsers reach the console by.
        tokens: None lets in everyone who reaches the address, or principals of the policy.
        policy: True if the server's access policy applies.
        tls: TLS, or None for plain text; with root certificates, browsers need a certificate.
        allow_control: True if admins may load, unload, drain and change settings.
        allow_infer: True if admins may send requests to models.
        max_input_bytes: Largest body of a request to a model.
        flags: The server's settings.
    """

    keeps_latencies: ClassVar = True
    keeps_traces: ClassVar = True

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
        """True if browsers must have a certificate (mutual TLS)."""
        return self.tls is not None and self.tls.client_root is not None

    @property
    def ports(self) -> Sequence[int]:
        """The port, if any."""
        return (self.port,)

    def openings(self, options: PartOptions) -> Sequence[Opening]:
        """The console itself."""
        from conch.process.exposure import CERTIFIED, PRINCIPALS, reach

        if self.policy:
            clients = PRINCIPALS
        elif self.tokens is not None:
            clients = "users with a token"
        else:
            clients = CERTIFIED if self.mutual else reach(self.address)
        return [Opening("the console", clients)]

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

    @property
    def identifies(self) -> bool:
        """True if users have credentials: keys, tokens or client certificates."""
        return self.policy or self.tokens is not None or self.mutual

    def check(self) -> None:
        """Checks that the console is protected unless it is local.

        Raises:
            InvalidArgumentError: It is open to the network; the text names the remedies.
        """
        if not self.identifies and not is_loopback(self.address):
            raise InvalidArgumentError(
                f"the console would show models, configs and logs to all who reach {self.address}: give "
                "--access-policy or --console-token-file, or --console-root-cert with --console-use-ssl to "
                "ask for client certificates, or listen on a loopback address with --console-address"
            )


@dataclass(frozen=True, slots=True)
class ConsoleTlsFiles(TlsFiles):
    """TLS of the console."""

    GROUP: ClassVar = "console"

    use_ssl: bool = option("--console-use-ssl", BOOL, False, "serve the console over TLS")
    certificate: Path | None = pem_option("--console-server-cert", "the console's certificate")
    private_key: Path | None = pem_option("--console-server-key", "the console's key")
    root: Path | None = pem_option(
        "--console-root-cert", "the root certificates that browsers must have one from"
    )


@dataclass(frozen=True, slots=True)
class ConsoleSettings(AddOnSettings):
    """The console, as the flags give it."""

    GROUP: ClassVar = "console"
    AFTER: ClassVar = {"console": "control port"}

    port: int = option("--console-port", PORT, 0, "port for the web console; 0 for none")
    address: str = option(
        "--console-address",
        TEXT,
        "127.0.0.1",
        "address for the console; one that other machines reach needs --console-token-file, "
        "--console-root-cert or --access-policy",
    )
    hosts: tuple[str, ...] = option(
        "--console-host",
        TEXT,
        help="name that browsers reach the console by, besides addresses, localhost and --console-address",
        repeatable=True,
    )
    token_file: Path | None = option(
        "--console-token-file",
        FILE,
        None,
        "file with a line 'viewer: TOKEN', a line 'admin: TOKEN', or both, which users log in with",
    )
    allow_control: bool = option(
        "--console-allow-control",
        BOOL,
        False,
        "let admins, or principals with the role control, load and unload models, drain the server and "
        "change settings on the console",
    )
    allow_infer: bool = option(
        "--console-allow-infer",
        BOOL,
        False,
        "let admins, or principals with the role infer, send requests to models on the console",
    )
    tls: ConsoleTlsFiles = nested(ConsoleTlsFiles)

    def add_to(self, options: PartOptions, settings: Settings) -> PartOptions:
        """Adds the console. Raises FlagError: settings are wrong, or have no effect."""
        if not self.port:
            for each in settings_of(ConsoleSettings):
                if each.name != "console-address" and settings.chosen(each.name):
                    raise FlagError(f"{each.flag} needs --console-port")
            return options
        policy = options.server.access_policy is not None
        console = ConsoleOptions(
            address=self.address,
            port=self.port,
            hosts=self.hosts,
            tokens=self._tokens(policy),
            policy=policy,
            tls=self.tls.checked("the console"),
            allow_control=self.allow_control,
            allow_infer=self.allow_infer,
            max_input_bytes=settings["http-max-input-size"],
            flags=tuple(
                ShownFlag(each.name, each.text(settings[each.name]), str(settings.source(each.name)))
                for each in settings.definitions
                if each.listed
            ),
        )
        if self.address.startswith("unix:"):
            raise FlagError("--console-address: browsers can't open a Unix socket; give a host")
        try:
            console.check()
        except InvalidArgumentError as error:
            raise FlagError(f"--console-address: {error.message}") from None
        if console.tokens is not None and not console.tokens.admin:
            for name in ("console-allow-control", "console-allow-infer"):
                if settings.chosen(name):
                    raise FlagError(
                        f"--{name} is for admins: --console-token-file has no line 'admin: TOKEN'"
                    )
        return replace(options, add_ons={**options.add_ons, "console": console})

    def _tokens(self, policy: bool) -> ConsoleTokens | None:
        if self.token_file is None:
            return None
        if policy:
            raise FlagError(
                "--console-token-file: with --access-policy users log in with its keys and tokens; leave it "
                "out"
            )
        try:
            return read_tokens(contents_of(self, "token_file", "").decode(errors="replace"))
        except InvalidArgumentError as error:
            raise FlagError(f"--console-token-file: {self.token_file}: {error.message}") from None
