"""`LogEncoder`: makes export requests of lines of the log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope
from opentelemetry.proto.logs.v1 import logs_pb2 as otlp
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from conch.observability.exporters import LogItem
from conch_otlp.attributes import attributes_of

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


class LogEncoder:
    """Makes export requests; an `Encoder`.

    Args:
        resource: Attributes of the server.
    """

    def __init__(self, resource: Mapping[str, str | int]) -> None:
        self._resource = Resource(attributes=attributes_of(resource))

    def queued(self, items: Sequence[LogItem]) -> list[tuple[LogItem, int]]:
        """The lines: each counts as one."""
        return [(item, 1) for item in items]

    def requests(self, queued: Sequence[LogItem], most: int, most_bytes: int) -> Iterator[tuple[bytes, int]]:
        """Requests within limits, and their numbers of lines; one line may be above the limit of bytes."""
        some: list[LogItem] = []
        size = 0
        for item in queued:
            if some and (len(some) >= most or size + _size(item) > most_bytes):
                yield self._request(some), len(some)
                some, size = [], 0
            some.append(item)
            size += _size(item)
        yield self._request(some), len(some)

    def _request(self, items: Sequence[LogItem]) -> bytes:
        scopes: dict[str, list[otlp.LogRecord]] = {}
        for item in items:
            scopes.setdefault(item.logger, []).append(_record(item))
        found = otlp.ResourceLogs(
            resource=self._resource,
            scope_logs=[
                otlp.ScopeLogs(scope=InstrumentationScope(name=name), log_records=records)
                for name, records in scopes.items()
            ],
        )
        return ExportLogsServiceRequest(resource_logs=[found]).SerializeToString()


def _size(item: LogItem) -> int:
    """About how many bytes a line has as a message."""
    texts = (value for value in item.attributes.values() if isinstance(value, str))
    return 200 + len(item.message) + sum(map(len, texts)) + 40 * len(item.attributes)


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
