"""All settings of a server: lists the dataclasses that declare them, and checks across their settings.

Each setting is declared at the options dataclass that takes its value (`conch.settings.option`); this module
lists the dataclasses, builds them from resolved settings, and refuses flags that contradict each other.
Add-ons bring theirs by the entry-point group ``conch.options``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from conch.core.add_ons import load_add_ons
from conch.core.errors import InvalidArgumentError
from conch.frontends.grpc.grpc_options import OWN, GrpcOptions, GrpcTlsFiles
from conch.frontends.http.http_options import HttpOptions, HttpTls, HttpTlsFiles, SharedTlsFiles
from conch.observability.logging.log_settings import AccessLogOptions, AuditLogOptions, LogOptions
from conch.observability.metrics.metrics_options import MetricsOptions
from conch.observability.tracing.trace_options import TraceFlags, TraceOptions
from conch.server_options import (
    AUTOMATIC,
    AddOnSettings,
    CacheOptions,
    PartOptions,
    ServerOptions,
)
from conch.settings.option import FlagError, Setting, Settings, settings_of
from conch.settings.value_types import BOOL, NATURAL, TEXT, ValueType, integer
from conch_control.control_options import (
    ControlOptions,
    PlannerOptions,
    RateLimitOptions,
)
from conch_control.remote_api.connection_options import ControlPortFlags

_RELOAD_SETTLE_S = 0.2

ADD_ONS: Mapping[str, type[AddOnSettings]] = load_add_ons("conch.options")
_OWN: tuple[type[Any], ...] = (
    ControlOptions,
    PlannerOptions,
    ServerOptions,
    CacheOptions,
    RateLimitOptions,
    GrpcOptions,
    GrpcTlsFiles,
    HttpOptions,
    HttpTlsFiles,
    SharedTlsFiles,
    AuditLogOptions,
    ControlPortFlags,
    LogOptions,
    AccessLogOptions,
    TraceFlags,
    MetricsOptions,
)


def _refused(reason: str, flag: str, *harmless: str) -> Setting[Any]:
    return Setting(flag, TEXT, None, choices=harmless, repeatable=True, unsupported=reason, listed=False)


def _ignored(flag: str, kind: ValueType[Any]) -> Setting[Any]:
    return Setting(flag, kind, None, repeatable=True, listed=False)


def _pool(text: str) -> str:
    device, _, size = text.rpartition(":")
    for part in (device or "0", size):
        NATURAL.parse(part)
    return text


_UNSUPPORTED = (
    _refused("states of sequences do not grow in place", "--cuda-virtual-address-size"),
    _refused("responses have no pool", "--grpc-max-response-pool-size", str(2**31 - 1)),
    _refused("tensors are copied by the threads that need them", "--buffer-manager-thread-count", "0"),
    _refused("loads do not look at the memory of GPUs", "--model-load-gpu-limit"),
    # Any value holds: no pool exceeds its limit, GPUs exchange nothing directly, one thread serves all gRPC
    # connections, and caches are built in (others are refused by name).
    _ignored("--pinned-memory-pool-byte-size", NATURAL),
    _ignored("--cuda-memory-pool-byte-size", ValueType("size", _pool)),
    _ignored("--grpc-infer-allocation-pool-size", NATURAL),
    _ignored("--grpc-infer-thread-count", integer(1, 128)),
    _ignored("--enable-peer-access", BOOL),
    _ignored("--cache-directory", TEXT),
)
"""Triton's flags without a use here."""


_TITLES = (
    "model repositories",
    "model control",
    "model loading",
    "server",
    "response cache",
    "rate limiter",
    "gRPC",
    "gRPC TLS",
    "gRPC connections",
    "HTTP",
    "HTTP TLS",
    "TLS of all ports",
    "access",
    "control port",
    "log",
    "access log",
    "traces",
    "metrics",
)
"""Headings of the help, in order."""


def _groups() -> Mapping[str, Sequence[Setting[Any]]]:
    titles = list(_TITLES)
    for add_on in ADD_ONS.values():
        for title, before in add_on.AFTER.items():
            titles.insert(titles.index(before) + 1, title)
    found: dict[str, list[Setting[Any]]] = {title: [] for title in titles}
    for cls in (*_OWN, *ADD_ONS.values()):
        for each in settings_of(cls):
            found.setdefault(each.group, []).append(each)
    return found


GROUPS: Mapping[str, Sequence[Setting[Any]]] = _groups()
"""The settings by heading."""
SETTINGS: tuple[Setting[Any], ...] = (*(each for group in GROUPS.values() for each in group), *_UNSUPPORTED)
"""All settings."""


def build_options(settings: Settings) -> PartOptions:
    """Builds the options of all parts.

    Raises:
        FlagError: A value is malformed, a file can't be read, or settings contradict each other.
    """
    control = _control(settings)
    shared_tls = _shared_tls(settings)
    grpc = GrpcOptions.from_settings(settings)
    server = _server(settings)
    http = HttpOptions.from_settings(settings)
    options = PartOptions(
        server=server,
        control=control,
        planner=_planner(settings, control),
        grpc=grpc,
        http=http if settings.is_on(HttpOptions) else None,
        control_port=settings.build(ControlPortFlags).options(server.access_policy is not None),
        log=_log(settings),
        access_log=None if settings["access-log"] is None else settings.build(AccessLogOptions),
        audit_log=None if settings["audit-log"] is None else settings.build(AuditLogOptions),
    )
    for add_on in ADD_ONS.values():
        options = settings.build(add_on).add_to(options, settings)
    tracing = _tracing(settings, any(each.keeps_traces for each in options.add_ons.values()))
    _check_policy(options)
    return replace(
        options,
        server=replace(server, tracing=tracing, front_ends=_front_ends(options, settings)),
        metrics=_metrics(settings, http, options.http, shared_tls),
        warnings=(*_deprecations(settings), *tracing.warnings),
    )


def _deprecations(settings: Settings) -> Iterator[str]:
    """Triton's warnings of its deprecated flags, but those of traces."""
    strict, size = settings["strict-model-config"], settings["response-cache-byte-size"]
    if strict is not None:
        yield (
            "'--strict-model-config' has been deprecated! Please use '--disable-auto-complete-config' "
            "instead."
        )
        if not strict and settings["disable-auto-complete-config"]:
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


def _front_ends(options: PartOptions, settings: Settings) -> int:
    """The number of front processes. Raises FlagError: they would have no connections."""
    further = any(each.for_clients and each.ports for each in options.add_ons.values())
    if options.grpc is not None and options.grpc.transport != OWN:
        missing = "--grpc-transport=own"
    elif options.grpc is not None or options.http is not None or further:
        return options.server.front_ends
    else:
        missing = "a port for clients, such as --allow-grpc or --allow-http"
    if options.server.front_ends and settings["front-ends"] != AUTOMATIC:
        raise FlagError(f"--front-ends needs {missing}")
    return 0


def _check_policy(options: PartOptions) -> None:
    """Raises FlagError: the access policy is wrong, or asks for certificates that no port asks for."""
    path = options.server.access_policy
    if path is None:
        if options.audit_log is not None:
            raise FlagError(
                "--audit-log logs what the access policy refuses and allows: it needs --access-policy"
            )
        return
    from conch.access.policy_file import read_policy

    try:
        policy = read_policy(path)
    except InvalidArgumentError as error:
        raise FlagError(f"--access-policy: {error.message}") from None
    ports = (options.grpc, options.http, options.control_port, *options.add_ons.values())
    if policy.certificates and not any(each is not None and each.mutual for each in ports):
        raise FlagError(
            f"--access-policy: {path} names certificates of clients, which no port asks for: give "
            f"--tls-client-ca, --grpc-use-ssl-mutual, --http-root-cert, --control-root-cert or "
            f"--console-root-cert"
        )


def _server(settings: Settings) -> ServerOptions:
    options = settings.build(ServerOptions)
    return replace(
        options,
        exit_on_error=options.exit_on_error
        and not settings["reload"],  # a failed model is about to be edited
        exit_without_repository=options.exit_on_error,
        cache=settings.build(CacheOptions).by_name(),
    )


def _tracing(settings: Settings, without_file: bool) -> TraceOptions:
    try:
        return settings.build(TraceFlags).options(without_file)
    except InvalidArgumentError as error:
        raise FlagError(error.message) from None


def _control(settings: Settings) -> ControlOptions:
    options = settings.build(ControlOptions, rate_limits=settings.build(RateLimitOptions).limits)
    if options.development:
        if options.mode not in ("none", "watch"):
            raise FlagError(
                f"--reload has the server follow its repositories itself, which is not for "
                f"--model-control-mode={options.mode}: leave that out"
            )
        options = replace(options, mode="watch")
    startup, explicit = options.startup_models, options.loads_by_name
    if startup and not explicit:
        raise FlagError("Use of '--load-model' requires setting '--model-control-mode=explicit' as well.")
    if "*" in startup and len(startup) > 1:
        raise FlagError("Wildcard model name '*' must be the ONLY startup model if specified at all.")
    if settings["allow-model-upload"] and not (explicit and settings["allow-model-control"]):
        raise FlagError(
            "--allow-model-upload is for clients that load models: it needs --model-control-mode=explicit "
            "and --allow-model-control"
        )
    return options


def _planner(settings: Settings, control: ControlOptions) -> PlannerOptions | None:
    if control.mode not in ("poll", "watch"):
        return None
    options = settings.build(
        PlannerOptions,
        mode=control.mode,
        development=control.development,
        operations=control.load_threads,
        max_config_bytes=control.max_config_bytes,
        model_config_name=control.model_config_name,
    )
    if not control.development:
        return options
    # Editors save a file at once; only copying in a repository takes longer.
    return replace(options, settle_s=min(options.settle_s, _RELOAD_SETTLE_S))


def _log(settings: Settings) -> LogOptions:
    return settings.build(LogOptions, escape=os.environ.get("TRITON_SERVER_ESCAPE_LOG_MESSAGES") != "0")


def _shared_tls(settings: Settings) -> HttpTls | None:
    """TLS of ports without files of their own. Raises FlagError: a file can't be read."""
    files = settings.build(SharedTlsFiles, use_ssl=True)
    return None if files.certificate is None else files.checked("all ports")


def _metrics(
    settings: Settings, rest: HttpOptions, http: HttpOptions | None, shared_tls: HttpTls | None
) -> MetricsOptions | None:
    """The options of the metrics port; `rest` are those of the REST port if it were on."""
    if not settings.is_on(MetricsOptions):
        if settings["otlp-metrics-url"] is not None:
            raise FlagError(
                "--otlp-metrics-url exports what the metrics port shows: it needs --allow-metrics"
            )
        return None
    tls = shared_tls if http is None or http.tls is None else http.tls
    if settings["metrics-use-ssl"] and tls is None:
        raise FlagError("--metrics-use-ssl takes the certificate of the REST port: it needs --http-use-ssl")
    options = settings.build(MetricsOptions)
    if not settings["metrics-address"]:
        options = replace(options, address=rest.address)
    if options.use_ssl and tls is not None:
        options = replace(options, tls=tls.context, mutual=tls.client_root is not None)
    return options
