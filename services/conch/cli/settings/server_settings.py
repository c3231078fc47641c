"""Settings of the server as a whole, of logs and metrics, and Triton flags without a use here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from conch.cli.settings.setting import Setting, SettingGroup, optional, repeatable, setting
from conch.cli.settings.value_types import (
    ANY_PORT,
    BOOL,
    CAPABILITY,
    DURATION,
    FILE,
    NATURAL,
    POOL,
    POSITIVE,
    TEXT,
    ValueType,
)

SECRET_OPTION = re.compile(r"(?i).*?(password|secret|token|credential|key)[^=]*=")
"""An option such as ``redis,password=``; the rest is hidden."""


class ServerSettings(SettingGroup):
    """Identity, readiness and stop."""

    title = "server"
    id = setting(TEXT, "triton", "name of this server in its metadata")
    exit_on_error = setting(BOOL, True, "exit if a model fails to load at the start")
    strict_readiness = setting(BOOL, True, "ready only if all models are")
    drain_delay = setting(
        DURATION, 0.0, "time to go on serving, not ready, after a stop was requested", unit="seconds"
    )
    exit_timeout_secs = setting(NATURAL, 30, "time that open requests may take after that", unit="seconds")
    listen_while_loading = setting(
        BOOL,
        False,
        "answer probes (live, not ready) and requests for loaded models before all startup models are loaded",
    )
    allow_client_shm = setting(
        BOOL, True, "let clients register system and CUDA shared memory; see docs/shared-memory.md"
    )
    min_supported_compute_capability = setting(
        CAPABILITY, 6.0, "minimum CUDA compute capability of the GPUs used"
    )
    config_file = optional(FILE, "TOML file with values of these settings")


class CacheSettings(SettingGroup):
    """The response cache."""

    title = "response cache"
    cache_config = repeatable(
        TEXT,
        "<cache>,<setting>=<value>, such as local,size=1048576; see docs/cache.md",
        secret=SECRET_OPTION,
    )
    response_cache_byte_size = optional(NATURAL, unit="bytes", replaced_by="cache-config=local,size=BYTES")


class RateLimitSettings(SettingGroup):
    """The rate limiter."""

    title = "rate limiter"
    rate_limit = setting(
        TEXT,
        "off",
        "execution_count: instances run while the resources of their config are free, those first that have "
        "run least by their priority; off: resources are ignored",
        choices=("off", "execution_count"),
    )
    rate_limit_resource = repeatable(
        TEXT,
        "<name>:<count>[:<device>], how much of a resource exists; without any, as much as the largest "
        "instance needs",
    )


class LogSettings(SettingGroup):
    """The server log; in `conch.Server` the program configures it."""

    title = "log"
    log_verbose = setting(NATURAL, 0, "level of verbose logging", scope="process")
    log_info = setting(BOOL, True, "log information", scope="process")
    log_warning = setting(BOOL, True, "log warnings", scope="process")
    log_error = setting(BOOL, True, "log errors", scope="process")
    log_format = setting(
        TEXT, "default", "time format of text logs", choices=("default", "ISO8601"), scope="process"
    )
    log_file = optional(FILE, "file to log to instead of standard error; SIGHUP reopens it", scope="process")
    log_json = optional(BOOL, "log JSON; without it JSON unless on a terminal", scope="process")
    log_rate_limit = setting(
        NATURAL,
        100,
        "maximum warnings or errors per second of one place in the code, or messages of one place in a "
        "Python model; the rest is counted and the count is logged; 0 for no limit",
        scope="process",
    )
    otlp_logs_url = optional(
        TEXT,
        "OpenTelemetry collector to send the log to as well, such as http://localhost:4318/v1/logs",
        scope="process",
    )


class AccessLogSettings(SettingGroup):
    """The access log."""

    title = "access log"
    access_log = optional(TEXT, "file to log each request to, or - for standard output")
    access_log_format = setting(TEXT, "json", "format of the access log", choices=("json", "text"))


class TraceSettings(SettingGroup):
    """Traces of requests."""

    title = "traces"
    trace_config = repeatable(
        TEXT,
        "<setting>=<value> or <mode>,<setting>=<value>, such as level=TIMESTAMPS, rate=100, "
        "triton,file=trace.json, mode=opentelemetry; see docs/tracing.md",
        secret=SECRET_OPTION,
    )
    trace_file = repeatable(TEXT, replaced_by="trace-config=triton,file=PATH")
    trace_level = repeatable(TEXT, replaced_by="trace-config=level=LEVEL")
    trace_rate = repeatable(TEXT, replaced_by="trace-config=rate=N")
    trace_count = repeatable(TEXT, replaced_by="trace-config=count=N")
    trace_log_frequency = repeatable(TEXT, replaced_by="trace-config=triton,log-frequency=N")


class MetricsSettings(SettingGroup):
    """The metrics port."""

    title = "metrics"
    allow_metrics = setting(BOOL, True, "serve metrics")
    allow_gpu_metrics = setting(BOOL, True, "include metrics of GPUs, if pynvml is installed")
    allow_cpu_metrics = setting(BOOL, True, "include metrics of the machine's processors and memory")
    metrics_address = optional(TEXT, "address for metrics; without it that of --http-address")
    metrics_port = setting(ANY_PORT, 8002, "port for metrics; 0 for any free one")
    metrics_use_ssl = setting(
        BOOL,
        False,
        "serve metrics over TLS, with the certificates of the REST port and, with --http-root-cert, for "
        "clients that have one; needs --http-use-ssl",
    )
    metrics_interval_ms = setting(
        POSITIVE, 2000, "minimum time between reads of processors, memory and GPUs", unit="milliseconds"
    )
    otlp_metrics_url = optional(
        TEXT,
        "OpenTelemetry collector to send metrics to as well, such as http://localhost:4318/v1/metrics; every "
        "60 s, or as OTEL_METRIC_EXPORT_INTERVAL says",
    )
    metrics_config = repeatable(
        TEXT,
        "<setting>=<value>: counter_latencies=false stops Triton's counters, summary_latencies=true adds "
        "summaries",
    )


def _ignored(name: str, kind: ValueType[Any]) -> Setting[Any]:
    return Setting(kind, None, repeatable=True, listed=False, key=name)


def _refused(reason: str, **harmless: tuple[str, ...]) -> Iterator[Setting[Any]]:
    for key, values in harmless.items():
        yield Setting(
            TEXT,
            None,
            choices=values,
            repeatable=True,
            unsupported=reason,
            listed=False,
            key=key,
        )


UNSUPPORTED: tuple[Setting[Any], ...] = (
    *_refused("states of sequences do not grow in place", cuda_virtual_address_size=()),
    *_refused("responses have no pool", grpc_max_response_pool_size=(str(2**31 - 1),)),
    *_refused("tensors are copied by the threads that need them", buffer_manager_thread_count=("0",)),
    *_refused("loads do not look at the memory of GPUs", model_load_gpu_limit=()),
    *_refused("instances are not bound to processors", host_policy=()),
    # Any value holds: no pool exceeds its limit, GPUs exchange nothing directly, and caches and repository
    # agents are built in (others are refused by name).
    _ignored("pinned_memory_pool_byte_size", NATURAL),
    _ignored("cuda_memory_pool_byte_size", POOL),
    _ignored("grpc_infer_allocation_pool_size", NATURAL),
    _ignored("enable_peer_access", BOOL),
    _ignored("cache_directory", TEXT),
    _ignored("repoagent_directory", TEXT),
)
