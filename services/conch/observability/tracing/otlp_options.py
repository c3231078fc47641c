"""`OtlpOptions`: how spans are exported, out of ``--trace-config opentelemetry,...`` and ``OTEL_*``.

A setting of the flag wins over a variable, and a variable of traces over one of all signals.
No state. Used by: `open_tracing`, `otlp_exporter`.
"""

from __future__ import annotations

import os
import re
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

from conch import __version__
from conch.core.errors import InvalidArgumentError

T = TypeVar("T")

HTTP_PROTOBUF, HTTP_JSON, GRPC = "http/protobuf", "http/json", "grpc"
TRITON_LAYOUT, SEMCONV_LAYOUT = "triton", "semconv"

_ENCODINGS = {"protobuf": HTTP_PROTOBUF, "json": HTTP_JSON}
_PATH = "/v1/traces"
_PORTS = {HTTP_PROTOBUF: 4318, HTTP_JSON: 4318, GRPC: 4317}
_MOST_NUMBER = 2**31 - 1
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_BSP = {"bsp_max_queue_size": 2048, "bsp_schedule_delay": 5000, "bsp_max_export_batch_size": 512}
_KEYS = (
    "url",
    "protocol",
    "encoding",
    "header",
    "timeout",
    "certificate",
    "compression",
    *_BSP,
    "resource",
    "layout",
    "parent",
    "batch-spans",
)


@dataclass(frozen=True, slots=True)
class OtlpOptions:
    """How spans are exported.

    Attributes:
        url: Where they go; of gRPC, only scheme, host and port matter.
        protocol: ``http/protobuf``, ``http/json`` or ``grpc``.
        headers: Sent with each export; names in lower case.
        timeout_s: Of one export.
        certificate: A file of certificates that the collector's is checked with; empty for the system's.
        gzip: Whether exports are compressed.
        queue_size: Spans that may wait; further ones are dropped.
        delay_s: How long spans wait for others.
        batch_size: Most spans of one export.
        resource: Attributes of the server.
        layout: ``triton`` for the span names and kinds of Triton, ``semconv`` for those of OpenTelemetry.
        follows_unsampled: Whether the span of a caller that is not sampled traces the request.
        batch_spans: Whether a batch of several requests has a span of its own.
        shown: The settings as Triton's trace setting RPC shows them.
    """

    url: SplitResult
    protocol: str
    headers: tuple[tuple[str, str], ...]
    timeout_s: float
    certificate: str
    gzip: bool
    queue_size: int
    delay_s: float
    batch_size: int
    resource: Mapping[str, str | int]
    layout: str
    follows_unsampled: bool
    batch_spans: bool
    shown: Mapping[str, tuple[str, ...]]


def otlp_options(
    pairs: Sequence[tuple[str, str]], environment: Mapping[str, str] = os.environ
) -> OtlpOptions:
    """The options of settings and variables.

    Args:
        pairs: Keys and values of ``--trace-config opentelemetry,<key>=<value>``.
        environment: Variables; empty ones count as not set.

    Raises:
        InvalidArgumentError: A setting or variable is wrong; the text names it.
    """
    given = _Given(pairs, environment)
    protocol = _protocol(given)
    url = _url(given, protocol)
    numbers = {key: _number(given, key, default) for key, default in _BSP.items()}
    queue_size, batch_size = numbers["bsp_max_queue_size"], numbers["bsp_max_export_batch_size"]
    if batch_size > queue_size:
        found = given.find("bsp_max_export_batch_size", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE")
        if found is not None:
            raise _bad(found[0], f"it must not be above bsp_max_queue_size ({queue_size}), got: {batch_size}")
        batch_size = numbers["bsp_max_export_batch_size"] = queue_size
    pick = given.pick
    compression = pick("compression", _otlp("COMPRESSION"), "none", ("none", "gzip"))
    resources = [
        _pair(f"--trace-config opentelemetry,resource={text}", text) for text in given.all("resource")
    ]
    shown: dict[str, tuple[str, ...]] = {"url": (url.geturl(),)}
    if resources:
        shown["resource"] = tuple(given.all("resource"))
    return OtlpOptions(
        url=url,
        protocol=protocol,
        headers=_headers(given),
        timeout_s=given.convert("timeout", _otlp("TIMEOUT"), 10_000, _whole(1)) / 1000,
        certificate=given.convert("certificate", _otlp("CERTIFICATE"), "", _readable),
        gzip=compression == "gzip",
        queue_size=queue_size,
        delay_s=numbers["bsp_schedule_delay"] / 1000,
        batch_size=batch_size,
        resource={**_resource(environment), **dict(resources)},
        layout=pick("layout", (), TRITON_LAYOUT, (TRITON_LAYOUT, SEMCONV_LAYOUT)),
        follows_unsampled=pick("parent", (), "sampled", ("sampled", "always")) == "always",
        batch_spans=pick("batch-spans", (), "false", ("true", "false")) == "true",
        shown={**shown, **{key: (str(number),) for key, number in numbers.items()}},
    )


class _Given:
    """What was given, by flag or variable."""

    def __init__(self, pairs: Sequence[tuple[str, str]], environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._values: dict[str, list[str]] = {}
        for key, value in pairs:
            if key not in _KEYS:
                nearest = get_close_matches(key, _KEYS, 1)
                hint = f"; did you mean '{nearest[0]}'?" if nearest else ""
                raise InvalidArgumentError(
                    f"--trace-config opentelemetry,{key}={value}: unknown setting '{key}', known are "
                    f"{', '.join(_KEYS)}{hint}"
                )
            self._values.setdefault(key, []).append(value)

    def all(self, key: str) -> list[str]:
        """All values of a setting, in order."""
        return self._values.get(key, [])

    def find(self, key: str, *variables: str) -> tuple[str, str] | None:
        """The name and the value of what was given for a setting; None for nothing."""
        if key in self._values:
            return f"--trace-config opentelemetry,{key}", self._values[key][-1]
        for variable in variables:
            if value := self._environment.get(variable, "").strip():
                return variable, value
        return None

    def convert(self, key: str, variables: Sequence[str], default: T, reader: Callable[[str], T]) -> T:
        """What was given for a setting; `reader` raises ValueError with what it must be."""
        found = self.find(key, *variables)
        if found is None:
            return default
        try:
            return reader(found[1])
        except ValueError as error:
            raise _bad(found[0], f"{error}, got: {found[1]}") from None

    def pick(self, key: str, variables: Sequence[str], default: str, choices: Sequence[str]) -> str:
        """One of several words."""

        def reader(text: str) -> str:
            if text.lower() not in choices:
                raise ValueError(f"it must be one of {', '.join(choices)}")
            return text.lower()

        return self.convert(key, variables, default, reader)


def _bad(name: str, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(f'Bad option: "{name}".\n{reason}')


def _otlp(name: str) -> tuple[str, str]:
    """The variables of a setting of the exporter: of traces, and of all signals."""
    return f"OTEL_EXPORTER_OTLP_TRACES_{name}", f"OTEL_EXPORTER_OTLP_{name}"


def _whole(least: int) -> Callable[[str], int]:
    def reader(text: str) -> int:
        if not re.fullmatch("[0-9]{1,10}", text, re.ASCII) or not least <= int(text) <= _MOST_NUMBER:
            raise ValueError(f"it must be a whole number from {least} to {_MOST_NUMBER}")
        return int(text)

    return reader


def _number(given: _Given, key: str, default: int) -> int:
    least = 0 if key == "bsp_schedule_delay" else 1
    return given.convert(key, (f"OTEL_{key.upper()}",), default, _whole(least))


def _protocol(given: _Given) -> str:
    protocols = (HTTP_PROTOBUF, HTTP_JSON, GRPC)
    protocol = given.pick("protocol", _otlp("PROTOCOL"), HTTP_PROTOBUF, protocols)
    encoding = given.pick("encoding", (), "", tuple(_ENCODINGS))
    if not encoding:
        return protocol
    if given.all("protocol") and protocol != _ENCODINGS[encoding]:
        raise _bad(
            "--trace-config opentelemetry,encoding", f"it contradicts protocol={protocol}, leave it out"
        )
    return _ENCODINGS[encoding]


def _url(given: _Given, protocol: str) -> SplitResult:
    default = urlsplit(f"http://localhost:{_PORTS[protocol]}{'' if protocol == GRPC else _PATH}")
    of_traces, of_all = _otlp("ENDPOINT")
    url = given.convert("url", (of_traces, of_all), default, _parse_url)
    found = given.find("url", of_traces, of_all)
    if found is not None and found[0] == of_all and protocol != GRPC:
        # The endpoint of all signals is a base; that of traces is taken as it is.
        url = url._replace(path=url.path.rstrip("/") + _PATH)
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


def _pair(name: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (equals and key.strip()):
        raise _bad(name, f"it must be <name>=<value>, got: {text}")
    return key.strip(), value


def _listed(environment: Mapping[str, str], variable: str) -> list[tuple[str, str]]:
    """The pairs of a variable such as ``a=1,b=2%2C3``."""
    texts = [text for text in environment.get(variable, "").split(",") if text.strip()]
    return [(key, unquote(value.strip())) for key, value in (_pair(variable, text) for text in texts)]


def _headers(given: _Given) -> tuple[tuple[str, str], ...]:
    # Values may be secrets: no error shows them.
    texts = given.all("header")
    name = "--trace-config opentelemetry,header"
    if texts:
        pairs = [text.partition("=")[::2] for text in texts]
    else:
        found = given.find("header", *_otlp("HEADERS"))
        if found is None:
            return ()
        name = found[0]
        pairs = [text.partition("=")[::2] for text in found[1].split(",") if text.strip()]
        pairs = [(key, unquote(value)) for key, value in pairs]
    headers = {}
    for key, value in ((key.strip().lower(), value.strip()) for key, value in pairs):
        if not (_TOKEN.fullmatch(key) and value and value.isascii() and value.isprintable()):
            raise _bad(name, f"it must be <name>=<value> of printable ASCII characters; the name is: {key}")
        headers[key] = value
    return tuple(headers.items())


def _resource(environment: Mapping[str, str]) -> dict[str, str | int]:
    """Attributes of the server, without those of the flag."""
    attributes: dict[str, str | int] = {
        "service.name": "conch",
        "service.version": __version__,
        "service.instance.id": str(uuid.uuid4()),
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
