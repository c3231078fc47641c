"""The options of all parts of a server, and what the options and settings of add-ons derive from."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from conch.frontends.grpc.grpc_options import GrpcOptions
from conch.frontends.http.http_options import HttpOptions
from conch.observability.logging.log_settings import AccessLogOptions, AuditLogOptions, LogOptions
from conch.observability.metrics.metrics_options import MetricsOptions
from conch.observability.tracing.trace_options import TraceOptions
from conch.settings.option import SECRET_OPTION, FlagError, Settings, option
from conch.settings.value_types import BOOL, DURATION, FILE, NATURAL, TEXT, ValueType
from conch_control.control_options import ControlOptions, PlannerOptions
from conch_control.remote_api.connection_options import ControlPortOptions

if TYPE_CHECKING:
    from conch_control.lifecycle.residency import ResidencyKind

AUTOMATIC = "auto"
"""The value of ``--front-ends`` that follows the cores."""
_CORES_PER_FRONT = 4
_MOST_AUTOMATIC = 8
_MOST_FRONT_ENDS = 64


def _front_ends(text: str) -> int:
    if text == AUTOMATIC:
        from conch.core.process_setup import usable_cores

        return min(usable_cores() // _CORES_PER_FRONT, _MOST_AUTOMATIC)
    if not text.isdecimal() or not text.isascii() or int(text) > _MOST_FRONT_ENDS:
        raise FlagError(f"--front-ends must be '{AUTOMATIC}' or from 0 to {_MOST_FRONT_ENDS}, got '{text}'")
    return int(text)


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
        exit_on_error: True if a model that fails at the start ends the server.
        strict_readiness: True if ready means that all models are ready.
        drain_delay_s: Seconds of further service after a stop was requested.
        exit_timeout_s: Seconds that open requests may take after the server stops accepting new ones.
        listen_while_loading: True to listen before the startup models are loaded.
        front_ends: Number of front processes; with 0 the connections are the server's own.
        allow_client_shm: True if clients may register shared memory.
        min_compute_capability: Least compute capability of the GPUs used.
        config_file: The file that settings were read from.
        access_policy: The policy file; None for no policy.
        allow_model_control: True if clients of the inference ports may load and unload models.
        received_bytes: Limit of the bytes of requests that the server holds; 0 for a share of memory.
        exit_without_repository: True if a repository that can't be read at the start ends the server.
        cache: Settings by name of the response cache; empty for none.
        tracing: Settings of tracing.
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
    front_ends: int = option(
        "--front-ends",
        TEXT,
        "0",
        "front processes that own the connections of gRPC and HTTP ports for clients: a number, 0 to serve "
        "them in the server's own process, or auto for a quarter of the cores or of a container's CPU limit, "
        "at most 8; not with grpcio, where auto is 0",
        convert=_front_ends,
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
        "let clients of the inference ports load and unload models in explicit mode, and change rollouts in "
        "all modes",
        group="model control",
    )
    received_bytes: int = option(
        "--grpc-max-received-bytes",
        NATURAL,
        0,
        "maximum bytes of the requests that the server holds, of gRPC and HTTP, from their first byte until "
        "they are answered; further ones are refused, unless it holds nothing else; 0 for a quarter of "
        "memory, at least 1 GiB",
        unit="bytes",
        group="gRPC",
    )
    exit_without_repository: bool = True
    cache: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    tracing: TraceOptions = field(default_factory=TraceOptions)


@dataclass(frozen=True, slots=True)
class Opening:
    """Function that a port opens to clients, for the sentence in log and banner.

    Attributes:
        what: The function, such as ``inference``.
        clients: Clients that may use it, such as ``all clients``.
        port: Name of the port; empty where `what` says it.
    """

    what: str
    clients: str
    port: str = ""


class AddOnOptions:
    """Options of an add-on's part; a part that is off has none.

    Attributes:
        keeps_latencies: True if it reads histograms of latencies.
        keeps_traces: True if it reads the newest traces.
        for_clients: True if its ports are for requests to models.
    """

    for_clients: ClassVar[bool] = False
    keeps_latencies: ClassVar[bool] = False
    keeps_traces: ClassVar[bool] = False

    @property
    def mutual(self) -> bool:
        """True if the part requires certificates of clients."""
        return False

    @property
    def ports(self) -> Sequence[int]:
        """The ports it listens on."""
        return ()

    def openings(self, options: PartOptions) -> Sequence[Opening]:
        """Functions that the part opens, with their clients."""
        return ()


@dataclass(frozen=True, slots=True)
class PartOptions:
    """The options of all parts; None for a part that is off.

    Attributes:
        add_ons: Options of the add-ons' parts, by the name of their entry point.
        residency: Settings of the residency; None for models that stay in memory.
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
    residency: ResidencyKind | None = None
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
    """Findings of an add-on about the place where the server runs.

    Attributes:
        title: Name of the place, such as ``SageMaker``.
        defaults: Defaults by key of the setting: texts, and their reason.
        notes: Facts for operators.
        warnings: Variables without effect.
    """

    title: str = ""
    defaults: Mapping[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
