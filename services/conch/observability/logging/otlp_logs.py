"""Log records as OpenTelemetry has them. No state. Used by: `log_export`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope
from opentelemetry.proto.logs.v1 import logs_pb2 as otlp
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from conch.observability.otlp.attributes import attributes_of

_SEVERITY = (
    (50, otlp.SEVERITY_NUMBER_FATAL),
    (40, otlp.SEVERITY_NUMBER_ERROR),
    (30, otlp.SEVERITY_NUMBER_WARN),
    (20, otlp.SEVERITY_NUMBER_INFO),
    (10, otlp.SEVERITY_NUMBER_DEBUG),
    (0, otlp.SEVERITY_NUMBER_TRACE),
)
"""Python's levels, from the highest."""

_MOST_TEXT = 64 * 1024


class LogItem(NamedTuple):
    """A line of the log.

    Attributes:
        time_ns: Nanoseconds since 1970.
        level: Of Python's `logging`.
        level_name: Its name.
        logger: The logger's name.
        message: The text.
        attributes: What else the line has.
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

    @property
    def size(self) -> int:
        """About how many bytes it has as a message."""
        texts = (value for value in self.attributes.values() if isinstance(value, str))
        return 200 + len(self.message) + sum(map(len, texts)) + 40 * len(self.attributes)


def export_request(items: Iterable[LogItem], resource: Mapping[str, str | int]) -> bytes:
    """A request with log records, serialised.

    Args:
        items: The records.
        resource: Attributes of the server.
    """
    scopes: dict[str, list[otlp.LogRecord]] = {}
    for item in items:
        scopes.setdefault(item.logger, []).append(_record(item))
    found = otlp.ResourceLogs(
        resource=Resource(attributes=attributes_of(resource)),
        scope_logs=[
            otlp.ScopeLogs(scope=InstrumentationScope(name=name), log_records=records)
            for name, records in scopes.items()
        ],
    )
    return ExportLogsServiceRequest(resource_logs=[found]).SerializeToString()


def _record(item: LogItem) -> otlp.LogRecord:
    text = item.message[:_MOST_TEXT].encode(errors="backslashreplace").decode()
    return otlp.LogRecord(
        time_unix_nano=item.time_ns,
        observed_time_unix_nano=item.time_ns,
        severity_number=next(severity for level, severity in _SEVERITY if item.level >= level),
        severity_text=item.level_name,
        body=AnyValue(string_value=text),
        attributes=attributes_of(item.attributes),
        trace_id=bytes.fromhex(item.trace_id),
        span_id=bytes.fromhex(item.span_id),
    )
