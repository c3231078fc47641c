"""Opens the tracing of a server: settings, tracer and sinks of its mode. Used by: `server`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from conch.observability.metrics.exemplars import Exemplars
from conch.observability.otlp.batch_exporter import ExportCounts
from conch.observability.otlp.drop_counter import DropCounter
from conch.observability.tracing.exemplar_sink import ExemplarSink
from conch.observability.tracing.trace_options import TraceOptions
from conch.observability.tracing.trace_ring import TraceRing
from conch.observability.tracing.trace_settings import OPENTELEMETRY, TraceSettings
from conch.observability.tracing.trace_sink import TraceSink
from conch.observability.tracing.tracer import Tracer


@dataclass(frozen=True, slots=True)
class Tracing:
    """The tracing of a server.

    Attributes:
        settings: What is traced.
        tracer: Traces requests.
        exports: Gives the counts of the exporter; None without one.
    """

    settings: TraceSettings
    tracer: Tracer
    exports: Callable[[], ExportCounts] | None = None


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
        # Imported late: the packages are an extra.
        from conch.observability.tracing.otlp_exporter import OtlpExporter
        from conch.observability.tracing.otlp_options import otlp_options

        exporter_options = otlp_options(options.exporter)
        exporter = OtlpExporter(exporter_options, drops)
        sinks: list[TraceSink] = [exporter, *kept]
        if exemplars is not None:
            sinks.append(ExemplarSink(exemplars))
        settings = TraceSettings(options.values, options.mode, exporter_options.shown)
        tracer = Tracer(
            settings,
            sinks,
            drops,
            options.tail,
            propagates=True,
            follows_unsampled=exporter_options.follows_unsampled,
            batch_spans=exporter_options.batch_spans,
            returns_traceparent=exporter_options.returns_traceparent,
            ratio=exporter_options.ratio,
        )
        return Tracing(settings, tracer, exporter.counts)
    from conch.observability.tracing.trace_file import TraceFile

    settings = TraceSettings(options.values, options.mode, without_file=ring is not None)
    files: list[TraceSink] = [TraceFile(drops)] if options.values.file or ring is None else []
    return Tracing(settings, Tracer(settings, [*files, *kept], drops, options.tail))
