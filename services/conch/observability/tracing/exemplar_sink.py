"""`ExemplarSink`: a `TraceSink` that remembers traces as exemplars of the histograms that counted them.

Threads: the tracer's. Used by: `open_tracing`.
"""

from __future__ import annotations

from collections.abc import Sequence

from conch.core.clock import wall_seconds
from conch.observability.metrics.exemplars import Exemplars
from conch.observability.tracing.trace import Trace
from conch.observability.tracing.trace_setting import TraceSetting


class ExemplarSink:
    """Fills `Exemplars`."""

    def __init__(self, exemplars: Exemplars) -> None:
        self._exemplars = exemplars

    def write(self, roots: Sequence[Trace]) -> None:
        """Remembers the requests of trees; see `TraceSink`."""
        now = wall_seconds()
        for root in roots:
            self._add(root, now)

    def replaced(self, setting: TraceSetting) -> None:
        """Does nothing; see `TraceSink`."""

    def close(self, deadline_s: float) -> None:
        """Does nothing; see `TraceSink`."""

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
