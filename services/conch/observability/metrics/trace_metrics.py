"""Metrics of traces and exports: what was lost, and what exporters have sent. Used by `MetricsPort`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from conch.observability.metrics.sample_text import Family, sample
from conch.observability.otlp.batch_exporter import BatchExporter, ExportCounts

_DROPPED = Family(
    "conch_trace_dropped_total", "counter", "Traces and spans that were lost, by the reason of the loss"
)


_SPANS = Family("conch_trace_spans_total", "counter", "Spans that a collector has taken")
_EXPORTS = Family("conch_trace_exports_total", "counter", "Requests to the collector by their result")
_WAITING = Family("conch_trace_queue_spans", "gauge", "Spans that wait for their export")
_SIGNAL_EXPORTS = Family(
    "conch_otlp_exports_total", "counter", "Requests with metrics or logs to a collector, by their result"
)
_SIGNAL_DROPPED = Family(
    "conch_otlp_dropped_total", "counter", "Data points of metrics and log records that were lost"
)


class TraceMetrics:
    """Reads the counts of a tracer.

    Args:
        drops: Gives those of losses by reason.
        exports: Gives those of an exporter; None without one.
    """

    def __init__(
        self, drops: Callable[[], Mapping[str, int]], exports: Callable[[], ExportCounts] | None = None
    ) -> None:
        self._drops = drops
        self._exports = exports

    def __call__(self) -> list[tuple[Family, list[str]]]:
        """The families with their samples."""
        found = [(_DROPPED, _samples(_DROPPED, "reason", self._drops()))]
        if self._exports is not None:
            counts = self._exports()
            found += [
                (_SPANS, [sample(_SPANS.name, counts.taken)]),
                (_EXPORTS, _samples(_EXPORTS, "result", counts.exports)),
                (_WAITING, [sample(_WAITING.name, counts.queued)]),
            ]
        return found


class ExportMetrics:
    """Reads the counts of the exporters of metrics and logs.

    Args:
        exporters: By signal.
    """

    def __init__(self, exporters: Mapping[str, BatchExporter[Any]]) -> None:
        self._exporters = exporters

    def __call__(self) -> list[tuple[Family, list[str]]]:
        """The families with their samples."""
        exports: list[str] = []
        dropped: list[str] = []
        for signal, exporter in self._exporters.items():
            own = {"signal": signal}
            exports += _samples(_SIGNAL_EXPORTS, "result", exporter.counts().exports, own)
            dropped += _samples(_SIGNAL_DROPPED, "reason", exporter.drops.counts(), own)
        return [(_SIGNAL_EXPORTS, exports), (_SIGNAL_DROPPED, dropped)]


def _samples(
    family: Family, label: str, counts: Mapping[str, int], others: Mapping[str, str] | None = None
) -> list[str]:
    return [
        sample(family.name, count, {label: name, **(others or {})}) for name, count in sorted(counts.items())
    ]
