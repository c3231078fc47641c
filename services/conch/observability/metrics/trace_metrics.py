"""Metrics of traces: what was lost, and what exporters have sent. Used by `MetricsPort`, `otlp_exporter`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from conch.observability.metrics.sample_text import Family, sample

_DROPPED = Family(
    "conch_trace_dropped_total", "counter", "Traces and spans that were lost, by the reason of the loss"
)


_SPANS = Family("conch_trace_spans_total", "counter", "Spans that a collector has taken")
_EXPORTS = Family("conch_trace_exports_total", "counter", "Requests to the collector by their result")
_WAITING = Family("conch_trace_queue_spans", "gauge", "Spans that wait for their export")


@dataclass(frozen=True, slots=True)
class ExportCounts:
    """Numbers for the metrics port.

    Attributes:
        spans: Spans that collectors took.
        exports: Requests by result: ``ok``, ``partial``, ``retried`` or ``failed``.
        queued: Spans that wait.
    """

    spans: int
    exports: dict[str, int]
    queued: int


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
                (_SPANS, [sample(_SPANS.name, counts.spans)]),
                (_EXPORTS, _samples(_EXPORTS, "result", counts.exports)),
                (_WAITING, [sample(_WAITING.name, counts.queued)]),
            ]
        return found


def _samples(family: Family, label: str, counts: Mapping[str, int]) -> list[str]:
    return [sample(family.name, count, {label: name}) for name, count in sorted(counts.items())]
