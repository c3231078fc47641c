"""`TraceSink`: where finished traces go.

Threads: the tracer's thread calls sinks. Used by: `tracer`, `trace_file`, `otlp_exporter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from conch.observability.tracing.trace import Trace
from conch.observability.tracing.trace_setting import TraceSetting


class TraceSink(Protocol):
    """Takes finished traces; its methods never raise."""

    def write(self, roots: Sequence[Trace]) -> None:
        """Takes trees of traces; may block for a bounded time only."""

    def replaced(self, setting: TraceSetting) -> None:
        """Notes that a setting samples no more; what it has collected goes out."""

    def close(self, deadline_s: float) -> None:
        """Writes what is held back and closes, until a monotonic time."""
