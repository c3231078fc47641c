"""The audit log: one JSON line for each refused call, and for each change that a caller asked for.

Threads: `conch-audit-log` writes the lines.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from conch.observability.logging.line_writer import RECORD_BYTES, RecordLog
from conch.observability.logging.log_handler import quoted
from conch.observability.logging.log_sinks import FileSink, Sink, sink_of

log = logging.getLogger(__name__)

OK = "OK"


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """The fields of a line, in order.

    Attributes:
        ts: Time, in seconds since 1970.
        port: ``http``, ``grpc``, ``grpc-stream``, ``metrics`` or ``control``.
        client: Address of the client.
        principal: Name in the access policy; empty for a caller that was not identified.
        subject: The caller in its issuer's words, such as a token's subject; or empty.
        action: Name of the operation, such as ``load_model``.
        model: The model; empty without one, ``*`` for the server as a whole.
        code: ``OK``, or Triton's name of the error code.
        error: Error text, or empty.
    """

    ts: float
    port: str
    client: str
    principal: str
    subject: str
    action: str
    model: str
    code: str
    error: str


class AuditLog(RecordLog[AuditRecord]):
    """Writes records to a file, or to standard output without one.

    Raises:
        OSError: The file can't be opened.
    """

    def __init__(self, file: Path | None) -> None:
        sink: Sink = sink_of(sys.stdout) if file is None else FileSink(file)
        super().__init__("audit log", sink, log)

    def line(self, record: AuditRecord) -> str:
        """A record as one line of JSON, without an empty `subject` or `error`."""
        fields = {name: getattr(record, name) for name in AuditRecord.__slots__}
        fields["ts"] = datetime.fromtimestamp(record.ts, UTC).isoformat(timespec="microseconds")
        for name in ("subject", "error"):
            if not fields[name]:
                del fields[name]
        return quoted(fields)

    def add(self, record: AuditRecord) -> None:
        """Queues a record for writing; never blocks."""
        texts = (record.error, record.model, record.subject)  # of any length
        self._writer.put(record, RECORD_BYTES + sum(map(len, texts)))
