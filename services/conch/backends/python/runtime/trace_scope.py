"""`TraceScope`: makes the span of a request the current one while model code runs.

Log lines of the model get its ids, and spans that the model makes with OpenTelemetry's own API become its
children, if the process has imported that API. Coroutines take the scope along, as they copy the context of
the thread that starts them. No state. Used by: `python_instance`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextvars import Token
from typing import Any

from conch.core.current_trace import CURRENT
from conch.core.request import InferenceRequest


def enter_trace(requests: Sequence[InferenceRequest]) -> TraceScope | None:
    """The scope of the first traced request of a batch; None if none is traced."""
    for request in requests:
        watch = request.watch
        if watch is not None and (context := watch.trace_context):
            return TraceScope(context)
    return None


class TraceScope:
    """Holds until `leave`, on the same thread.

    Args:
        context: JSON with ``traceparent`` and ``tracestate``, as `Watch` has it.
    """

    __slots__ = ("_attached", "_token")

    def __init__(self, context: str) -> None:
        headers: dict[str, str] = json.loads(context)
        self._token: Token[str] = CURRENT.set(headers["traceparent"])
        self._attached: Any = _attach(headers)

    def leave(self) -> None:
        """Restores what was current before."""
        CURRENT.reset(self._token)
        if self._attached is not None:
            sys.modules["opentelemetry.context"].detach(self._attached)


def _attach(headers: dict[str, str]) -> Any:
    """Makes the span current for OpenTelemetry's API; None if this process has not imported it."""
    trace, context = (sys.modules.get(f"opentelemetry.{name}") for name in ("trace", "context"))
    if trace is None or context is None:
        return None
    _, trace_id, span_id, flags = headers["traceparent"].split("-")
    state = trace.TraceState.from_header([headers.get("tracestate", "")])
    span = trace.SpanContext(
        int(trace_id, 16), int(span_id, 16), True, trace.TraceFlags(int(flags, 16)), state
    )
    return context.attach(trace.set_span_in_context(trace.NonRecordingSpan(span)))
