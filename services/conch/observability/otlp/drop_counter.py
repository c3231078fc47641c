"""`DropCounter`: how many traces, spans or other items were lost, and why.

Threads and locks: any; a lock guards the numbers. Used by: `batch_exporter`, `tracer`, `trace_file`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

EXPORT_REASONS = ("queue_full", "export_failed", "rejected", "shutdown")
"""Why exports lose items."""

TRACE_REASONS = (*EXPORT_REASONS, "limit", "disk")
"""Why traces and spans are lost."""


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
