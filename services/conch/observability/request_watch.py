"""`RequestWatches`: begins the log entries and traces of requests; implements `RequestLog` of the core.

A watch is outside the regions of a request and inside everything else that wraps its responder, so it sees
each response once. Its times end up in a line of the access log, a `Trace`, or both.

Threads and locks: any thread; no locks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial

from conch.core.clock import Clock, monotonic_ns, wall_seconds
from conch.core.errors import ConchError
from conch.core.request import (
    Fact,
    InferenceRequest,
    InferenceResponse,
    RequestModel,
    Responder,
    RunTimes,
    SpanRecord,
    TraceCopy,
)
from conch.core.request_log import Caller
from conch.core.responder_layers import ResponderLayer
from conch.core.tensor import Tensor
from conch.observability.logging.access_log import OK, AccessLog, AccessRecord
from conch.observability.tracing.trace import MOST_SPANS, TensorRecord, Trace
from conch.observability.tracing.trace_context import format_traceparent
from conch.observability.tracing.trace_settings import SettingListener
from conch.observability.tracing.tracer import Tracer

_NO_ORIGIN = ("", "")
_QUEUED, _MADE = "TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"


class RequestWatches(SettingListener):
    """Watches requests for the access log and the tracer.

    Args:
        access: The access log; None for none.
        tracer: Samples requests.
        clock: Monotonic time in nanoseconds.

    Attributes:
        on: True if requests are traced or logged.
        adds_metadata: True if responses carry the ``traceparent`` of their requests.
    """

    def __init__(self, access: AccessLog | None, tracer: Tracer, clock: Clock = monotonic_ns) -> None:
        self.access = access
        self.tracer = tracer
        self.clock = clock
        # An attribute, as every request looks at it.
        self.on = access is not None or tracer.on
        self.adds_metadata = tracer.returns_traceparent
        tracer.settings.add_listener(self)

    def tracing_switched(self, on: bool) -> None:
        """Follows a change of the trace settings."""
        self.on = self.access is not None or on

    def begin(
        self,
        request: InferenceRequest,
        model: RequestModel,
        protocol: str,
        caller: Caller | None,
        bytes_in: int,
    ) -> None:
        """Attaches a watch to a request that is logged or traced."""
        trace = self.tracer.begin(request, model.spec.name, protocol, caller)
        if trace is None and self.access is None:
            return
        origin = _NO_ORIGIN if caller is None or self.access is None else _origin(caller)
        watch = RequestWatch(self, self.access, trace, protocol, origin, bytes_in)
        watch.attach(request, model)

    def begin_copy(self, trace: Trace, copy: InferenceRequest, model: RequestModel) -> None:
        """Traces a copy of a traced request, for a shadow; it has no line in the access log."""
        RequestWatch(self, None, self.tracer.linked(trace), "shadow", _NO_ORIGIN, 0).attach(copy, model)

    def refuse(
        self,
        request: InferenceRequest | None,
        error: ConchError,
        protocol: str,
        caller: Caller | None,
        bytes_in: int,
        received_ns: int,
    ) -> None:
        """Logs and traces a refused request."""
        if not self.on:
            return
        if request is None:
            request = InferenceRequest("", "", {}, _no_responder, received_ns)
        watch = request.watch
        if watch is None:
            trace = self.tracer.begin(request, request.model_name, protocol, caller)
            origin = _NO_ORIGIN if caller is None or self.access is None else _origin(caller)
            watch = RequestWatch(self, self.access, trace, protocol, origin, bytes_in)
        watch.refused(request, error)


class RequestWatch:
    """The watch of one request."""

    __slots__ = ("_access", "_bytes_in", "_done", "_facts", "_origin", "_protocol", "_responder",
                 "_responses", "_version", "_watches", "bytes_out", "times", "trace")  # fmt: skip

    _responder: Responder

    def __init__(
        self,
        watches: RequestWatches,
        access: AccessLog | None,
        trace: Trace | None,
        protocol: str,
        origin: tuple[str, str],
        bytes_in: int,
    ) -> None:
        self._watches = watches
        self._access = access
        self.trace = trace
        self._protocol = protocol
        self._origin = origin
        self._bytes_in = bytes_in
        self._version = ""
        self._responses = 0
        self._done = False
        self.bytes_out = 0
        self._facts: Mapping[str, Fact] | None = None
        self.times: RunTimes | None = None

    def attach(self, request: InferenceRequest, model: RequestModel) -> None:
        """Watches a request from now on."""
        model.statistics.watched = True
        self._version = model.version_text
        request.watch = self
        trace = self.trace
        if trace is not None:
            trace.model = model.spec.name
            trace.version = model.spec.version
            trace.started_ns = self._watches.clock()
            if trace.setting.values.tensors:
                trace.tensors += [_record(_QUEUED, tensor) for tensor in request.inputs.values()]
        request.wrap_responder(self._set_responder, ResponderLayer.WATCH)

    def _set_responder(self, responder: Responder) -> Responder:
        self._responder = responder
        return self

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Takes a response of the model and passes it on."""
        if response is not None:
            self._responses += 1
        trace, now = self.trace, 0
        if trace is not None:
            now = self._watches.clock()
            trace.responded_ns = trace.responded_ns or now
            if response is not None and trace.setting.values.tensors:
                trace.tensors += [_record(_MADE, tensor) for tensor in response.outputs]
        try:
            self._responder(request, response, final)
        finally:
            if trace is not None and trace.over_network and (response is not None or final):
                trace.sends += (now, self._watches.clock())
            if final:
                self._end(request, None if response is None else response.error, now)

    def run(self, times: RunTimes) -> None:
        """Takes the times of the request's batch."""
        self.times = times
        trace = self.trace
        if trace is not None and times.requests > 1 and trace.reason:
            self._watches.tracer.join_batch(trace, times)

    def step(self, request: InferenceRequest, model: RequestModel, kind: str = "ensemble-step") -> None:
        """Watches a subrequest if it is traced or logged."""
        access = self._access
        if access is not None and not access.steps():
            access = None
        parent = self.trace
        if parent is None and access is None:
            return
        trace = None if parent is None else self._watches.tracer.child(parent, kind)
        RequestWatch(self._watches, access, trace, kind, self._origin, 0).attach(request, model)

    def refused(self, request: InferenceRequest, error: ConchError) -> None:
        """Records an error that did not pass the responder."""
        if not self._done:
            self._responses += 1
            self._end(request, error)

    def add_span(self, span: SpanRecord) -> None:
        """Adds a span of the model's own."""
        trace = self.trace
        if trace is None:
            return
        if len(trace.spans) < MOST_SPANS:
            trace.spans.append(span)
        elif trace.reason:
            self._watches.tracer.drops.add("limit", 1)

    def describe(self, facts: Mapping[str, Fact]) -> None:
        """Adds attributes of the answer."""
        self._facts = facts

    def copy_trace(self) -> TraceCopy | None:
        """Traces a copy of the request if the request is sampled."""
        trace = self.trace
        return None if trace is None or not trace.reason else partial(self._watches.begin_copy, trace)

    @property
    def trace_context(self) -> str:
        """The headers of the request's span for those that it calls."""
        trace = root = self.trace
        if trace is None or not self._watches.tracer.propagates:
            return ""
        headers = {"traceparent": format_traceparent(trace.trace_id, trace.span_id, bool(trace.reason))}
        while root is not None and root.parent is not None:
            root = root.parent
        if root is not None and root.caller is not None and root.caller.state:
            headers["tracestate"] = root.caller.state
        return json.dumps(headers, separators=(",", ":"))

    def _end(self, request: InferenceRequest, error: ConchError | None, responded_ns: int = 0) -> None:
        self._done = True
        now = self._watches.clock()
        if self._access is not None:
            self._access.add(self._line(request, error, now))
        trace, self.trace = self.trace, None
        if trace is not None:
            trace.request_id = request.id
            trace.rows = request.batch_size
            trace.parameters = request.parameters
            trace.facts = self._facts
            trace.side = getattr(request, "side", None)
            trace.received_ns = request.received_ns
            trace.queued_ns = request.queued_ns
            model = request.model
            if model is None or model.spec.ensemble is None:  # an ensemble computes nothing itself
                trace.times = self.times
            trace.error = error
            trace.cancelled = request.cancelled
            if not trace.model:  # refused
                trace.model = request.model_name
            self._watches.tracer.end_trace(trace, responded_ns or now)

    def _line(self, request: InferenceRequest, error: ConchError | None, now: int) -> AccessRecord:
        code = OK if error is None else error.code
        if request.cancelled and error is None:
            code = "CANCELLED"  # the model finished, but the result was discarded
        times = self.times
        model = request.model
        queue = infer_input = infer = output = 0
        if times is not None:
            input_end = times.input_end_ns or times.start_ns
            end = times.end_ns or now
            output_start = times.output_start_ns or end
            queue = times.start_ns - request.queued_ns
            infer_input, infer, output = (
                input_end - times.start_ns,
                output_start - input_end,
                end - output_start,
            )
        elif request.queued_ns:
            queue = now - request.queued_ns
        version = self._version or request.model_version
        return AccessRecord(
            ts=wall_seconds(),
            protocol=self._protocol,
            client=self._origin[0],
            id=request.id,
            model=request.model_name,
            version=version if model is None else model.version_text,
            code=code,
            error="" if error is None else error.message,
            rows=request.batch_size,
            batch_size=0 if times is None else times.size,
            responses=self._responses,
            bytes_in=self._bytes_in,
            bytes_out=self.bytes_out,
            queue_us=queue // 1000,
            compute_input_us=infer_input // 1000,
            compute_infer_us=infer // 1000,
            compute_output_us=output // 1000,
            total_us=(now - request.received_ns) // 1000,
            trace_id="" if self.trace is None or not self.trace.reason else f"{self.trace.trace_id:032x}",
            principal=self._origin[1],
            facts=self._facts,
        )


def _origin(caller: Caller) -> tuple[str, str]:
    """Address and principal of a caller."""
    return caller.client, "" if caller.access is None else caller.access.name


def _record(activity: str, tensor: Tensor) -> TensorRecord:
    # A copy: the memory may be a client's, or used again.
    return TensorRecord(activity, tensor.name, tensor.datatype, tuple(tensor.shape), bytes(tensor.data))


def _no_responder(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
    """The responder of an unreadable request."""
