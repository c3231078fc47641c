"""`Trace`: times of one request of one model; the traces of a request and its subrequests are a tree.

The request path records numbers and references only; names, texts and spans are made of them later, on the
tracer's thread.

Threads and locks: threads that handle the request write, each field once; lists only grow. The tracer's
thread reads a tree after its root has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from conch.core.errors import ConchError
from conch.core.request import Fact, RunTimes, SpanRecord
from conch.observability.tracing.trace_settings import TraceSetting

MOST_SPANS = 128
"""Spans of model code that one trace keeps."""


class TraceParent(NamedTuple):
    """A caller's span, as W3C Trace Context has it.

    Attributes:
        trace_id: 128 bits.
        span_id: 64 bits.
        sampled: True if the caller recorded its span.
        state: The header ``tracestate``, or empty.
    """

    trace_id: int
    span_id: int
    sampled: bool
    state: str


class TensorRecord(NamedTuple):
    """The bytes of a tensor when it was queued, or made.

    Attributes:
        activity: ``TENSOR_QUEUE_INPUT`` or ``TENSOR_BACKEND_OUTPUT``.
        name: The tensor's name.
        datatype: Its datatype, as ``FP32``.
        shape: With the batch dimension.
        data: Row-major, in the encoding of the protocol.
    """

    activity: str
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


class Trace:
    """The trace of one request; all times are monotonic nanoseconds, 0 while unknown.

    Attributes:
        number: Triton's id: counts up from 1 in the process.
        setting: The setting that sampled it.
        parent: The trace of the ensemble or model that made the request; None for a client's.
        children: Traces of the requests that were made for this one.
        protocol: ``http``, ``grpc``, ``grpc-stream``, ``direct``, ``ensemble-step``, ``model-call`` or
            ``shadow``.
        model: The model's name.
        version: Its version; 0 if none was found.
        request_id: The client's request id, or empty.
        trace_id: 128 bits, the same in a tree.
        span_id: 64 bits, of the model's span.
        link: Trace and span ids of the request that a shadow's is a copy of; unset for others.
        root_id: 64 bits, of the root span, once a client has got it; unset before.
        path: Path of an HTTP request. Of the root of an exported trace only, as the next two.
        client: Address of the client.
        agent: The client's user agent.
        parameters: Parameters of the request; None for none.
        facts: Attributes that a front end has added; None for none.
        side: The version that a route has chosen, its rule and the rollout; see `InferenceRequest.side`.
        caller: The client's span; None without one. Of the root only.
        received_ns: First byte of the request; of the root only, as the next two.
        read_ns: All of the request was there.
        sends: Start and end of each send, in this order.
        started_ns: The request was handed to the core.
        queued_ns: The scheduler took it.
        times: Times of the batch that ran it; None if it did not run.
        responded_ns: The core passed on the first response, or the end of a request without one.
        ended_ns: The core released the request.
        error: The error of the last response.
        cancelled: True if the client cancelled the request or disconnected.
        reason: Reason to keep the trace: ``sampled``, ``slow`` or ``failed``; empty if it is dropped.
        tensors: Only with level ``TENSORS``.
        rows: Rows of the request.
        spans: Spans that the model's code made.
    """

    __slots__ = (
        "agent",
        "caller",
        "cancelled",
        "children",
        "client",
        "ended_ns",
        "error",
        "facts",
        "link",
        "model",
        "number",
        "parameters",
        "parent",
        "path",
        "protocol",
        "queued_ns",
        "read_ns",
        "reason",
        "received_ns",
        "request_id",
        "responded_ns",
        "root_id",
        "rows",
        "sends",
        "setting",
        "side",
        "span_id",
        "spans",
        "started_ns",
        "tensors",
        "times",
        "trace_id",
        "version",
    )

    link: tuple[int, int]
    root_id: int

    def __init__(
        self,
        number: int,
        setting: TraceSetting,
        parent: Trace | None,
        protocol: str,
        trace_id: int,
        span_id: int,
    ) -> None:
        self.number = number
        self.setting = setting
        self.parent = parent
        self.protocol = protocol
        self.trace_id = trace_id
        self.span_id = span_id
        self.children: list[Trace] = []
        self.path = self.client = self.agent = ""
        self.parameters: Mapping[str, object] | None = None
        self.facts: Mapping[str, Fact] | None = None
        self.side: tuple[int, str, int] | None = None
        self.caller: TraceParent | None = None
        self.model = self.request_id = self.reason = ""
        self.version = self.rows = 0
        self.received_ns = self.read_ns = self.started_ns = self.queued_ns = self.ended_ns = 0
        self.sends: list[int] = []
        self.responded_ns = 0
        self.times: RunTimes | None = None
        self.error: ConchError | None = None
        self.cancelled = False
        self.tensors: list[TensorRecord] = []
        self.spans: list[SpanRecord] = []
        if parent is not None:
            parent.children.append(self)

    @property
    def over_network(self) -> bool:
        """True if a front end received the request, and so sends its responses."""
        return self.parent is None and self.protocol not in ("direct", "shadow")
