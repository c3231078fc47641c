"""`MetricsExport`: sends what a scrape would show to an OpenTelemetry collector, at intervals.

The thread `conch-metrics-export` asks for a scrape and makes metrics of it; `BatchExporter` sends them.
Threads and locks: `start` and `close` from one thread. Used by: `metrics_port`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from conch.observability.metrics.metrics_exposition import GilYielder
from conch.observability.otlp.batch_exporter import BatchExporter, missing_package
from conch.observability.otlp.endpoint import OtlpEndpoint, QueueLimits, server_resource

if TYPE_CHECKING:
    from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

log = logging.getLogger(__name__)

_LIMITS = QueueLimits(queue_size=200_000, batch_size=5000, delay_s=0.0)


class MetricsExport:
    """Exports metrics.

    Args:
        endpoint: Where to.
        interval_s: Between exports.
        scrape: Gives Prometheus' text; may raise.

    Attributes:
        exporter: Sends them.

    Raises:
        UnavailableError: The package of the messages is missing.
        InvalidArgumentError: The certificate can't be used.
    """

    def __init__(self, endpoint: OtlpEndpoint, interval_s: float, scrape: Callable[[], str]) -> None:
        try:
            from conch.observability.metrics.otlp_metrics import export_request, otlp_metrics
        except ModuleNotFoundError as error:
            raise missing_package(endpoint.signal, error) from None
        self._otlp_metrics = otlp_metrics
        self._interval_s = interval_s
        self._scrape = scrape
        self._start_ns = time.time_ns()
        resource = server_resource()

        def encode(
            found: Sequence[tuple[Metric, int]], most: int, most_bytes: int
        ) -> Iterator[tuple[bytes, int]]:
            # As many data points as `_LIMITS` allows are far below the bytes.
            yield export_request([metric for metric, _ in found], resource), sum(count for _, count in found)

        self.exporter = BatchExporter[tuple["Metric", int]](
            endpoint, _LIMITS, encode, "data points of metrics"
        )
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="conch-metrics-export", daemon=True)

    def start(self) -> None:
        """Begins to export."""
        self._thread.start()

    def finish(self, timeout_s: float) -> None:
        """Makes the last export, as long as the models are there."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def close(self, deadline_s: float) -> None:
        """Sends what waits until a monotonic time, and ends."""
        self.finish(max(deadline_s - time.monotonic(), 0.0))
        self.exporter.close(deadline_s)

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            self._export()
        self._export()

    def _export(self) -> None:
        yielder = GilYielder()
        try:
            text = self._scrape()
            found = self._otlp_metrics(text, self._start_ns, time.time_ns(), yielder.yield_if_due)
            self.exporter.put([(each, each[1]) for each in found])
        except Exception:  # the thread must go on
            log.exception("the metrics can't be exported")
