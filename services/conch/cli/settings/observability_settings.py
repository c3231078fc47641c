"""Settings of the logs and of the metrics."""

from __future__ import annotations

from conch.cli.settings.setting import SettingGroup, optional, repeatable, setting
from conch.cli.settings.value_types import ANY_PORT, BOOL, FILE, NATURAL, POSITIVE, TEXT


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


class AccessLogSettings(SettingGroup):
    """The access log."""

    title = "access log"
    access_log = optional(TEXT, "file to log each request to, or - for standard output")
    access_log_format = setting(TEXT, "json", "format of the access log", choices=("json", "text"))


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
    metrics_config = repeatable(
        TEXT,
        "<setting>=<value>: counter_latencies=false stops Triton's counters, summary_latencies=true adds "
        "summaries",
    )
