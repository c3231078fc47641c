"""`OtlpExporter`: sends traces to an OpenTelemetry collector.

No state of its own. Threads: the tracer's writes; that of `BatchExporter` encodes and sends.
Used by: `open_tracing`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from conch.observability.otlp.batch_exporter import (
    FIRST_PAUSE_S,
    BatchExporter,
    ExportCounts,
    missing_package,
)
from conch.observability.otlp.drop_counter import DropCounter
from conch.observability.tracing.otlp_options import OtlpOptions
from conch.observability.tracing.trace import Trace
from conch.observability.tracing.trace_setting import TraceSetting

log = logging.getLogger(__name__)


class OtlpExporter:
    """A `TraceSink` that exports; a tree of traces waits, or is dropped, as a whole.

    Args:
        options: Where and how.
        drops: Counts lost spans.
        first_pause_s: Before the second try; it doubles with each further one.

    Raises:
        UnavailableError: The package of the messages is missing.
        InvalidArgumentError: The certificate can't be used.
    """

    def __init__(
        self, options: OtlpOptions, drops: DropCounter, first_pause_s: float = FIRST_PAUSE_S
    ) -> None:
        try:
            from conch.observability.tracing.otlp_spans import SpanEncoder, span_count
        except ModuleNotFoundError as error:
            raise missing_package(options.endpoint.signal, error) from None
        self._span_count = span_count
        encode = SpanEncoder(options).requests
        self._exporter = BatchExporter[Trace](
            options.endpoint, options.limits, encode, "spans", drops, first_pause_s
        )

    def counts(self) -> ExportCounts:
        """Numbers for the metrics port."""
        return self._exporter.counts()

    def write(self, roots: Sequence[Trace]) -> None:
        """Queues trees; see `TraceSink`."""
        if self._exporter.put([(root, self._span_count(root)) for root in roots]):  # Triton's text
            log.debug("BatchSpanProcessor queue is full - dropping span.")

    def replaced(self, setting: TraceSetting) -> None:
        """Does nothing: spans are not collected by setting; see `TraceSink`."""

    def close(self, deadline_s: float) -> None:
        """Sends what is queued until a monotonic time, and drops the rest; see `TraceSink`."""
        self._exporter.close(deadline_s)
