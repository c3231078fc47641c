"""Parses the URLs of MLflow registries, and reads what the environment has for them."""

from __future__ import annotations

import base64
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

from conch.core.errors import InvalidArgumentError
from conch_control.repository.repository_kinds import without_user

SPELLING = (
    "mlflow://host:port/path?alias=name,name&stable=name or "
    "mlflow+http://host:port/path?alias=name,name&stable=name"
)

_URL = re.compile(
    r"(?P<scheme>mlflow|mlflow\+http)://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<path>/[A-Za-z0-9._~%/-]*)?(?:\?(?P<query>[^#]*))?"
)
_ALIAS = re.compile(r"[\w-]+")


@dataclass(frozen=True, slots=True)
class MlflowLocation:
    """A registry.

    Attributes:
        text: The location as given, without trailing slashes.
        secure: True if it is reached by HTTPS.
        port: Its port; None for that of the protocol.
        prefix: Path before ``/api``, without a trailing slash.
        aliases: Aliases whose versions are served; empty for all.
        stable: The alias whose version gets requests without a version; empty for the usual ones.
    """

    text: str
    secure: bool
    host: str
    port: int | None = None
    prefix: str = ""
    aliases: tuple[str, ...] = ()
    stable: str = ""

    def __str__(self) -> str:
        return self.text

    @property
    def models(self) -> str:
        """The location without the query, for those of its models."""
        return self.text.partition("?")[0].rstrip("/")


def parse_location(text: str) -> MlflowLocation:
    """Parses a URL. Raises InvalidArgumentError: it is malformed."""
    found = _URL.fullmatch(text)
    if found is None:
        if "@" in text.partition("?")[0]:
            raise _wrong(text, "credentials come from MLFLOW_TRACKING_TOKEN, or _USERNAME and _PASSWORD")
        raise _wrong(text, "it is no URL of an MLflow server")
    port = None if found["port"] is None else int(found["port"])
    if port is not None and not 0 < port < 65536:
        raise _wrong(text, f"{port} is not a port")
    aliases: list[str] = []
    stable: str | None = None
    for key, value in parse_qsl(found["query"] or "", keep_blank_values=True):
        if key not in ("alias", "stable"):
            raise _wrong(text, f"'{key}' is not known, only 'alias' and 'stable' are")
        if key == "alias":
            aliases += value.split(",")
        elif stable is not None:
            raise _wrong(text, "'stable' is given twice")
        else:
            stable = value
    for alias in (*aliases, *([] if stable is None else [stable])):
        if not _ALIAS.fullmatch(alias):
            raise _wrong(text, f"'{alias}' is no alias")
    if stable is not None and aliases and stable not in aliases:
        raise _wrong(text, f"'stable' names '{stable}', which 'alias' does not; add it there")
    return MlflowLocation(
        text.rstrip("/"),
        found["scheme"] == "mlflow",
        found["host"].strip("[]"),
        port,
        (found["path"] or "").rstrip("/"),
        tuple(dict.fromkeys(aliases)),
        stable or "",
    )


def _wrong(text: str, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"model repository '{without_user(text)}': {reason}; write {SPELLING}")


@dataclass(frozen=True, slots=True)
class MlflowCredentials:
    """Credentials for requests to a registry.

    Attributes:
        authorization: Value of the header; empty for none.
        hidden: Secrets in it, which no text may hold.
        verify: True if the server's certificate is checked.
        ca_file: Certificates to check it with; empty for the system's.
        client_file: The client's certificate and key; empty for none.
    """

    authorization: str = field(default="", repr=False)
    hidden: tuple[str, ...] = field(default=(), repr=False)
    verify: bool = True
    ca_file: str = ""
    client_file: str = ""

    def secrets(self) -> tuple[str, ...]:
        """Values to hide."""
        return self.hidden

    def tls(self) -> ssl.SSLContext:
        """The TLS context. Raises InvalidArgumentError: a file can't be read."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
            if self.client_file:
                context.load_cert_chain(self.client_file)
        except OSError as error:
            raise InvalidArgumentError(
                f"MLFLOW_TRACKING_SERVER_CERT_PATH or MLFLOW_TRACKING_CLIENT_CERT_PATH: '{self.ca_file}' or "
                f"'{self.client_file}' can't be used: {error.strerror or error}"
            ) from None
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


class MlflowEnvironment:
    """Reads the variables of MLflow's client."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def forget(self) -> None:
        """Returns at once: variables are read each time."""

    def read(self, location: MlflowLocation) -> MlflowCredentials:
        """The credentials. Raises InvalidArgumentError: a variable is wrong."""
        found = {
            name: self._environment.get(f"MLFLOW_TRACKING_{name}", "")
            for name in (
                "TOKEN",
                "USERNAME",
                "PASSWORD",
                "INSECURE_TLS",
                "SERVER_CERT_PATH",
                "CLIENT_CERT_PATH",
            )
        }
        authorization = ""
        if found["USERNAME"]:
            pair = f"{found['USERNAME']}:{found['PASSWORD']}".encode()
            authorization = f"Basic {base64.b64encode(pair).decode()}"
        elif found["TOKEN"]:
            authorization = f"Bearer {found['TOKEN']}"
        if not (authorization.isascii() and authorization.isprintable()):
            raise InvalidArgumentError("MLFLOW_TRACKING_TOKEN: it must be printable ASCII text")
        return MlflowCredentials(
            authorization,
            (found["TOKEN"], found["PASSWORD"], authorization.partition(" ")[2]),
            found["INSECURE_TLS"].lower() not in ("true", "1"),
            found["SERVER_CERT_PATH"],
            found["CLIENT_CERT_PATH"],
        )
