"""`CurrentSpan`: the span that running code belongs to.

Log lines get its ids, spans of the code become its children, and so do those that code makes with
OpenTelemetry's own API, if the process has imported that. Owns one context variable, so that threads,
coroutines and their callbacks each see their own; coroutines take it along, as they copy the context of the
thread that starts them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextvars import ContextVar, Token
from typing import Any

from conch.core.request import InferenceRequest, Watch


class CurrentSpan:
    """A span that is current from now on until `leave`.

    Args:
        watch: The watch of the request.
        trace_id: 32 hexadecimal digits.
        span_id: 16 hexadecimal digits.
        flags: Two hexadecimal digits, as in ``traceparent``.
        state: The header ``tracestate``, or empty.

    Attributes:
        watch: As given.
        span_id: As given.
    """

    __slots__ = ("_attached", "_flags", "_state", "_token", "_trace_id", "span_id", "watch")

    def __init__(self, watch: Watch, trace_id: str, span_id: str, flags: str, state: str) -> None:
        self.watch = watch
        self.span_id = span_id
        self._trace_id = trace_id
        self._flags = flags
        self._state = state
        self._token: Token[CurrentSpan | None] = _CURRENT.set(self)
        self._attached = self._attach()

    def child(self, span_id: str) -> CurrentSpan:
        """Makes a span of the code current, below this one."""
        return CurrentSpan(self.watch, self._trace_id, span_id, self._flags, self._state)

    def leave(self) -> None:
        """Makes current again what was before; elsewhere than in the context that entered, does nothing."""
        try:
            _CURRENT.reset(self._token)
        except ValueError:  # a generator that another coroutine or thread goes on with
            return
        if self._attached is not None:
            sys.modules["opentelemetry.context"].detach(self._attached)

    def fields(self) -> dict[str, str]:
        """The ids, for a log line."""
        return {"trace_id": self._trace_id, "span_id": self.span_id}

    def headers(self) -> dict[str, str]:
        """``traceparent`` and ``tracestate`` for what the code calls."""
        headers = {"traceparent": f"00-{self._trace_id}-{self.span_id}-{self._flags}"}
        return {**headers, "tracestate": self._state} if self._state else headers

    def _attach(self) -> Any:
        """Makes it current for OpenTelemetry's API; None if this process has not imported that."""
        trace, context = (sys.modules.get(f"opentelemetry.{name}") for name in ("trace", "context"))
        if trace is None or context is None:
            return None
        state = trace.TraceState.from_header([self._state])
        flags = trace.TraceFlags(int(self._flags, 16))
        span = trace.SpanContext(int(self._trace_id, 16), int(self.span_id, 16), True, flags, state)
        return context.attach(trace.set_span_in_context(trace.NonRecordingSpan(span)))


_CURRENT: ContextVar[CurrentSpan | None] = ContextVar("conch_span", default=None)


def current_span() -> CurrentSpan | None:
    """The span of the code that calls; None if its request is not traced."""
    return _CURRENT.get()


def enter_span(requests: Sequence[InferenceRequest]) -> CurrentSpan | None:
    """Makes the span of the first traced request of a batch current; None if none is traced."""
    for request in requests:
        watch = request.watch
        if watch is not None and (context := watch.trace_context):
            headers: dict[str, str] = json.loads(context)
            _, trace_id, span_id, flags = headers["traceparent"].split("-")
            return CurrentSpan(watch, trace_id, span_id, flags, headers.get("tracestate", ""))
    return None


def outgoing_headers() -> dict[str, str]:
    """Headers that continue the trace of the code that calls; empty without one.

    They are those of OpenTelemetry's current span, if this process has imported its API, as its propagators
    write them; else those of the request that the code serves.
    """
    headers: dict[str, str] = {}
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry.propagate import inject

        inject(headers)
    span = _CURRENT.get()
    if not headers and span is not None:
        headers = span.headers()
    return headers


def span_fields() -> dict[str, str]:
    """The fields ``trace_id`` and ``span_id`` of a log line; none outside of traced requests."""
    span = _CURRENT.get()
    return {} if span is None else span.fields()
