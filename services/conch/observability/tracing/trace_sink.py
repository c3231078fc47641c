"""`TraceSink`: where finished traces go; `DropCounter`: how many were lost, and why.

Threads and locks: the tracer's thread calls sinks; any thread adds drops, a lock guards the numbers.
Used by: `tracer`, `trace_file`, the exporter.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from conch.observability.tracing.trace import Trace
from conch.observability.tracing.trace_setting import TraceSetting

REASONS = ("queue_full", "limit", "disk", "export_failed", "rejected", "shutdown")
"""Why traces and spans are lost."""


class TraceSink(Protocol):
    """Takes finished traces; its methods never raise."""

    def write(self, roots: Sequence[Trace]) -> None:
        """Takes trees of traces; may block for a bounded time only."""

    def replaced(self, setting: TraceSetting) -> None:
        """Notes that a setting samples no more; what it has collected goes out."""

    def close(self, deadline_s: float) -> None:
        """Writes what is held back and closes, until a monotonic time."""


class DropCounter:
    """Lost traces and spans by reason, one of `REASONS`; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counter(dict.fromkeys(REASONS, 0))

    def add(self, reason: str, number: int) -> None:
        """Counts some."""
        with self._lock:
            self._counts[reason] += number

    def counts(self) -> dict[str, int]:
        """All counts."""
        with self._lock:
            return dict(self._counts)
