"""Headers of W3C Trace Context: https://www.w3.org/TR/trace-context/."""

from __future__ import annotations

from conch.observability.tracing.trace import TraceParent

_LENGTH = 55
_DIGITS = frozenset("0123456789abcdef")


def parse_traceparent(text: str, state: str = "") -> TraceParent | None:
    """The caller's span out of a header ``traceparent``; None if the header is invalid.

    Args:
        text: As ``00-<32 hex digits>-<16 hex digits>-<2 hex digits>``.
        state: The header ``tracestate``.
    """
    if len(text) != _LENGTH and (len(text) < _LENGTH or text[:2] == "00" or text[_LENGTH] != "-"):
        return None
    version, trace_id, span_id, flags = text[:2], text[3:35], text[36:52], text[53:_LENGTH]
    if text[2] + text[35] + text[52] != "---" or version == "ff":
        return None
    if not _DIGITS.issuperset(version + trace_id + span_id + flags):
        return None
    trace, span = int(trace_id, 16), int(span_id, 16)
    if not (trace and span):
        return None
    return TraceParent(trace, span, bool(int(flags, 16) & 1), state)


def format_traceparent(trace_id: int, span_id: int, sampled: bool) -> str:
    """A header ``traceparent`` of version 00."""
    return f"00-{trace_id:032x}-{span_id:016x}-{'01' if sampled else '00'}"
