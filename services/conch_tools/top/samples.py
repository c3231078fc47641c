"""Reads a metrics port: the series of `conch top` at one time."""

from __future__ import annotations

import http
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from conch_tools.connection import Endpoint
from conch_tools.server_api import AskError, http_get

_PATH = "/metrics"
_TIMEOUT_S = 5.0
_NAMES = frozenset(
    (
        "nv_inference_request_success",
        "nv_inference_request_failure",
        "nv_inference_count",
        "nv_inference_exec_count",
        "nv_inference_request_duration_us",
        "nv_inference_queue_duration_us",
        "nv_inference_pending_request_count",
        "conch_request_duration_seconds_bucket",
        "conch_running_requests",
        "conch_saturation",
        "conch_workers",
        "conch_worker_restarts_total",
        "conch_ready",
        "conch_model_versions",
        "conch_model_load_failed",
        "nv_cpu_memory_total_bytes",
        "nv_cpu_memory_used_bytes",
        "nv_gpu_utilization",
        "nv_gpu_memory_total_bytes",
        "nv_gpu_memory_used_bytes",
        "process_cpu_seconds_total",
        "process_resident_memory_bytes",
        "process_start_time_seconds",
    )
)

Series = Sequence[tuple[Mapping[str, str], float]]
"""Labels and values of one metric."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The metrics of a server at one time.

    Attributes:
        at_s: Time of the read, by a monotonic clock.
        series: By name; those that `conch top` shows.
    """

    at_s: float
    series: Mapping[str, Series]

    def value(self, name: str) -> float | None:
        """Value of a metric without labels; None if the server has no such metric."""
        series = self.series.get(name)
        return series[0][1] if series else None


def read_sample(endpoint: Endpoint) -> Sample:
    """Reads the metrics of a server.

    Raises:
        AskError: The server can't be reached, or the port is no metrics port.
    """
    status, body = http_get(endpoint, _PATH, _TIMEOUT_S)
    at_s = time.monotonic()
    if status != http.HTTPStatus.OK:
        raise AskError(f"{endpoint.url}{_PATH}: HTTP {status}", True)
    try:
        sample = parse_sample(body.decode(), at_s)
    except ValueError:
        raise AskError(f"{endpoint.url}{_PATH} is not in Prometheus' format", True) from None
    return sample


def parse_sample(text: str, at_s: float) -> Sample:
    """Reads Prometheus' text format. Raises ValueError."""
    # Most lines are buckets of histograms that are not shown, and parsing a line is slow.
    lines = [line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] in _NAMES]
    series = defaultdict(list)
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            series[sample.name].append((sample.labels, sample.value))
    return Sample(at_s, series)
