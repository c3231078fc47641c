"""Spans and parts of spans that have no template, and the encoding that they share.

No state. Used by: `otlp_spans`.
"""

from __future__ import annotations

from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from conch.core.request import SpanRecord, TracedBatch
from conch.observability.otlp.attributes import attribute, attributes_of, short
from conch.observability.tracing.trace import Trace

_MOST_LINKS = 128
"""Of one span; OpenTelemetry's default limit."""


_ATTRIBUTES = b"\x4a"
"""Tag of field 9 of `Span`."""


def batch_span(batch: TracedBatch, trace: Trace, offset: int) -> bytes:
    """The span of a batch, as long as the model ran; a trace of its own, linked to its requests."""
    times = trace.times
    assert times is not None, "the trace of a request that ran"
    span = Span(
        trace_id=batch.trace_id.to_bytes(16, "big"),
        span_id=batch.span_id.to_bytes(8, "big"),
        name=f"batch {short(trace.model)}",
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=times.start_ns + offset,
        end_time_unix_nano=max(times.end_ns, times.start_ns) + offset,
        attributes=[
            attribute("triton.model_name", trace.model),
            attribute("triton.model_version", trace.version),
            attribute("conch.batch.size", times.size),
            attribute("conch.batch.requests", batch.requests),
        ],
        links=[link(*member) for member in batch.members[:_MOST_LINKS]],
        dropped_links_count=max(len(batch.members) - _MOST_LINKS, 0),
    )
    return span.SerializeToString()


def link(trace_id: int, span_id: int) -> Span.Link:
    """A link to a span, by its ids."""
    return Span.Link(trace_id=trace_id.to_bytes(16, "big"), span_id=span_id.to_bytes(8, "big"))


def model_code_span(record: SpanRecord, trace_id: bytes, offset: int) -> bytes:
    """A span that the model made."""
    span = Span(
        trace_id=trace_id,
        span_id=record.span_id.to_bytes(8, "big"),
        parent_span_id=record.parent_id.to_bytes(8, "big"),
        name=short(record.name) or "unknown",
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=record.start_ns + offset,
        end_time_unix_nano=record.end_ns + offset,
        attributes=attributes_of(record.attributes),
    )
    if record.error_type:
        span.attributes.append(attribute("error.type", record.error_type))
        span.status.code = Status.STATUS_CODE_ERROR
        span.status.message = short(record.error)
    return span.SerializeToString()


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    made.append(number)
    return bytes(made)


def field(tag: bytes, content: bytes) -> bytes:
    """A field of a message, whose content is bytes."""
    return tag + _varint(len(content)) + content


def number_attribute(head: bytes, number: int) -> bytes:
    """An attribute with a number, as a field of `Span`; `head` is its key."""
    value = b"\x18" + _varint(number)  # AnyValue.int_value
    return field(_ATTRIBUTES, head + field(b"\x12", value))  # KeyValue.value
