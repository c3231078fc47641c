"""Flag values to the options of each part; nothing else reads flags."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conch.core.scheduling.rate import ResourceLimit
from conch.flags import FlagError, FlagValues
from conch.frontends.grpc.adapter import TlsOptions
from conch.frontends.grpc.forward import HeaderForwarder
from conch.frontends.grpc.restricted import parse_restrictions
from conch.frontends.grpc.server import ConnectionLimits, GrpcOptions, KeepAlive
from conch.frontends.http.server import HttpOptions
from conch.observability.metrics.options import MetricsOptions, read_settings
from conch.observability.options import AccessLogOptions, LogOptions
from conch_control.options import ControlMode
from conch_control.planner.planner_loop import PlannerOptions
from conch_control.repository.storage.options import StorageOptions

_RELOAD_SETTLE_S = 0.2


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Settings of the server as a whole.

    Attributes:
        server_id: Its name in the metadata.
        exit_on_error: Whether a model that fails at the start ends the server.
        exit_without_repository: Whether a repository that can't be read at the start does.
        strict_readiness: Whether ready means that all models are.
        exit_timeout_s: Seconds requests may take once the server stops to accept them.
        drain_delay_s: Seconds for which requests are still accepted after a stop was asked for.
        listen_while_loading: Whether to listen before the models of the start are loaded.
        cache: Settings by name of the response cache; nothing for none.
        allow_model_control: Whether clients of the inference ports may load and unload models.
        allow_client_shm: Whether clients may register shared memory.
    """

    server_id: str = "triton"
    exit_on_error: bool = True
    exit_without_repository: bool = True
    strict_readiness: bool = True
    exit_timeout_s: float = 30.0
    drain_delay_s: float = 0.0
    listen_while_loading: bool = False
    cache: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    allow_model_control: bool = True
    allow_client_shm: bool = True


def server_options(flags: FlagValues) -> ServerOptions:
    """The settings of the server as a whole.

    Raises:
        FlagError: Those of the cache are malformed.
    """
    return ServerOptions(
        server_id=flags["id"],
        exit_on_error=flags["exit-on-error"] and not flags["reload"],  # it is about to be mended
        exit_without_repository=flags["exit-on-error"],
        strict_readiness=flags["strict-readiness"],
        exit_timeout_s=float(flags["exit-timeout-secs"]),
        drain_delay_s=flags["drain-delay"],
        listen_while_loading=flags["listen-while-loading"],
        cache=cache_options(flags["cache-config"], flags["response-cache-byte-size"]),
        allow_model_control=flags["allow-model-control"],
        allow_client_shm=flags["allow-client-shm"],
    )


def control_mode(flags: FlagValues) -> ControlMode:
    """How the server comes by its models; ``--reload`` is a way of watching.

    Raises:
        FlagError: It is to be reloaded and told what to load.
    """
    mode: ControlMode = flags["model-control-mode"]
    if not flags["reload"]:
        return mode
    if mode not in ("none", "watch"):
        raise FlagError(
            f"--reload has the server follow its repositories itself, which is not for "
            f"--model-control-mode={mode}: leave that out"
        )
    return "watch"


def planner_options(flags: FlagValues) -> PlannerOptions | None:
    """The settings of the planner; None where the control mode has none."""
    mode = control_mode(flags)
    if mode not in ("poll", "watch"):
        return None
    settle_s = flags["repository-settle-secs"]
    return PlannerOptions(
        mode=mode,
        poll_s=flags["repository-poll-secs"],
        # A file is saved at once; who copies a repository in has other modes.
        settle_s=min(settle_s, _RELOAD_SETTLE_S) if flags["reload"] else settle_s,
        development=flags["reload"],
        operations=flags["model-load-thread-count"],
        model_config_name=flags["model-config-name"],
    )


def storage_options(flags: FlagValues) -> StorageOptions:
    """The settings of repositories in object stores."""
    return StorageOptions(
        cache_directory=flags["model-cache-directory"],
        cache_bytes=flags["model-cache-byte-size"],
        timeout_s=float(flags["storage-timeout-secs"]),
    )


def log_options(flags: FlagValues) -> LogOptions:
    """The settings of the logs."""
    return LogOptions(
        info=flags["log-info"],
        warning=flags["log-warning"],
        error=flags["log-error"],
        verbose=flags["log-verbose"],
        format=flags["log-format"],
        json=flags["log-json"],
        file=flags["log-file"],
        most_alike=flags["log-rate-limit"],
        escape=os.environ.get("TRITON_SERVER_ESCAPE_LOG_MESSAGES") != "0",
    )


def access_log_options(flags: FlagValues) -> AccessLogOptions | None:
    """The settings of the access log; None without one."""
    name: str | None = flags["access-log"]
    if name is None:
        return None
    return AccessLogOptions(None if name == "-" else Path(name), flags["access-log-format"] == "json")


def metrics_options(flags: FlagValues, http: HttpOptions | None = None) -> MetricsOptions | None:
    """The settings of the metrics; None without them.

    Args:
        flags: The flags.
        http: The settings of the REST front end, whose TLS the metrics port can use.

    Raises:
        FlagError: --metrics-config asks for what there is not, or --metrics-use-ssl for TLS without the REST
            port's.
    """
    if not flags["allow-metrics"]:
        return None
    tls = None
    if flags["metrics-use-ssl"]:
        if http is None or http.tls is None:
            raise FlagError(
                "--metrics-use-ssl takes the certificate of the REST port: it needs --http-use-ssl"
            )
        tls = http.tls.context
    try:
        settings = read_settings(flags["metrics-config"])
    except ValueError as error:
        raise FlagError(str(error)) from None
    return MetricsOptions(
        address=flags["metrics-address"] or flags["http-address"],
        port=flags["metrics-port"],
        cpu=flags["allow-cpu-metrics"],
        gpu=flags["allow-gpu-metrics"],
        interval_ms=flags["metrics-interval-ms"],
        counters=settings.counters,
        first_responses=settings.first_responses,
        quantiles=settings.quantiles,
        tls=tls,
    )


def grpc_options(flags: FlagValues) -> GrpcOptions | None:
    """The settings of the gRPC front end; None without one.

    Raises:
        FlagError: A file can't be read, or flags contradict each other.
    """
    if not flags["allow-grpc"]:
        return None
    try:
        restrictions = parse_restrictions(flags["grpc-restricted-protocol"])
    except ValueError as error:
        raise FlagError(f"--grpc-restricted-protocol: {error}") from None
    pattern = flags["grpc-header-forward-pattern"]
    try:
        HeaderForwarder(pattern)
    except ValueError as error:
        raise FlagError(f"--grpc-header-forward-pattern: {error}") from None
    return GrpcOptions(
        address=flags["grpc-address"],
        port=flags["grpc-port"],
        reuse_port=flags["reuse-grpc-port"],
        pollers=flags["grpc-infer-thread-count"],
        tls=_tls(flags),
        keep_alive=KeepAlive(
            time_ms=flags["grpc-keepalive-time"],
            timeout_ms=flags["grpc-keepalive-timeout"],
            permit_without_calls=flags["grpc-keepalive-permit-without-calls"],
            max_pings_without_data=flags["grpc-http2-max-pings-without-data"],
            min_recv_ping_interval_without_data_ms=flags["grpc-http2-min-recv-ping-interval-without-data"],
            max_ping_strikes=flags["grpc-http2-max-ping-strikes"],
        ),
        max_connection_age_ms=flags["grpc-max-connection-age"],
        max_connection_age_grace_ms=flags["grpc-max-connection-age-grace"],
        max_message_bytes=flags["grpc-max-message-bytes"],
        limits=ConnectionLimits(
            connections=flags["grpc-max-connections"],
            streams=flags["grpc-max-concurrent-streams"],
            metadata_bytes=flags["grpc-max-metadata-bytes"],
        ),
        # gRPC for Python has one gzip level, so Triton's three are the same here.
        compression=None if flags["grpc-infer-response-compression-level"] == "none" else "gzip",
        restrictions=restrictions,
        header_forward_pattern=pattern,
        allow_model_upload=flags["allow-model-upload"],
    )


def _tls(flags: FlagValues) -> TlsOptions | None:
    mutual = flags["grpc-use-ssl-mutual"]
    if not flags["grpc-use-ssl"] and not mutual:
        return None
    return TlsOptions(
        private_key=_pem(flags, "grpc-server-key"),
        certificate=_pem(flags, "grpc-server-cert"),
        client_root=_pem(flags, "grpc-root-cert") if mutual else None,
    )


def _pem(flags: FlagValues, name: str) -> bytes:
    path: Path | None = flags[name]
    if path is None:
        raise FlagError(f"--{name} must be specified to serve gRPC over TLS")
    try:
        return path.read_bytes()
    except OSError as error:
        raise FlagError(f"--{name}: {path} can't be read: {error.strerror}") from None


def backend_options(specifications: list[str]) -> Mapping[str, Mapping[str, str]]:
    """Reads ``<backend>,<key>=<value>`` options; those without a backend are found under ``""``.

    Raises:
        FlagError: One is malformed.
    """
    options: dict[str, dict[str, Any]] = {}
    for specification in specifications:
        backend, comma, setting = specification.rpartition(",")
        key, equals, value = setting.partition("=")
        if not equals or not key or (comma and not backend):
            raise FlagError(
                f"--backend-config: '{specification}' is not of the form '<backend>,<setting>=<value>' or "
                f"'<setting>=<value>'"
            )
        options.setdefault(backend, {})[key] = value
    return options


def cache_options(specifications: list[str], byte_size: int | None) -> Mapping[str, Mapping[str, str]]:
    """Reads ``<cache name>,<setting>=<value>`` options: settings by cache name.

    Args:
        specifications: The options; a value may hold commas.
        byte_size: The one setting of the old flag, or None.

    Raises:
        FlagError: One is malformed, or there is the old flag besides; texts are Triton's.
    """
    if byte_size is not None:
        if specifications:
            raise FlagError(
                "Error: Incompatible flags --response-cache-byte-size and --cache-config both provided. "
                "Please provide one or the other."
            )
        return {"local": {"size": str(byte_size)}}
    caches: dict[str, dict[str, str]] = {}
    for specification in specifications:
        name, comma, setting = specification.partition(",")
        if not (name and comma):
            raise FlagError(
                f"No cache specified. --cache-config option format is <cache name>,<setting>=<value>. "
                f"Got {specification}"
            )
        key, _, value = setting.partition("=")
        if not (key and value):
            raise FlagError(
                f"--cache-config option format is '<cache name>,<setting>=<value>'. Got {specification}"
            )
        caches.setdefault(name, {})[key] = value
    return caches


def rate_limits(flags: FlagValues) -> tuple[ResourceLimit, ...] | None:
    """How much there is of each resource; None where rates are not limited.

    Raises:
        FlagError: A resource is malformed.
    """
    limits = tuple(_resource_limit(text) for text in flags["rate-limit-resource"])
    return None if flags["rate-limit"] == "off" else limits


def _resource_limit(text: str) -> ResourceLimit:
    found = re.fullmatch(r"([^:]+):([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    if found is None:
        raise FlagError(
            f"--rate-limit-resource option format is '<resource_name>:<count>:<device>' or "
            f"'<resource_name>:<count>'. Got {text}"
        )
    name, count, device = found.groups()
    return ResourceLimit(name, int(count), None if device is None else int(device))
