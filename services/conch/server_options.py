"""The options of all parts of a server, and the checks across their settings.

Each setting is declared at the options dataclass that takes its value (`conch.core.option`); this module
lists the dataclasses, builds them from resolved settings, and refuses flags that contradict each other.
Add-ons bring theirs by the entry-point group ``conch.options``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from conch.access.policy_file import read_policy
from conch.core.add_ons import load_add_ons
from conch.core.errors import InvalidArgumentError
from conch.core.option import SECRET_OPTION, FlagError, Setting, Settings, option, settings_of
from conch.core.value_types import BOOL, DURATION, FILE, NATURAL, TEXT, ValueType
from conch.frontends.grpc.grpc_options import GrpcOptions, GrpcTlsFiles
from conch.frontends.http.http_options import HttpOptions, HttpTlsFiles
from conch.observability.logging.log_settings import AccessLogOptions, AuditLogOptions, LogOptions
from conch.observability.metrics.metrics_options import MetricsOptions
from conch.observability.tracing.trace_options import TraceFlags, TraceOptions
from conch_control.control_options import ControlOptions, PlannerOptions, RateLimitOptions
from conch_control.remote_api.connection_options import ControlPortFlags, ControlPortOptions

_RELOAD_SETTLE_S = 0.2


def _capability(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a compute capability, such as 6.0")
    return value


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The response cache, as the flags give it."""

    GROUP: ClassVar = "response cache"

    settings: tuple[str, ...] = option(
        "--cache-config",
        TEXT,
        help="<cache>,<setting>=<value>, such as local,size=1048576; see docs/cache.md",
        repeatable=True,
        secret=SECRET_OPTION,
    )
    byte_size: int | None = option(
        "--response-cache-byte-size",
        NATURAL,
        None,
        unit="bytes",
        replaced_by="cache-config=local,size=BYTES",
    )

    def by_name(self) -> Mapping[str, Mapping[str, str]]:
        """Settings by name of the cache; values may hold commas. Texts are Triton's.

        Raises:
            FlagError: One is malformed, or both flags are given.
        """
        if self.byte_size is not None:
            if self.settings:
                raise FlagError(
                    "Error: Incompatible flags --response-cache-byte-size and --cache-config both provided. "
                    "Please provide one or the other."
                )
            return {"local": {"size": str(self.byte_size)}}
        caches: dict[str, dict[str, str]] = {}
        for specification in self.settings:
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


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of the server as a whole.

    Attributes:
        server_id: Name in the metadata.
        exit_on_error: Whether a model that fails at the start ends the server.
        strict_readiness: Whether ready means that all models are ready.
        drain_delay_s: Seconds of further service after a stop was requested.
        exit_timeout_s: Seconds that open requests may take after the server stops accepting new ones.
        listen_while_loading: Whether to listen before the startup models are loaded.
        allow_client_shm: Whether clients may register shared memory.
        min_compute_capability: Least compute capability of the GPUs used.
        config_file: The file that settings were read from.
        access_policy: The policy file; None for no policy.
        allow_model_control: Whether clients of the inference ports may load and unload models.
        exit_without_repository: Whether a repository that can't be read at the start ends the server.
        cache: Settings by name of the response cache; empty for none.
        tracing: What is traced.
    """

    GROUP: ClassVar = "server"

    server_id: str = option("--id", TEXT, "triton", "name of this server in its metadata")
    exit_on_error: bool = option("--exit-on-error", BOOL, True, "exit if a model fails to load at the start")
    strict_readiness: bool = option("--strict-readiness", BOOL, True, "ready only if all models are")
    drain_delay_s: float = option(
        "--drain-delay",
        DURATION,
        0.0,
        "time to go on serving, not ready, after a stop was requested",
        unit="seconds",
    )
    exit_timeout_s: float = option(
        "--exit-timeout-secs", NATURAL, 30, "time that open requests may take after that", unit="seconds"
    )
    listen_while_loading: bool = option(
        "--listen-while-loading",
        BOOL,
        False,
        "answer probes (live, not ready) and requests for loaded models before all startup models are loaded",
    )
    allow_client_shm: bool = option(
        "--allow-client-shm",
        BOOL,
        True,
        "let clients register system and CUDA shared memory; see docs/shared-memory.md",
    )
    min_compute_capability: float = option(
        "--min-supported-compute-capability",
        ValueType("number", _capability, "float | str"),
        6.0,
        "minimum CUDA compute capability of the GPUs used",
    )
    config_file: Path | None = option("--config-file", FILE, None, "TOML file with values of these settings")
    access_policy: Path | None = option(
        "--access-policy",
        FILE,
        None,
        "TOML file with the principals that may call, on all ports, and their credentials, roles and limits; "
        "reread when it changes; see docs/access.md",
        group="access",
    )
    allow_model_control: bool = option(
        "--allow-model-control",
        BOOL,
        True,
        "let clients of the inference ports load and unload models in explicit mode",
        group="model control",
    )
    exit_without_repository: bool = True
    cache: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    tracing: TraceOptions = field(default_factory=TraceOptions)


@dataclass(frozen=True, slots=True)
class Opening:
    """What a port opens to which clients, for the sentence in log and banner.

    Attributes:
        what: What is open, such as ``inference``.
        clients: Who may use it, such as ``all clients``.
        port: Name of the port; empty where `what` says it.
    """

    what: str
    clients: str
    port: str = ""


class AddOnOptions:
    """Options of an add-on's part; a part that is off has none.

    Attributes:
        keeps_latencies: Whether it reads histograms of latencies.
        keeps_traces: Whether it reads the newest traces.
    """

    keeps_latencies: ClassVar[bool] = False
    keeps_traces: ClassVar[bool] = False

    @property
    def mutual(self) -> bool:
        """Whether the part asks clients for certificates."""
        return False

    @property
    def ports(self) -> Sequence[int]:
        """The ports it listens on."""
        return ()

    def openings(self, options: PartOptions) -> Sequence[Opening]:
        """What the part opens to which clients."""
        return ()


@dataclass(frozen=True, slots=True)
class PartOptions:
    """The options of all parts; None for a part that is off.

    Attributes:
        add_ons: Options of the add-ons' parts, by the name of their entry point.
        warnings: Warnings about settings that are deprecated or without effect.
    """

    server: ServerOptions = field(default_factory=ServerOptions)
    control: ControlOptions = field(default_factory=ControlOptions)
    planner: PlannerOptions | None = None
    grpc: GrpcOptions | None = None
    http: HttpOptions | None = None
    metrics: MetricsOptions | None = None
    control_port: ControlPortOptions | None = None
    log: LogOptions = field(default_factory=LogOptions)
    access_log: AccessLogOptions | None = None
    audit_log: AuditLogOptions | None = None
    add_ons: Mapping[str, AddOnOptions] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def control_with_counts(self) -> ControlOptions:
        """The options of the control plane, with the counts that metrics and add-ons read."""
        if self.metrics is None:
            latencies = any(each.keeps_latencies for each in self.add_ons.values())
            return replace(self.control, keep_latencies=latencies or self.control.keep_latencies)
        return replace(
            self.control,
            keep_latencies=True,
            keep_first_responses=self.metrics.latencies.first_responses,
            keep_summaries=bool(self.metrics.latencies.quantiles),
        )

    @property
    def ports(self) -> frozenset[int]:
        """The ports to listen on, without those that may be any free one."""
        own = [each.port for each in (self.grpc, self.http, self.metrics, self.control_port) if each]
        return frozenset([*own, *(port for each in self.add_ons.values() for port in each.ports)]) - {0}


class AddOnSettings:
    """Settings of an add-on: a dataclass with `option` fields, named by an entry point of ``conch.options``.

    Attributes:
        AFTER: Headings in the help that its own come behind, by its own; others come last.
        PROTOCOLS: Its ports: name in texts, and beginning of the settings, as in ``allow_http``.
        FLAGS_VARIABLE: An environment variable with flags; empty for none.
    """

    AFTER: ClassVar[Mapping[str, str]] = {}
    PROTOCOLS: ClassVar[Mapping[str, str]] = {}
    FLAGS_VARIABLE: ClassVar[str] = ""

    @classmethod
    def detect(cls, environment: Mapping[str, str], given: Mapping[str, Any]) -> Detected:
        """The defaults of settings that follow from where the server runs.

        Args:
            environment: The environment variables.
            given: Values of the settings that flags, variables of conch or a file give, by key.

        Raises:
            FlagError: The server can't run there; the text says why.
        """
        return Detected()

    def check(self, settings: Settings) -> None:
        """Checks settings where they are read, by `conch config` too. Raises FlagError: one is wrong."""

    def add_to(self, options: PartOptions, settings: Settings) -> PartOptions:
        """The options of all parts with those of the add-on. Raises FlagError: settings are wrong."""
        return options


@dataclass(frozen=True, slots=True)
class Detected:
    """What an add-on found out about the place where the server runs.

    Attributes:
        title: Name of the place, such as ``SageMaker``.
        defaults: Defaults by key of the setting: texts, and their reason.
        notes: What operators should know.
        warnings: Variables without effect.
    """

    title: str = ""
    defaults: Mapping[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


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
    _refused("instances are not bound to processors", "--host-policy"),
    # Any value holds: no pool exceeds its limit, GPUs exchange nothing directly, and caches and repository
    # agents are built in (others are refused by name).
    _ignored("--pinned-memory-pool-byte-size", NATURAL),
    _ignored("--cuda-memory-pool-byte-size", ValueType("size", _pool)),
    _ignored("--grpc-infer-allocation-pool-size", NATURAL),
    _ignored("--enable-peer-access", BOOL),
    _ignored("--cache-directory", TEXT),
    _ignored("--repoagent-directory", TEXT),
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
        server=replace(server, tracing=tracing),
        metrics=_metrics(settings, http, options.http),
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


def _check_policy(options: PartOptions) -> None:
    """Raises FlagError: the access policy is wrong, or asks for certificates that no port asks for."""
    path = options.server.access_policy
    if path is None:
        if options.audit_log is not None:
            raise FlagError(
                "--audit-log logs what the access policy refuses and allows: it needs --access-policy"
            )
        return
    try:
        policy = read_policy(path)
    except InvalidArgumentError as error:
        raise FlagError(f"--access-policy: {error.message}") from None
    ports = (options.grpc, options.http, options.control_port, *options.add_ons.values())
    if policy.certificates and not any(each is not None and each.mutual for each in ports):
        raise FlagError(
            f"--access-policy: {path} names certificates of clients, which no port asks for: give "
            f"--grpc-use-ssl-mutual, --http-root-cert, --control-root-cert or --console-root-cert"
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
    startup, explicit = options.startup_models, options.mode == "explicit"
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


def _metrics(settings: Settings, rest: HttpOptions, http: HttpOptions | None) -> MetricsOptions | None:
    """The options of the metrics port; `rest` are those of the REST port if it were on."""
    if not settings.is_on(MetricsOptions):
        if settings["otlp-metrics-url"] is not None:
            raise FlagError(
                "--otlp-metrics-url exports what the metrics port shows: it needs --allow-metrics"
            )
        return None
    if settings["metrics-use-ssl"] and (http is None or http.tls is None):
        raise FlagError("--metrics-use-ssl takes the certificate of the REST port: it needs --http-use-ssl")
    options = settings.build(MetricsOptions)
    if not settings["metrics-address"]:
        options = replace(options, address=rest.address)
    if options.use_ssl and rest.tls is not None:
        options = replace(options, tls=rest.tls.context)
    return options
