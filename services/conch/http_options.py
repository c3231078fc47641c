"""Flag values to the options of the REST front end."""

from __future__ import annotations

import re
from pathlib import Path

from conch.flags import FlagError, FlagValues
from conch.frontends.http.infer.forward import forwarder
from conch.frontends.http.origins import ANY_ORIGIN
from conch.frontends.http.restricted import parse_restrictions
from conch.frontends.http.server import HttpOptions, HttpTls

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^A-Z/?#@\s]+")
_ONLY_WITH_TLS = ("http-server-cert", "http-server-key", "http-root-cert")


def http_options(flags: FlagValues) -> HttpOptions | None:
    """The settings of the REST front end; None without one.

    Raises:
        FlagError: A file can't be read, or flags contradict each other.
    """
    if not flags["allow-http"]:
        return None
    try:
        restrictions = parse_restrictions(flags["http-restricted-api"])
    except ValueError as error:
        raise FlagError(f"--http-restricted-api: {error}") from None
    pattern = flags["http-header-forward-pattern"]
    try:
        forwarder(pattern)
    except ValueError as error:
        raise FlagError(f"--http-header-forward-pattern: {error}") from None
    origins = frozenset(flags["http-cors-origin"])
    for origin in sorted(origins - {ANY_ORIGIN}):
        if not _ORIGIN.fullmatch(origin):
            raise FlagError(
                f"--http-cors-origin: '{origin}' is no origin as browsers write it: expected a scheme, a "
                f"host and perhaps a port in lower case, such as https://app.example, or {ANY_ORIGIN} for any"
            )
    return HttpOptions(
        address=flags["http-address"],
        port=flags["http-port"],
        reuse_port=flags["reuse-http-port"],
        tls=_tls(flags),
        max_connections=flags["http-max-connections"],
        idle_timeout_s=flags["http-idle-timeout-secs"],
        max_input_bytes=flags["http-max-input-size"],
        restrictions=restrictions,
        header_forward_pattern=pattern,
        allow_model_upload=flags["allow-model-upload"],
        cors_origins=origins,
    )


def _tls(flags: FlagValues) -> HttpTls | None:
    if not flags["http-use-ssl"]:
        for name in _ONLY_WITH_TLS:
            if flags[name] is not None:
                raise FlagError(f"--{name} needs --http-use-ssl")
        return None
    root = flags["http-root-cert"]
    return HttpTls(
        _readable(flags, "http-server-cert"),
        _readable(flags, "http-server-key"),
        None if root is None else _readable(flags, "http-root-cert"),
    )


def _readable(flags: FlagValues, name: str) -> Path:
    path: Path | None = flags[name]
    if path is None:
        raise FlagError(f"--{name} must be specified to serve REST over TLS")
    try:
        with path.open("rb"):
            return path
    except OSError as error:
        raise FlagError(f"--{name}: {path} can't be read: {error.strerror}") from None
