"""`OtlpEndpoint`: where one signal is exported and how, out of settings and ``OTEL_*``.

A setting wins over a variable, and a variable of the signal over one of all signals.
"""

from __future__ import annotations

import os
import re
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

from conch import __version__
from conch.core.errors import InvalidArgumentError

T = TypeVar("T")

HTTP_PROTOBUF, HTTP_JSON, GRPC = "http/protobuf", "http/json", "grpc"

_ENCODINGS = {"protobuf": HTTP_PROTOBUF, "json": HTTP_JSON}
_PORTS = {HTTP_PROTOBUF: 4318, HTTP_JSON: 4318, GRPC: 4317}
_MOST_NUMBER = 2**31 - 1
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
KEYS = ("url", "protocol", "encoding", "header", "timeout", "certificate", "compression")
"""Settings of an endpoint."""


@dataclass(frozen=True, slots=True)
class OtlpEndpoint:
    """Address and transport of a signal's export.

    Attributes:
        signal: One of the signals of `exporters`.
        url: Address of the collector; for gRPC, only scheme, host and port matter.
        protocol: ``http/protobuf``, ``http/json`` or ``grpc``.
        headers: Sent with each export; names in lower case.
        timeout_s: Timeout of one export, in seconds.
        certificate: A file of certificates that the collector's is checked with; empty for the system's.
        gzip: True if exports are compressed.
    """

    signal: str
    url: SplitResult
    protocol: str
    headers: tuple[tuple[str, str], ...]
    timeout_s: float
    certificate: str
    gzip: bool


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of an exporter's queue.

    Attributes:
        queue_size: Items that may wait, such as spans; further ones are dropped.
        batch_size: Most items of one export.
        delay_s: Seconds that items wait for others.
    """

    queue_size: int = 2048
    batch_size: int = 512
    delay_s: float = 1.0


def read_endpoint(signal: str, given: Given) -> OtlpEndpoint:
    """The endpoint of a signal.

    Args:
        signal: One of the signals of `exporters`.
        given: Settings of `KEYS`, and variables.

    Raises:
        InvalidArgumentError: A setting or variable is wrong; the text names it.
    """
    protocol = _protocol(given, signal)
    compression = given.pick("compression", variables(signal, "COMPRESSION"), "none", ("none", "gzip"))
    return OtlpEndpoint(
        signal=signal,
        url=_url(given, signal, protocol),
        protocol=protocol,
        headers=_headers(given, signal),
        timeout_s=given.convert("timeout", variables(signal, "TIMEOUT"), 10_000, whole(1)) / 1000,
        certificate=given.convert("certificate", variables(signal, "CERTIFICATE"), "", _readable),
        gzip=compression == "gzip",
    )


class Given:
    """Settings as flags and variables give them.

    Args:
        flag: Prefix of a setting's flag; its key follows.
        pairs: Keys and values of settings.
        known: Accepted keys.
        environment: Variables; empty ones count as not set.

    Raises:
        InvalidArgumentError: A setting is unknown.
    """

    def __init__(
        self,
        flag: str,
        pairs: Sequence[tuple[str, str]],
        known: Sequence[str] = KEYS,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.environment = environment
        self._flag = flag
        self._values: dict[str, list[str]] = {}
        for key, value in pairs:
            if key not in known:
                nearest = get_close_matches(key, known, 1)
                hint = f"; did you mean '{nearest[0]}'?" if nearest else ""
                raise InvalidArgumentError(
                    f"{self.name(key)}={value}: unknown setting '{key}', known are {', '.join(known)}{hint}"
                )
            self._values.setdefault(key, []).append(value)

    def name(self, key: str) -> str:
        """The flag of a setting."""
        return self._flag + key

    def all(self, key: str) -> list[str]:
        """All values of a setting, in order."""
        return self._values.get(key, [])

    def find(self, key: str, *variables: str) -> tuple[str, str] | None:
        """The name and the value of what was given for a setting; None for nothing."""
        if key in self._values:
            return self.name(key), self._values[key][-1]
        for variable in variables:
            if value := self.environment.get(variable, "").strip():
                return variable, value
        return None

    def convert(self, key: str, variables: Sequence[str], default: T, reader: Callable[[str], T]) -> T:
        """The value of a setting, or the default; `reader` raises ValueError that says what it must be."""
        found = self.find(key, *variables)
        if found is None:
            return default
        try:
            return reader(found[1])
        except ValueError as error:
            raise bad_option(found[0], f"{error}, got: {found[1]}") from None

    def pick(self, key: str, variables: Sequence[str], default: str, choices: Sequence[str]) -> str:
        """One of several words."""

        def reader(text: str) -> str:
            if text.lower() not in choices:
                raise ValueError(f"it must be one of {', '.join(choices)}")
            return text.lower()

        return self.convert(key, variables, default, reader)


def bad_option(name: str, reason: str) -> InvalidArgumentError:
    """The error of a wrong setting or variable."""
    return InvalidArgumentError(f'Bad option: "{name}".\n{reason}')


def variables(signal: str, name: str) -> tuple[str, str]:
    """The variables of a setting: of the signal, and of all signals."""
    return f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}", f"OTEL_EXPORTER_OTLP_{name}"


def whole(least: int) -> Callable[[str], int]:
    """A reader of whole numbers, for `Given.convert`."""

    def reader(text: str) -> int:
        if not re.fullmatch("[0-9]{1,10}", text, re.ASCII) or not least <= int(text) <= _MOST_NUMBER:
            raise ValueError(f"it must be a whole number from {least} to {_MOST_NUMBER}")
        return int(text)

    return reader


def _protocol(given: Given, signal: str) -> str:
    protocols = (HTTP_PROTOBUF, HTTP_JSON, GRPC)
    protocol = given.pick("protocol", variables(signal, "PROTOCOL"), HTTP_PROTOBUF, protocols)
    encoding = given.pick("encoding", (), "", tuple(_ENCODINGS))
    if not encoding:
        return protocol
    if given.all("protocol") and protocol != _ENCODINGS[encoding]:
        raise bad_option(given.name("encoding"), f"it contradicts protocol={protocol}, leave it out")
    return _ENCODINGS[encoding]


def _url(given: Given, signal: str, protocol: str) -> SplitResult:
    path = f"/v1/{signal}"
    default = urlsplit(f"http://localhost:{_PORTS[protocol]}{'' if protocol == GRPC else path}")
    of_one, of_all = variables(signal, "ENDPOINT")
    url = given.convert("url", (of_one, of_all), default, _parse_url)
    found = given.find("url", of_one, of_all)
    if found is not None and found[0] == of_all and protocol != GRPC:
        # The endpoint of all signals is a base; that of one is taken as it is.
        url = url._replace(path=url.path.rstrip("/") + path)
    return url


def _parse_url(text: str) -> SplitResult:
    reason = "it must be an address such as http://localhost:4318/v1/traces"
    if not text.isascii() or any(character <= " " or character == "\x7f" for character in text):
        raise ValueError(reason)
    # Without a scheme, Triton takes it as http.
    url = urlsplit(text if "://" in text else f"http://{text}")
    try:
        usable = url.scheme in ("http", "https") and url.hostname and url.port != 0 and not url.username
        (url.hostname or "").encode("idna")
    except ValueError:  # the port, or a part of the name
        usable = False
    if not usable:
        raise ValueError(reason)
    return url


def _readable(path: str) -> str:
    try:
        with open(path, "rb"):
            return path
    except OSError as error:
        raise ValueError(f"the file can't be read: {error.strerror}") from None


def pair(name: str, text: str) -> tuple[str, str]:
    """The two sides of ``<name>=<value>``; `name` is that of the setting, for errors."""
    key, equals, value = text.partition("=")
    if not (equals and key.strip()):
        raise bad_option(name, f"it must be <name>=<value>, got: {text}")
    return key.strip(), value


def _listed(environment: Mapping[str, str], variable: str) -> list[tuple[str, str]]:
    """The pairs of a variable such as ``a=1,b=2%2C3``."""
    texts = [text for text in environment.get(variable, "").split(",") if text.strip()]
    return [(key, unquote(value.strip())) for key, value in (pair(variable, text) for text in texts)]


def _headers(given: Given, signal: str) -> tuple[tuple[str, str], ...]:
    # Values may be secrets: no error shows them.
    texts = given.all("header")
    name = given.name("header")
    if texts:
        pairs = [text.partition("=")[::2] for text in texts]
    else:
        found = given.find("header", *variables(signal, "HEADERS"))
        if found is None:
            return ()
        name = found[0]
        pairs = [text.partition("=")[::2] for text in found[1].split(",") if text.strip()]
        pairs = [(key, unquote(value)) for key, value in pairs]
    headers = {}
    for key, value in ((key.strip().lower(), value.strip()) for key, value in pairs):
        if not (_TOKEN.fullmatch(key) and value and value.isascii() and value.isprintable()):
            reason = f"it must be <name>=<value> of printable ASCII characters; the name is: {key}"
            raise bad_option(name, reason)
        headers[key] = value
    return tuple(headers.items())


def server_resource(environment: Mapping[str, str] = os.environ) -> dict[str, str | int]:
    """Attributes of the server, as the environment has them."""
    attributes: dict[str, str | int] = {
        "service.name": "conch",
        "service.version": __version__,
        "service.instance.id": _instance_id(),
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        "telemetry.sdk.name": "conch",
        "telemetry.sdk.language": "python",
        "telemetry.sdk.version": __version__,
    }
    attributes.update(_listed(environment, "OTEL_RESOURCE_ATTRIBUTES"))
    if name := environment.get("OTEL_SERVICE_NAME", "").strip():
        attributes["service.name"] = name
    return attributes


@cache
def _instance_id() -> str:
    """The same for all signals of the process."""
    return str(uuid.uuid4())
