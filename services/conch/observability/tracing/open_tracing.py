"""Opens the tracing of a server: settings, tracer and sinks of its mode."""

from __future__ import annotations

from dataclasses import dataclass

from conch.observability.exporters import TRACES, DropCounter, Exporter, read_export
from conch.observability.metrics.exemplars import Exemplars
from conch.observability.tracing.trace import Trace
from conch.observability.tracing.trace_file import TraceFile
from conch.observability.tracing.trace_options import TraceOptions
from conch.observability.tracing.trace_ring import TraceRing
from conch.observability.tracing.trace_settings import OPENTELEMETRY, TraceSettings
from conch.observability.tracing.trace_sink import ExemplarSink, ExportSink, TraceSink
from conch.observability.tracing.tracer import Tracer


@dataclass(frozen=True, slots=True)
class Tracing:
    """The tracing of a server.

    Attributes:
        settings: Trace settings of the server and its models.
        tracer: Traces requests.
        exporter: Sends traces to a collector; None without one.
    """

    settings: TraceSettings
    tracer: Tracer
    exporter: Exporter[Trace] | None = None


def open_tracing(
    options: TraceOptions, exemplars: Exemplars | None = None, ring: TraceRing | None = None
) -> Tracing:
    """The tracing that options ask for.

    Args:
        options: From the command line.
        exemplars: Remembers traces that a collector gets; None for none.
        ring: Keeps the newest traces for the console; None without one.

    Raises:
        ConchError: An option of the exporter is wrong, or its packages are missing.
    """
    drops = DropCounter()
    kept: list[TraceSink] = [] if ring is None else [ring]
    if options.mode == OPENTELEMETRY:
        export = read_export(TRACES, options.exporter)
        exporter = export.open_exporter(drops)
        sinks: list[TraceSink] = [ExportSink(exporter), *kept]
        if exemplars is not None:
            sinks.append(ExemplarSink(exemplars))
        settings = TraceSettings(options.values, options.mode, export.spans.shown)
        return Tracing(settings, Tracer(settings, sinks, drops, options.tail, export.spans), exporter)
    settings = TraceSettings(options.values, options.mode, without_file=ring is not None)
    files: list[TraceSink] = [TraceFile(drops)] if options.values.file or ring is None else []
    return Tracing(settings, Tracer(settings, [*files, *kept], drops, options.tail))
