"""`LogExport`: sends the lines of the log to an OpenTelemetry collector, too.

The logging thread puts items into the queue of `BatchExporter`, whose thread makes messages of them. The
exporter's own warnings are lines as well: one a minute at most.
Threads: any logs. Used by: `log_handler`, `process_logs`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from conch.core.current_span import span_fields
from conch.core.errors import message_of, record_message, record_traceback
from conch.observability.otlp.batch_exporter import BatchExporter, missing_package
from conch.observability.otlp.endpoint import OtlpEndpoint, QueueLimits, server_resource

if TYPE_CHECKING:
    from conch.observability.logging.otlp_logs import LogItem

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_CLOSE_S = 5.0


class LogExport:
    """Exports log records.

    Args:
        endpoint: Where to.

    Attributes:
        exporter: Sends them.

    Raises:
        UnavailableError: The package of the messages is missing.
        InvalidArgumentError: The certificate can't be used.
    """

    def __init__(self, endpoint: OtlpEndpoint) -> None:
        try:
            from conch.observability.logging.otlp_logs import LogItem, export_request
        except ModuleNotFoundError as error:
            raise missing_package(endpoint.signal, error) from None
        self._item = LogItem
        resource = server_resource()

        def encode(items: Sequence[LogItem], most: int, most_bytes: int) -> Iterator[tuple[bytes, int]]:
            some: list[LogItem] = []
            size = 0
            for item in items:
                if some and (len(some) >= most or size + item.size > most_bytes):
                    yield export_request(some, resource), len(some)
                    some, size = [], 0
                some.append(item)
                size += item.size
            yield export_request(some, resource), len(some)

        self.exporter = BatchExporter["LogItem"](endpoint, QueueLimits(), encode, "log records")

    def put(self, record: logging.LogRecord) -> None:
        """Queues a record; never blocks and never raises."""
        try:
            message = record_message(record)
        except Exception:  # a model's message may not fit its arguments
            message = message_of(record.msg)
        found = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        found |= span_fields()
        ids = [str(found.pop(name, "")) for name in ("trace_id", "span_id")]
        if text := record_traceback(record):
            found["exception.stacktrace"] = text
        attributes = {
            name: value if isinstance(value, str | int | float) else message_of(value)
            for name, value in found.items()
        }
        item = self._item(
            int(record.created * 1e9),
            record.levelno,
            record.levelname,
            record.name,
            message,
            attributes,
            *ids,
        )
        self.exporter.put([(item, 1)])

    def close(self) -> None:
        """Sends what waits, within a time."""
        self.exporter.close(time.monotonic() + _CLOSE_S)
