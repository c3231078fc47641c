"""`SpanEncoder`: makes export requests of OpenTelemetry's protocol out of trees of traces.

A request is the root ``InferRequest``; below it each trace is a span named as its model, with a span
``compute`` if it ran, and the spans of its subrequests. Most spans differ from earlier ones in ids and times
only: they are copies of templates, which is far cheaper than to build their events and attributes.
Owns templates and the offset of the wall clock. Threads: the exporter's only.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from operator import itemgetter
from random import Random
from struct import pack
from typing import NamedTuple

from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from conch import __version__
from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import ConchError
from conch.core.request import SpanRecord, TracedBatch
from conch.observability.tracing.trace import Trace
from conch.observability.tracing.trace_records import route_attributes, stamps
from conch.protocol.status_names import STATUS_NAMES
from conch_otlp.attributes import attribute, attributes_of, short
from conch_otlp.span_template import PARENT_ID, SPAN_ID, SpanTemplate

_OK = 200
_FRAMING = 12  # bytes around a message: tags, and lengths up to 2**35
_OFFSET_NS = 60 * 10**9
_MOST_EVENTS = _MOST_LINKS = 128
"""Limits of events and links of one span; OpenTelemetry's defaults."""

_MOST_SHAPES = 1024
_RPC_METHODS = {
    "grpc": "inference.GRPCInferenceService/ModelInfer",
    "grpc-stream": "inference.GRPCInferenceService/ModelStreamInfer",
}
_ROUTE = re.compile("/v2/models/[^/]+(?:/versions/([^/]+))?/(infer|generate|generate_stream)")
_GENERATED = ("max_tokens", "temperature", "top_k", "top_p")
"""Parameters of requests for text that the conventions name."""

_RPC_FAULTS = frozenset({2, 4, 12, 13, 14, 15})
"""gRPC statuses that are the server's fault, by the conventions."""

_UNKNOWN = 2
_RESOURCE_SPANS, _SCOPE_SPANS, _SPANS = b"\x0a", b"\x12", b"\x12"
"""Tags: field 1 of the request, 2 of `ResourceSpans` and of `ScopeSpans`."""

_ATTRIBUTES = b"\x4a"
"""Tag of field 9 of `Span`."""

_OWN_NUMBER = KeyValue(key="triton.trace_id").SerializeToString()
_PARENT_NUMBER = KeyValue(key="triton.trace_parent_id").SerializeToString()
_ROOT, _MODEL, _COMPUTE = range(3)
_PARTS = {
    "REQUEST_START": _MODEL,
    "QUEUE_START": _MODEL,
    "REQUEST_END": _MODEL,
    "COMPUTE_START": _COMPUTE,
    "COMPUTE_INPUT_END": _COMPUTE,
    "COMPUTE_OUTPUT_START": _COMPUTE,
    "COMPUTE_END": _COMPUTE,
}
"""Events that belong to the spans of a model; all others are the root's."""

_name_of = itemgetter(0)


def _model_spans(trace: Trace) -> int:
    if not trace.started_ns:
        return 0
    number = (2 if _ran(trace) else 1) + len(trace.spans) + (_first_of_batch(trace) is not None)
    for child in trace.children:
        number += _model_spans(child)
    return number


def _ran(trace: Trace) -> bool:
    return trace.times is not None and trace.times.start_ns != 0


def _first_of_batch(trace: Trace) -> TracedBatch | None:
    """The batch whose span is exported with this trace: that of the batch's first sampled request."""
    batch = None if trace.times is None else trace.times.batch
    if batch is None or batch.members[0] != (trace.trace_id, trace.span_id):
        return None
    return batch


class _Shape(NamedTuple):
    """Spans that traces with the same model, events and result share, but for times, ids and numbers."""

    root: SpanTemplate | None
    model: SpanTemplate | None
    compute: SpanTemplate | None


class SpanEncoder:
    """Makes export requests; an `Encoder`, whose queue has trees of traces.

    Args:
        resource: Attributes of the server.
        semconv: True if spans have the names and kinds of OpenTelemetry's conventions, else Triton's.
        clock: Monotonic time in nanoseconds.
        wall: Time since 1970 in nanoseconds.
    """

    def __init__(
        self,
        resource: Mapping[str, str | int],
        semconv: bool,
        clock: Clock = monotonic_ns,
        wall: Clock = time.time_ns,
    ) -> None:
        self._semconv = semconv
        self._clock = clock
        self._wall = wall
        self._offset_ns = self._renew_ns = 0
        # Not `os.urandom`: it releases the GIL, and waits for it again, once a span.
        self._bits = Random().getrandbits
        self._shapes: dict[tuple[object, ...], _Shape] = {}
        scope = InstrumentationScope(name="triton-server")
        if self._semconv:
            scope = InstrumentationScope(name="conch", version=__version__)
        message = Resource(attributes=attributes_of(resource))
        self._resource = ResourceSpans(resource=message).SerializeToString()
        self._scope = ScopeSpans(scope=scope).SerializeToString()

    def queued(self, items: Iterable[Trace]) -> list[tuple[Trace, int]]:
        """Trees with their numbers of spans."""
        return [(root, 1 + _model_spans(root)) for root in items]

    def requests(self, queued: Iterable[Trace], most: int, most_bytes: int) -> Iterator[tuple[bytes, int]]:
        """Requests within limits, and their numbers of spans; one span may be above the limit of bytes."""
        spans: list[bytes] = []
        for root in queued:
            caller = root.caller
            parent_id = b"" if caller is None else caller.span_id.to_bytes(8, "big")
            state = Span(trace_state=caller.state).SerializeToString() if caller and caller.state else b""
            self._add(spans, root, root.trace_id.to_bytes(16, "big"), parent_id, state, self._offset())
        room = most_bytes - len(self._resource) - len(self._scope) - 2 * _FRAMING
        place = 0
        while place < len(spans):
            left, last = room - len(spans[place]), place + 1
            while last < len(spans) and last - place < most:
                left -= len(spans[last])
                if left < 0:
                    break
                last += 1
            scoped = _field(_SCOPE_SPANS, self._scope + b"".join(spans[place:last]))
            yield _field(_RESOURCE_SPANS, self._resource + scoped), last - place
            place = last

    def _add(
        self, spans: list[bytes], trace: Trace, trace_id: bytes, parent_id: bytes, state: bytes, offset: int
    ) -> None:
        """Adds the spans of a trace and of its subrequests, parents first.

        Args:
            spans: Gets fields of `ScopeSpans`.
            trace: The trace.
            trace_id: Trace id of the tree.
            parent_id: The span above; empty for none.
            state: Bytes of the caller's state, for each span.
            offset: Nanoseconds to add to times.
        """
        own = stamps(trace)
        is_root = trace.parent is None
        status = _status(trace) if is_root else 0
        protocol = trace.protocol if is_root else ""
        route = _route(trace.path) if is_root else ""
        names = map(_name_of, own)
        key = (protocol, route, status, trace.cancelled, bool(parent_id), trace.model, trace.version, *names)
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shape(trace, own, status, route, bool(parent_id))
            if len(self._shapes) < _MOST_SHAPES and len(own) <= _MOST_EVENTS:
                self._shapes[key] = shape
        number = len(own)
        times = pack(f"<{number}Q", *[ns + offset for _, ns in own])
        packed = [times[place : place + 8] for place in range(0, 8 * number, 8)]
        if shape.root is not None:
            told: int | None = getattr(trace, "root_id", None)
            span_id = self._new_id() if told is None else told.to_bytes(8, "big")
            values = [trace_id, span_id, parent_id, *packed]
            spans.append(_field(_SPANS, shape.root(values) + state + self._of_root(trace)))
            parent_id = span_id
        if shape.model is None:
            return
        model_id = trace.span_id.to_bytes(8, "big")
        values = [trace_id, model_id, parent_id, *packed]
        spans.append(_field(_SPANS, shape.model(values) + state + self._of_model(trace)))
        if shape.compute is not None:
            values[SPAN_ID], values[PARENT_ID] = self._new_id(), model_id
            batch = None if trace.times is None else trace.times.batch
            links = (
                b""
                if batch is None
                else Span(links=[_link(batch.trace_id, batch.span_id)]).SerializeToString()
            )
            spans.append(_field(_SPANS, shape.compute(values) + state + links))
        if (batch := _first_of_batch(trace)) is not None:
            spans.append(_field(_SPANS, _batch_span(batch, trace, offset)))
        for record in trace.spans:
            spans.append(_field(_SPANS, _model_code_span(record, trace_id, offset) + state))
        for child in trace.children:
            self._add(spans, child, trace_id, model_id, state, offset)

    def _of_root(self, root: Trace) -> bytes:
        """Attributes of a request's result and its caller."""
        found = _caller_attributes(root.path, root.client, root.agent)
        link: tuple[int, int] | None = getattr(root, "link", None)
        if link is not None:
            found += Span(links=[_link(*link)]).SerializeToString()
        span = Span()
        if root.error is not None:
            self._fail(span, root, root.error)
        elif root.cancelled:
            span.attributes.append(attribute("error.type", "CANCELLED"))
        elif root.reason == "sampled" and "/generate" not in root.path and not root.facts:
            return found
        if root.facts:
            span.attributes.extend(attributes_of(root.facts))
        if "/generate" in root.path and root.parameters:
            for name in _GENERATED:
                value = root.parameters.get(name)
                if isinstance(value, (int, float)):
                    span.attributes.append(attribute(f"gen_ai.request.{name}", value))
        if root.reason != "sampled":
            span.attributes.append(attribute("conch.sampled", root.reason))
        return found + span.SerializeToString()

    def _of_model(self, trace: Trace) -> bytes:
        """Attributes that identify a request, and its error."""
        parent = trace.parent
        found = _number_attribute(_OWN_NUMBER, trace.number)
        found += _number_attribute(_PARENT_NUMBER, 0 if parent is None else parent.number)
        if not trace.request_id and trace.error is None and trace.side is None:
            return found
        span = Span(attributes=attributes_of(route_attributes(trace)))
        if trace.request_id:
            span.attributes.append(attribute("triton.request_id", trace.request_id))
        if trace.error is not None:
            self._fail(span, trace, trace.error)
        return found + span.SerializeToString()

    def _shape(
        self, trace: Trace, own: list[tuple[str, int]], status: int, route: str, has_parent: bool
    ) -> _Shape:
        """The spans of a trace without what differs between requests."""
        parts: dict[int, list[int]] = {_ROOT: [], _MODEL: [], _COMPUTE: []}
        for place, (name, _) in enumerate(own):
            parts[_PARTS.get(name, _ROOT)].append(place)
        if trace.cancelled:  # as in Triton: nothing of the response
            del parts[_ROOT][2 if trace.over_network else 0 :]

        def template(span: Span, part: int, parented: bool) -> SpanTemplate:
            places = parts[part]
            span.events.extend(Span.Event(name=own[place][0]) for place in places[:_MOST_EVENTS])
            span.dropped_events_count = max(len(places) - _MOST_EVENTS, 0)
            # The model may be done with a request after its response was sent.
            ends = list(range(len(own))) if part == _ROOT else places
            start, end = (ends[0], ends[-1]) if ends else (None, 0)
            return SpanTemplate(span, start, end, places[:_MOST_EVENTS], parented)

        root = model = compute = None
        if trace.parent is None:
            root = template(self._root_template(trace, status, route), _ROOT, has_parent)
        if trace.started_ns:  # a refused request has no span but the root
            internal = Span.SPAN_KIND_INTERNAL if self._semconv else Span.SPAN_KIND_SERVER
            span = Span(name=short(trace.model) or "unknown", kind=internal)
            span.attributes.append(attribute("triton.model_name", trace.model))
            span.attributes.append(attribute("triton.model_version", trace.version))
            model = template(span, _MODEL, True)
            if _ran(trace):
                compute = template(Span(name="compute", kind=internal), _COMPUTE, True)
        return _Shape(root, model, compute)

    def _root_template(self, trace: Trace, status: int, route: str) -> Span:
        span = Span(name="InferRequest", kind=Span.SPAN_KIND_SERVER)
        method = _RPC_METHODS.get(trace.protocol)
        if method is not None:
            span.attributes.append(attribute("rpc.system.name", "grpc"))
            span.attributes.append(attribute("rpc.method", method))
            name = STATUS_NAMES[status if status < len(STATUS_NAMES) else _UNKNOWN]
            span.attributes.append(attribute("rpc.response.status_code", name))
        elif trace.protocol == "http":
            method = f"POST {route}".strip()
            span.attributes.append(attribute("http.request.method", "POST"))
            if route:
                span.attributes.append(attribute("http.route", route))
            if "/generate" in route:
                span.attributes.append(attribute("gen_ai.operation.name", "text_completion"))
                span.attributes.append(attribute("gen_ai.request.model", trace.model))
            if status:
                span.attributes.append(attribute("http.response.status_code", status))
        if self._semconv and method is not None:
            span.name = method
        elif self._semconv:  # no server was called
            span.kind = Span.SPAN_KIND_INTERNAL
        return span

    def _fail(self, span: Span, trace: Trace, error: ConchError) -> None:
        """Marks a span as failed; by the conventions, only what is the server's fault fails its span."""
        span.attributes.append(attribute("error.type", error.code))
        span.attributes.append(attribute("conch.error.stage", _stage(trace)))
        if not self._semconv or error.grpc_status in _RPC_FAULTS:
            span.status.code = Status.STATUS_CODE_ERROR
            span.status.message = short(error.message)

    def _new_id(self) -> bytes:
        return self._bits(64).to_bytes(8, "big")

    def _offset(self) -> int:
        """Wall clock minus monotonic clock: one for all, so that parents and children agree."""
        now = self._clock()
        if now >= self._renew_ns:
            self._offset_ns, self._renew_ns = self._wall() - now, now + _OFFSET_NS
        return self._offset_ns


def _stage(trace: Trace) -> str:
    """Stage in which a request failed; for an ensemble, that of its failed step."""
    if not trace.queued_ns:
        return "admission"
    if _ran(trace):
        return "compute"
    for child in trace.children:
        if child.error is not None:
            return _stage(child)
    return "ensemble" if trace.children else "queue"


def _route(path: str) -> str:
    """The route of a path, which does not name the model; empty for gRPC."""
    found = _ROUTE.fullmatch(path)
    if found is None:
        return path
    return f"/v2/models/{{model}}{'/versions/{version}' if found[1] else ''}/{found[2]}"


@lru_cache(maxsize=256)
def _caller_attributes(path: str, client: str, agent: str) -> bytes:
    """Attributes of a call; `client` is such as ``127.0.0.1:50000`` or ``ipv6:[::1]:50000``."""
    span = Span()
    if path:
        span.attributes.append(attribute("url.path", path))
    if agent:
        span.attributes.append(attribute("user_agent.original", agent))
    address, _, port = client.removeprefix("ipv4:").removeprefix("ipv6:").rpartition(":")
    if port.isdecimal():
        span.attributes.append(attribute("network.peer.address", address.strip("[]")))
        span.attributes.append(attribute("network.peer.port", int(port)))
    elif client:
        span.attributes.append(attribute("network.peer.address", client))
    return span.SerializeToString()


def _status(root: Trace) -> int:
    """The status that a protocol answered with; 0 if the client left."""
    error = root.error
    if root.protocol in _RPC_METHODS:
        return error.grpc_status if error is not None else int(root.cancelled)
    if error is not None:
        return error.http_status
    return 0 if root.cancelled else _OK


def _batch_span(batch: TracedBatch, trace: Trace, offset: int) -> bytes:
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
        links=[_link(*member) for member in batch.members[:_MOST_LINKS]],
        dropped_links_count=max(len(batch.members) - _MOST_LINKS, 0),
    )
    return span.SerializeToString()


def _link(trace_id: int, span_id: int) -> Span.Link:
    """A link to a span, by its ids."""
    return Span.Link(trace_id=trace_id.to_bytes(16, "big"), span_id=span_id.to_bytes(8, "big"))


def _model_code_span(record: SpanRecord, trace_id: bytes, offset: int) -> bytes:
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


def _field(tag: bytes, content: bytes) -> bytes:
    """A field of a message, whose content is bytes."""
    return tag + _varint(len(content)) + content


def _number_attribute(head: bytes, number: int) -> bytes:
    """An attribute with a number, as a field of `Span`; `head` is its key."""
    value = b"\x18" + _varint(number)  # AnyValue.int_value
    return _field(_ATTRIBUTES, head + _field(b"\x12", value))  # KeyValue.value
