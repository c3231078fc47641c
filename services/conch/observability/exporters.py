"""The seam of exporters: packages that send traces, metrics and the log to a collector.

An add-on registers a function like `read_export` under the entry-point group ``conch.exporters``. Settings
are read first, so that a wrong one stops the server before it loads models; the part that has something to
export opens the exporter. An exporter owns queue, thread and connection: the server only hands items over.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from conch.core.add_ons import entry_points
from conch.core.errors import UnavailableError

GROUP, NAME = "conch.exporters", "otlp"
"""The entry-point group, and the entry that the flags of OpenTelemetry mean."""

TRACES, METRICS, LOGS = "traces", "metrics", "logs"
"""The signals of OpenTelemetry; their items are root `Trace` objects, `Scrape` and `LogItem`."""

EXPORT_REASONS = ("queue_full", "export_failed", "rejected", "shutdown")
"""Reasons for which exports lose items: labels of their counters."""

TRACE_REASONS = (*EXPORT_REASONS, "limit", "disk")
"""Reasons for which traces and spans are lost: labels of their counters."""

Item_contra = TypeVar("Item_contra", contravariant=True)


class DropCounter:
    """Lost items by reason; from any thread.

    Args:
        reasons: All that there are.
    """

    def __init__(self, reasons: Sequence[str] = TRACE_REASONS) -> None:
        self._lock = threading.Lock()
        self._counts = Counter(dict.fromkeys(reasons, 0))

    def add(self, reason: str, number: int) -> None:
        """Counts some."""
        with self._lock:
            self._counts[reason] += number

    def counts(self) -> dict[str, int]:
        """All counts."""
        with self._lock:
            return dict(self._counts)


@dataclass(frozen=True, slots=True)
class ExportCounts:
    """Numbers for the metrics port.

    Attributes:
        taken: Items that collectors took.
        exports: Requests by result: ``ok``, ``partial``, ``retried`` or ``failed``.
        queued: Items that wait.
    """

    taken: int
    exports: dict[str, int]
    queued: int


class Scrape(NamedTuple):
    """All metrics at one time.

    Attributes:
        text: In Prometheus' text format.
        start_ns: Start of the counters, nanoseconds since 1970.
        time_ns: Time of the scrape, nanoseconds since 1970.
    """

    text: str
    start_ns: int
    time_ns: int


class LogItem(NamedTuple):
    """A line of the log.

    Attributes:
        time_ns: Nanoseconds since 1970.
        level: Level of Python's `logging`.
        level_name: Its name.
        logger: The logger's name.
        message: The text.
        attributes: The other fields of the line.
        trace_id: 32 hexadecimal digits, or empty.
        span_id: 16 hexadecimal digits, or empty.
    """

    time_ns: int
    level: int
    level_name: str
    logger: str
    message: str
    attributes: Mapping[str, str | int | float]
    trace_id: str
    span_id: str


class Exporter(Protocol[Item_contra]):
    """Sends the items of one signal; its methods are called from any thread."""

    @property
    def drops(self) -> DropCounter:
        """Lost items."""

    def export(self, items: Sequence[Item_contra]) -> None:
        """Queues items; neither blocks nor raises: drops and counts what does not fit."""

    def counts(self) -> ExportCounts:
        """Numbers for the metrics port."""

    def close(self, deadline_s: float) -> None:
        """Sends what is queued until a monotonic time, drops the rest, and ends."""


@dataclass(frozen=True, slots=True)
class SpanOptions:
    """Settings of traces that the tracer carries out.

    Attributes:
        follows_unsampled: True if the span of a caller that is not sampled traces the request, as in Triton.
        batch_spans: True if a batch of several requests has a span of its own.
        returns_traceparent: True if responses name the root span of their request.
        ratio: The share of trace ids that are sampled in place of a rate; 0 for none.
        shown: The settings as Triton's trace setting RPC shows them.
    """

    follows_unsampled: bool = False
    batch_spans: bool = False
    returns_traceparent: bool = False
    ratio: float = 0.0
    shown: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Checked settings of the export of one signal; an add-on derives its own class.

    Attributes:
        interval_s: Between exports of metrics.
        spans: Settings for the tracer.
    """

    interval_s: float = 60.0
    spans: SpanOptions = field(default_factory=SpanOptions)

    def open_exporter(self, drops: DropCounter) -> Exporter[Any]:
        """Opens the exporter.

        Args:
            drops: Counts lost items.

        Raises:
            ConchError: A package is missing, or a file can't be used.
        """
        raise NotImplementedError


def read_export(signal: str, settings: Sequence[tuple[str, str]]) -> ExportOptions:
    """Checks the settings of the export of a signal.

    Args:
        signal: One of `TRACES`, `METRICS` and `LOGS`.
        settings: Keys and values, in order: those of ``--trace-config opentelemetry,<key>=<value>``, or
            ``url`` with the value of ``--otlp-metrics-url`` or ``--otlp-logs-url``.

    Raises:
        InvalidArgumentError: A setting or an environment variable is wrong; the text names it.
        UnavailableError: There is no exporter.
    """
    found = entry_points(group=GROUP, name=NAME)
    if not found:
        raise UnavailableError(f"the export of {signal} needs an add-on: none is registered as '{NAME}'")
    options: ExportOptions = next(iter(found)).load()(signal, settings)
    return options
