"""Builds the options of a server's parts from the resolved settings.

The only place where settings become options: flags that contradict each other or name unreadable files are
refused here. Used by `conch.cli` and `conch.api`, which pass the options to `conch.server`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from conch.access.policy_file import read_policy
from conch.cli.settings.all_settings import Settings
from conch.cli.settings.pair_options import backend_options, cache_options
from conch.cli.settings.setting import FlagError
from conch.core.errors import InvalidArgumentError
from conch.core.scheduling.resource_scheduler import ResourceLimit
from conch.frontends.access_policy import parse_restricted_apis, parse_restricted_protocols
from conch.frontends.grpc.adapter import TlsOptions
from conch.frontends.grpc.grpc_front_end import ConnectionLimits, GrpcOptions, KeepAlive
from conch.frontends.header_forwarding import HeaderForwarder
from conch.frontends.http.cors import ANY_ORIGIN
from conch.frontends.http.http_server import HttpOptions, HttpTls
from conch.observability.exporters import LOGS, METRICS, ExportOptions, read_export
from conch.observability.logging.log_settings import AccessLogOptions, AuditLogOptions, LogOptions
from conch.observability.metrics.metrics_options import MetricsOptions, read_settings
from conch.observability.tracing.trace_options import OLD_FLAGS, TraceOptions, trace_options
from conch.process.option_files import contents_of, refuse_without
from conch_console.console_options import ConsoleOptions
from conch_console.console_settings import console_options
from conch_control.control_options import ControlMode, ControlOptions, StorageOptions
from conch_control.planner.planner_loop import PlannerOptions
from conch_control.remote_api.connection_options import ControlPortOptions, ServerTls, read_token
from conch_platforms.platform_options import ArchiveOptions, archive_options, platform_ports, with_azureml

_RELOAD_SETTLE_S = 0.2
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^A-Z/?#@\s]+")
_HTTP_TLS_FILES = ("http-server-cert", "http-server-key", "http-root-cert")
_CONTROL_TLS_FILES = ("control-server-cert", "control-server-key", "control-root-cert")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of the server as a whole.

    Attributes:
        server_id: Name in the metadata.
        exit_on_error: Whether a model that fails at the start ends the server.
        exit_without_repository: Whether a repository that can't be read at the start ends the server.
        strict_readiness: Whether ready means that all models are ready.
        exit_timeout_s: Seconds that open requests may take after the server stops accepting new ones.
        drain_delay_s: Seconds of further service after a stop was requested.
        listen_while_loading: Whether to listen before the startup models are loaded.
        cache: Settings by name of the response cache; empty for none.
        allow_model_control: Whether clients of the inference ports may load and unload models.
        allow_client_shm: Whether clients may register shared memory.
        tracing: What is traced.
        archives: Directories that SageMaker loads; None where it does not.
        access_policy: The policy file; None for no policy.
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
    tracing: TraceOptions = field(default_factory=TraceOptions)
    archives: ArchiveOptions | None = None
    access_policy: Path | None = None


@dataclass(frozen=True, slots=True)
class PartOptions:
    """The options of all parts; None for a part that is off, and a port for each platform.

    Attributes:
        warnings: What is to be said of settings that are deprecated or without effect.
    """

    server: ServerOptions
    control: ControlOptions
    planner: PlannerOptions | None
    grpc: GrpcOptions | None
    http: HttpOptions | None
    metrics: MetricsOptions | None
    control_port: ControlPortOptions | None
    console: ConsoleOptions | None
    log: LogOptions
    access_log: AccessLogOptions | None
    audit_log: AuditLogOptions | None
    platforms: tuple[HttpOptions, ...] = ()
    warnings: tuple[str, ...] = ()


def build_options(settings: Settings) -> PartOptions:
    """Builds the options of all parts.

    Raises:
        FlagError: A value is malformed, a file can't be read, or settings contradict each other.
    """
    control = _control(settings)
    grpc = _grpc(settings)
    server = _server(settings)
    rest = _http(settings)
    http = with_azureml(settings, rest if settings.allow_http else None)
    platforms = platform_ports(settings, rest)
    control_port = _control_port(settings)
    console = console_options(settings)
    ports = (grpc, http, control_port, console)
    _check_policy(settings, any(each is not None and each.mutual for each in ports))
    hosts = [each.title for each in (http, *platforms) if each is not None and each.platform is not None]
    if settings.access_policy is not None and hosts:
        raise FlagError(
            f"--access-policy does not hold for the routes of {' and '.join(hosts)}, whose platform decides "
            f"who may call: leave it out, or turn these routes off"
        )
    return PartOptions(
        server=server,
        control=control,
        planner=_planner(settings, control.mode),
        grpc=grpc,
        http=http,
        metrics=_metrics(settings, http),
        control_port=control_port,
        console=console,
        log=_log(settings),
        access_log=_access_log(settings),
        audit_log=_audit_log(settings),
        platforms=platforms,
        warnings=(*_deprecations(settings), *server.tracing.warnings),
    )


def _deprecations(settings: Settings) -> Iterator[str]:
    """Triton's warnings of its deprecated flags, but those of traces."""
    strict, size = settings.strict_model_config, settings.response_cache_byte_size
    if strict is not None:
        yield (
            "'--strict-model-config' has been deprecated! Please use '--disable-auto-complete-config' "
            "instead."
        )
        if not strict and settings.disable_auto_complete_config:
            yield (
                "Overriding deprecated '--strict-model-config' from False to True in favor of "
                "'--disable-auto-complete-config'!"
            )
    if size is not None:
        yield (
            f"'--response-cache-byte-size' has been deprecated! This will default to the 'local' cache "
            f"implementation with the provided byte size for its config. Please use '--cache-config' "
            f"instead. The equivalent --cache-config CLI args would be: '--cache-config=local,size={size}'"
        )


def _check_policy(settings: Settings, certificates: bool) -> None:
    """Raises FlagError: the access policy is wrong; `certificates` is whether a port asks clients for one."""
    path = settings.access_policy
    if path is None:
        if settings.audit_log is not None:
            raise FlagError(
                "--audit-log logs what the access policy refuses and allows: it needs --access-policy"
            )
        return
    try:
        policy = read_policy(path)
    except InvalidArgumentError as error:
        raise FlagError(f"--access-policy: {error.message}") from None
    if policy.certificates and not certificates:
        raise FlagError(
            f"--access-policy: {path} names certificates of clients, which no port asks for: give "
            f"--grpc-use-ssl-mutual, --http-root-cert, --control-root-cert or --console-root-cert"
        )


def _server(settings: Settings) -> ServerOptions:
    return ServerOptions(
        server_id=settings.id,
        exit_on_error=settings.exit_on_error and not settings.reload,  # a failed model is about to be edited
        exit_without_repository=settings.exit_on_error,
        strict_readiness=settings.strict_readiness,
        exit_timeout_s=float(settings.exit_timeout_secs),
        drain_delay_s=settings.drain_delay,
        listen_while_loading=settings.listen_while_loading,
        cache=cache_options(settings.cache_config, settings.response_cache_byte_size),
        allow_model_control=settings.allow_model_control,
        allow_client_shm=settings.allow_client_shm,
        tracing=_tracing(settings),
        archives=archive_options(settings),
        access_policy=settings.access_policy,
    )


def _tracing(settings: Settings) -> TraceOptions:
    old = {flag: settings[flag] for flag in OLD_FLAGS if settings[flag]}
    try:
        return trace_options(settings.trace_config, old, without_file=bool(settings.console_port))
    except InvalidArgumentError as error:
        raise FlagError(error.message) from None


def _control(settings: Settings) -> ControlOptions:
    startup = tuple(settings.load_model)
    mode = _control_mode(settings)
    if startup and mode != "explicit":
        raise FlagError("Use of '--load-model' requires setting '--model-control-mode=explicit' as well.")
    if "*" in startup and len(startup) > 1:
        raise FlagError("Wildcard model name '*' must be the ONLY startup model if specified at all.")
    if settings.allow_model_upload and not (mode == "explicit" and settings.allow_model_control):
        raise FlagError(
            "--allow-model-upload is for clients that load models: it needs --model-control-mode=explicit "
            "and --allow-model-control"
        )
    return ControlOptions(
        repositories=(*settings.model_repository, *settings.model_store),
        mode=mode,
        startup_models=startup,
        strict_model_config=settings.disable_auto_complete_config or bool(settings.strict_model_config),
        load_threads=settings.model_load_thread_count,
        load_retries=settings.model_load_retry_count,
        max_config_bytes=settings.max_model_config_size,
        model_config_name=settings.model_config_name,
        backend_options=backend_options(settings.backend_config),
        max_queue_size=settings.max_queue_size,
        rate_limits=rate_limits(settings),
        storage=StorageOptions(
            cache_directory=settings.model_cache_directory,
            cache_bytes=settings.model_cache_byte_size,
            timeout_s=float(settings.storage_timeout_secs),
        ),
        namespacing=settings.model_namespacing,
        model_name=settings.model_name or "",
        repository_wait_s=settings.repository_wait_secs,
    )


def _control_mode(settings: Settings) -> ControlMode:
    mode = cast("ControlMode", settings.model_control_mode)
    if not settings.reload:
        return mode
    if mode not in ("none", "watch"):
        raise FlagError(
            f"--reload has the server follow its repositories itself, which is not for "
            f"--model-control-mode={mode}: leave that out"
        )
    return "watch"


def _planner(settings: Settings, mode: ControlMode) -> PlannerOptions | None:
    if mode not in ("poll", "watch"):
        return None
    settle_s = settings.repository_settle_secs
    return PlannerOptions(
        mode=mode,
        poll_s=settings.repository_poll_secs,
        # Editors save a file at once; only copying in a repository takes longer.
        settle_s=min(settle_s, _RELOAD_SETTLE_S) if settings.reload else settle_s,
        development=settings.reload,
        operations=settings.model_load_thread_count,
        max_config_bytes=settings.max_model_config_size,
        model_config_name=settings.model_config_name,
    )


def _log(settings: Settings) -> LogOptions:
    return LogOptions(
        info=settings.log_info,
        warning=settings.log_warning,
        error=settings.log_error,
        verbose=settings.log_verbose,
        format=settings.log_format,
        json=settings.log_json,
        file=settings.log_file,
        repeat_limit=settings.log_rate_limit,
        escape=os.environ.get("TRITON_SERVER_ESCAPE_LOG_MESSAGES") != "0",
        export=_export(LOGS, settings.otlp_logs_url),
    )


def _access_log(settings: Settings) -> AccessLogOptions | None:
    name = settings.access_log
    if name is None:
        return None
    return AccessLogOptions(None if name == "-" else Path(name), settings.access_log_format == "json")


def _audit_log(settings: Settings) -> AuditLogOptions | None:
    name = settings.audit_log
    return None if name is None else AuditLogOptions(None if name == "-" else Path(name))


def _metrics(settings: Settings, http: HttpOptions | None) -> MetricsOptions | None:
    if not settings.allow_metrics:
        if settings.otlp_metrics_url is not None:
            raise FlagError(
                "--otlp-metrics-url exports what the metrics port shows: it needs --allow-metrics"
            )
        return None
    tls = None
    if settings.metrics_use_ssl:
        if http is None or http.tls is None:
            raise FlagError(
                "--metrics-use-ssl takes the certificate of the REST port: it needs --http-use-ssl"
            )
        tls = http.tls.context
    try:
        config = read_settings(settings.metrics_config)
    except ValueError as error:
        raise FlagError(str(error)) from None
    return MetricsOptions(
        address=settings.metrics_address or settings.http_address,
        port=settings.metrics_port,
        cpu=settings.allow_cpu_metrics,
        gpu=settings.allow_gpu_metrics,
        interval_ms=settings.metrics_interval_ms,
        counters=config.counters,
        first_responses=config.first_responses,
        quantiles=config.quantiles,
        tls=tls,
        export=_export(METRICS, settings.otlp_metrics_url),
    )


def _export(signal: str, url: str | None) -> ExportOptions | None:
    try:
        return None if url is None else read_export(signal, [("url", url)])
    except InvalidArgumentError as error:
        raise FlagError(str(error)) from None


def _grpc(settings: Settings) -> GrpcOptions | None:
    if not settings.allow_grpc:
        return None
    try:
        restrictions = parse_restricted_protocols(settings.grpc_restricted_protocol)
    except ValueError as error:
        raise FlagError(f"--grpc-restricted-protocol: {error}") from None
    pattern = settings.grpc_header_forward_pattern
    try:
        HeaderForwarder(pattern)
    except ValueError as error:
        raise FlagError(f"--grpc-header-forward-pattern: {error}") from None
    return GrpcOptions(
        address=settings.grpc_address,
        port=settings.grpc_port,
        reuse_port=settings.reuse_grpc_port,
        pollers=settings.grpc_infer_thread_count,
        tls=_grpc_tls(settings),
        keep_alive=KeepAlive(
            time_ms=settings.grpc_keepalive_time,
            timeout_ms=settings.grpc_keepalive_timeout,
            permit_without_calls=settings.grpc_keepalive_permit_without_calls,
            max_pings_without_data=settings.grpc_http2_max_pings_without_data,
            min_recv_ping_interval_without_data_ms=settings.grpc_http2_min_recv_ping_interval_without_data,
            max_ping_strikes=settings.grpc_http2_max_ping_strikes,
        ),
        max_connection_age_ms=settings.grpc_max_connection_age,
        max_connection_age_grace_ms=settings.grpc_max_connection_age_grace,
        max_message_bytes=settings.grpc_max_message_bytes,
        limits=ConnectionLimits(
            connections=settings.grpc_max_connections,
            streams=settings.grpc_max_concurrent_streams,
            metadata_bytes=settings.grpc_max_metadata_bytes,
        ),
        # gRPC for Python has one gzip level, so Triton's three are the same here.
        compression=None if settings.grpc_infer_response_compression_level == "none" else "gzip",
        restrictions=restrictions,
        header_forward_pattern=pattern,
        allow_model_upload=settings.allow_model_upload,
        load_reports=settings.grpc_orca_load_reports,
    )


def _grpc_tls(settings: Settings) -> TlsOptions | None:
    mutual = settings.grpc_use_ssl_mutual
    if not settings.grpc_use_ssl and not mutual:
        return None
    return TlsOptions(
        private_key=contents_of(settings, "grpc-server-key", "gRPC"),
        certificate=contents_of(settings, "grpc-server-cert", "gRPC"),
        client_root=contents_of(settings, "grpc-root-cert", "gRPC") if mutual else None,
    )


def _http(settings: Settings) -> HttpOptions:
    """The options of the REST port; those of platforms begin with them, so they are built in any case."""
    try:
        restrictions = parse_restricted_apis(settings.http_restricted_api)
    except ValueError as error:
        raise FlagError(f"--http-restricted-api: {error}") from None
    pattern = settings.http_header_forward_pattern
    try:
        HeaderForwarder(pattern)
    except ValueError as error:
        raise FlagError(f"--http-header-forward-pattern: {error}") from None
    origins = frozenset(settings.http_cors_origin)
    for origin in sorted(origins - {ANY_ORIGIN}):
        if not _ORIGIN.fullmatch(origin):
            raise FlagError(
                f"--http-cors-origin: '{origin}' is no origin as browsers write it: expected a scheme, a "
                f"host and perhaps a port in lower case, such as https://app.example, or {ANY_ORIGIN} for any"
            )
    return HttpOptions(
        address=settings.http_address,
        port=settings.http_port,
        reuse_port=settings.reuse_http_port,
        tls=_http_tls(settings) if settings.allow_http else None,
        max_connections=settings.http_max_connections,
        idle_timeout_s=settings.http_idle_timeout_secs,
        max_input_bytes=settings.http_max_input_size,
        restrictions=restrictions,
        header_forward_pattern=pattern,
        allow_model_upload=settings.allow_model_upload,
        cors_origins=origins,
    )


def _http_tls(settings: Settings) -> HttpTls | None:
    if not settings.http_use_ssl:
        refuse_without(settings, "http-use-ssl", _HTTP_TLS_FILES)
        return None
    for name in _HTTP_TLS_FILES:
        if name != "http-root-cert" or settings[name] is not None:
            contents_of(settings, name, "REST")  # TLS reads it by its path
    return HttpTls(
        cast("Path", settings.http_server_cert),
        cast("Path", settings.http_server_key),
        settings.http_root_cert,
    )


def _control_port(settings: Settings) -> ControlPortOptions | None:
    options = ControlPortOptions(settings.control_address, settings.control_port)
    if not options.port and not options.is_unix:
        for name in ("control-use-ssl", "control-token-file", *_CONTROL_TLS_FILES):
            if settings[name]:
                raise FlagError(f"--{name} needs --control-port, or a Unix socket in --control-address")
        return None
    tls, token = _control_tls(settings), _control_token(settings)
    options = ControlPortOptions(
        options.address, options.port, tls, token, settings.access_policy is not None
    )
    try:
        options.check()
    except InvalidArgumentError as error:
        raise FlagError(f"--control-address: {error.message}") from None
    return options


def _control_tls(settings: Settings) -> ServerTls | None:
    if not settings.control_use_ssl:
        refuse_without(settings, "control-use-ssl", _CONTROL_TLS_FILES)
        return None
    service = "the control port"
    certificate = contents_of(settings, "control-server-cert", service)
    private_key = contents_of(settings, "control-server-key", service)
    if settings.control_root_cert is None:
        return ServerTls(private_key, certificate)
    return ServerTls(private_key, certificate, contents_of(settings, "control-root-cert", service))


def _control_token(settings: Settings) -> str | None:
    path = settings.control_token_file
    if path is None:
        return None
    try:
        return read_token(contents_of(settings, "control-token-file", "").decode(errors="replace"))
    except InvalidArgumentError as error:
        raise FlagError(f"--control-token-file: {path}: {error.message}") from None


def rate_limits(settings: Settings) -> tuple[ResourceLimit, ...] | None:
    """The resources of the rate limiter; None if it is off. Raises FlagError: a resource is malformed."""
    limits = tuple(_resource_limit(text) for text in settings.rate_limit_resource)
    return None if settings.rate_limit == "off" else limits


def _resource_limit(text: str) -> ResourceLimit:
    found = re.fullmatch(r"([^:]+):([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    if found is None:
        raise FlagError(
            f"--rate-limit-resource option format is '<resource_name>:<count>:<device>' or "
            f"'<resource_name>:<count>'. Got {text}"
        )
    name, count, device = found.groups()
    return ResourceLimit(name, int(count), None if device is None else int(device))
