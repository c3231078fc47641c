"""`TraceRing`: a `TraceSink` that keeps the newest traces in memory, as JSON with their waterfalls.

Bounded in number and bytes. Threads and locks: the tracer's thread writes, any thread reads; a lock guards
the ring.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from conch.core.clock import wall_seconds
from conch.observability.tracing.trace import Trace
from conch.observability.tracing.trace_reader import ReadTrace
from conch.observability.tracing.trace_records import stamps
from conch.observability.tracing.trace_sink import TraceSink
from conch.observability.tracing.waterfall import waterfall

MOST_TRACES = 256
MOST_BYTES = 4 << 20
_MOST_ROWS = 400  # of one trace, such as an ensemble's of many steps
_MOST_TEXT = 500


class TraceRing(TraceSink):
    """The newest traces.

    Args:
        most: Maximum number of traces.
        most_bytes: Maximum bytes of all traces together.

    Attributes:
        count: Traces taken so far.
    """

    def __init__(self, most: int = MOST_TRACES, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._texts: deque[bytes] = deque()
        self._bytes = 0
        self.count = 0

    def write(self, roots: Sequence[Trace]) -> None:
        """Keeps trees."""
        for root in roots:
            text = json.dumps(_trace_object(root), separators=(",", ":")).encode()
            with self._lock:
                self._texts.append(text)
                self._bytes += len(text)
                self.count += 1
                while self._texts and (len(self._texts) > self._most or self._bytes > self._most_bytes):
                    self._bytes -= len(self._texts.popleft())

    def newest(self) -> list[bytes]:
        """All that is kept, newest first: each a JSON object."""
        with self._lock:
            return list(reversed(self._texts))


def _trace_object(root: Trace) -> dict[str, Any]:
    rows = waterfall(_read(root, None))
    ended = wall_seconds() - (time.monotonic_ns() - root.ended_ns) / 1e9
    times = root.times
    error = root.error
    return {
        "id": root.number,
        "trace_id": f"{root.trace_id:032x}",
        "model": root.model,
        "version": root.version,
        "request_id": root.request_id[:_MOST_TEXT],
        "protocol": root.protocol,
        "t": round(ended, 3),
        "us": rows[0].duration_ns / 1000 if rows else 0,
        "kept": root.reason,
        "error": "" if error is None else error.message[:_MOST_TEXT],
        "code": "" if error is None else error.code,
        "cancelled": root.cancelled,
        "rows_in": root.rows,
        # Requests of one batch have the same key.
        "batch": None
        if times is None
        else {"size": times.size, "requests": times.requests, "key": f"{root.model}@{times.start_ns}"},
        "rows": [
            [row.depth, row.label, row.stage, row.start_ns / 1000, row.duration_ns / 1000]
            for row in rows[:_MOST_ROWS]
        ],
        "more_rows": max(len(rows) - _MOST_ROWS, 0),
        "spans": [
            [span.name, (span.start_ns - root.received_ns) / 1000, (span.end_ns - span.start_ns) / 1000]
            for span in root.spans
        ],
    }


def _read(trace: Trace, parent: ReadTrace | None) -> ReadTrace:
    """A trace in the form that trace files are read in, so that both have the same waterfall."""
    made = ReadTrace("", trace.number, trace.model, trace.version, trace.request_id, parent, stamps(trace))
    made.children = [_read(child, made) for child in trace.children]
    return made
