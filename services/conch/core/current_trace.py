"""The span that running model code belongs to, for its log lines.

Owns one context variable, so that threads, coroutines and their callbacks each see their own.
Used by: `trace_scope`; log handlers of the server and of workers.
"""

from __future__ import annotations

from contextvars import ContextVar

CURRENT: ContextVar[str] = ContextVar("conch_traceparent", default="")
"""The ``traceparent`` header of the span; empty if the request is not traced."""


def span_fields() -> dict[str, str]:
    """The fields ``trace_id`` and ``span_id`` of a log line; none outside of traced requests."""
    text = CURRENT.get()
    if not text:
        return {}
    _, trace_id, span_id, _ = text.split("-")
    return {"trace_id": trace_id, "span_id": span_id}
