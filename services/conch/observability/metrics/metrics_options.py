"""Options of the metrics port, and the parser of ``--metrics-config``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from conch.core.errors import InvalidArgumentError
from conch.settings.option import Setting, option
from conch.settings.value_types import ANY_PORT, BOOL, POSITIVE, TEXT

if TYPE_CHECKING:
    from ssl import SSLContext

    from conch.observability.exporters import ExportOptions

_BOOLEANS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
_COUNTERS = "counter_latencies"
_FIRST_RESPONSES = "histogram_latencies"
_SUMMARIES = "summary_latencies"
_QUANTILES_KEY = "summary_quantiles"
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_QUANTILES: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class LatencyMetrics:
    """The values of ``--metrics-config``.

    Attributes:
        counters: True if Triton's counters count; else durations are left out and the others stay 0.
        first_responses: True to include Triton's histogram of first responses.
        quantiles: Quantiles of Triton's summaries; empty for no summaries.
    """

    counters: bool = True
    first_responses: bool = False
    quantiles: tuple[float, ...] = ()


def read_latency_metrics(settings: Iterable[str]) -> LatencyMetrics:
    """Parses Triton's ``--metrics-config``, texts of the form ``<setting>=<value>``.

    Raises:
        InvalidArgumentError: One is malformed or unknown; the text says which.
    """
    wanted = {_COUNTERS: True, _FIRST_RESPONSES: False, _SUMMARIES: False}
    quantiles = _QUANTILES
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not (key and equals and value) or "," in key:
            raise InvalidArgumentError(
                f"--metrics-config option format is '<setting>=<value>'. Got {setting}"
            )
        if key == _QUANTILES_KEY:
            quantiles = _read_quantiles(value)
            continue
        if key not in wanted:
            known = ", ".join((*wanted, _QUANTILES_KEY))
            raise InvalidArgumentError(f"--metrics-config: unknown setting '{key}'; there are {known}")
        on = _BOOLEANS.get(value.lower())
        if on is None:
            raise InvalidArgumentError(f"--metrics-config: {key} must be true or false, got '{value}'")
        wanted[key] = on
    return LatencyMetrics(
        wanted[_COUNTERS], wanted[_FIRST_RESPONSES], quantiles if wanted[_SUMMARIES] else ()
    )


def _read_quantiles(value: str) -> tuple[float, ...]:
    """The quantiles of ``<quantile>:<error>`` pairs; conch's error is below any requested one."""
    found: set[float] = set()
    for pair in value.split(","):
        quantile, _, error = pair.partition(":")
        if not all(0 <= _leading_number(text) <= 1 for text in (quantile, error)):
            raise InvalidArgumentError(
                f"--metrics-config: {_QUANTILES_KEY} must be <quantile>:<error>,..., both from 0 to 1, got "
                f"'{value}'"
            )
        found.add(_leading_number(quantile))
    return tuple(sorted(found))


def _leading_number(text: str) -> float:
    """The number at the start of a text, as C++ parses it (``0.0.1`` is 0.0); -1 for none."""
    found = _NUMBER.match(text)
    return -1.0 if found is None else float(found[0])


def _metrics_export(url: str) -> ExportOptions:
    from conch.observability.exporters import METRICS, read_export

    return read_export(METRICS, [("url", url)])


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsOptions:
    """Options of the metrics port.

    Attributes:
        port: Port to listen on; 0 for any free one.
        cpu: True to include processors and memory of the machine.
        gpu: True to include GPUs.
        interval_ms: Minimum milliseconds between reads of those two.
        latencies: Kinds of latency metrics to serve.
        use_ssl: True to serve TLS.
        tls: Makes the TLS context, that of the REST port or of all ports; None for plain text.
        mutual: True if clients must have a certificate.
        export: Options of the export of metrics; None for none.
    """

    GROUP: ClassVar = "metrics"
    SWITCH: ClassVar = Setting("--allow-metrics", BOOL, True, "serve metrics")

    gpu: bool = option("--allow-gpu-metrics", BOOL, True, "include metrics of GPUs, if pynvml is installed")
    cpu: bool = option(
        "--allow-cpu-metrics", BOOL, True, "include metrics of the machine's processors and memory"
    )
    address: str = option(
        "--metrics-address",
        TEXT,
        "0.0.0.0",
        "address for metrics; without it that of --http-address",
        optional=True,
    )
    port: int = option("--metrics-port", ANY_PORT, 8002, "port for metrics; 0 for any free one")
    use_ssl: bool = option(
        "--metrics-use-ssl",
        BOOL,
        False,
        "serve metrics over TLS, with the certificates of the REST port and, with --http-root-cert, for "
        "clients that have one; needs --http-use-ssl or --tls-cert",
    )
    tls: Callable[[], SSLContext] | None = None
    mutual: bool = False
    interval_ms: int = option(
        "--metrics-interval-ms",
        POSITIVE,
        2000,
        "minimum time between reads of processors, memory and GPUs",
        unit="milliseconds",
    )
    export: ExportOptions | None = option(
        "--otlp-metrics-url",
        TEXT,
        None,
        "OpenTelemetry collector to send metrics to as well, such as http://localhost:4318/v1/metrics; every "
        "60 s, or as OTEL_METRIC_EXPORT_INTERVAL says",
        convert=_metrics_export,
    )
    latencies: LatencyMetrics = option(
        "--metrics-config",
        TEXT,
        help="<setting>=<value>: counter_latencies=false stops Triton's counters, summary_latencies=true "
        "adds summaries",
        repeatable=True,
        convert=read_latency_metrics,
    )

    @property
    def reuse_port(self) -> bool:
        """Always false: the port is not shared."""
        return False

    @property
    def target(self) -> str:
        """The address as Triton writes it."""
        bare = ":" in self.address and not self.address.startswith("[")
        return f"[{self.address}]:{self.port}" if bare else f"{self.address}:{self.port}"
