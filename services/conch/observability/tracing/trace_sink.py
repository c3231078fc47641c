"""`TraceSink`: where finished traces go, and two small ones; the tracer's thread calls sinks."""

from __future__ import annotations

from collections.abc import Sequence

from conch.core.clock import wall_seconds
from conch.observability.exporters import Exporter
from conch.observability.metrics.exemplars import Exemplars
from conch.observability.tracing.trace import Trace
from conch.observability.tracing.trace_settings import TraceSetting


class TraceSink:
    """Takes finished traces; its methods never raise."""

    def write(self, roots: Sequence[Trace]) -> None:
        """Takes trees of traces; may block for a bounded time only."""
        raise NotImplementedError

    def replaced(self, setting: TraceSetting) -> None:
        """Writes what was collected for a setting, which samples no more; for sinks that collect."""

    def close(self, deadline_s: float) -> None:
        """Writes what is held back and closes, until a monotonic time; for sinks that hold back."""


class ExportSink(TraceSink):
    """Hands traces to an exporter."""

    def __init__(self, exporter: Exporter[Trace]) -> None:
        self._exporter = exporter

    def write(self, roots: Sequence[Trace]) -> None:
        """Queues trees."""
        self._exporter.export(roots)

    def close(self, deadline_s: float) -> None:
        """Sends what is queued until a monotonic time, and drops the rest."""
        self._exporter.close(deadline_s)


class ExemplarSink(TraceSink):
    """Remembers traces as exemplars of the histograms that counted them."""

    def __init__(self, exemplars: Exemplars) -> None:
        self._exemplars = exemplars

    def write(self, roots: Sequence[Trace]) -> None:
        """Remembers the requests of trees."""
        now = wall_seconds()
        for root in roots:
            self._add(root, now)

    def _add(self, trace: Trace, now: float) -> None:
        if trace.error is None and not trace.cancelled:
            version = trace.model, trace.version
            self._exemplars.add(version, trace.trace_id, trace.span_id, _durations(trace), now)
        for child in trace.children:
            self._add(child, now)


def _durations(trace: Trace) -> Sequence[int]:
    """Nanoseconds of a request in the histograms that counted it, in the order of `FAMILIES`."""
    whole = max(trace.ended_ns - trace.received_ns, 0)
    times = trace.times
    if times is None or not times.end_ns:
        return (whole,)
    start, end = times.start_ns, times.end_ns
    input_end = times.input_end_ns or start
    output_start = times.output_start_ns or end
    # Clocks of workers may disagree.
    return (
        whole,
        max(start - trace.queued_ns, 0),
        max(input_end - start, 0),
        max(output_start - input_end, 0),
        max(end - output_start, 0),
    )
