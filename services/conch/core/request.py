"""Inference requests and responses.

Front ends create requests, schedulers queue them, backends respond to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from conch.core.compiled import mypyc_attr
from conch.core.errors import ConchError
from conch.core.reader import Reader
from conch.core.responder_layers import ResponderLayer
from conch.core.spec import ModelSpec
from conch.core.tensor import Tensor

if TYPE_CHECKING:
    from conch.core.device import DeviceMemory

Parameter = bool | int | float | str
"""A value of a request or response parameter."""


class RequestState(IntEnum):
    """State of a request; only the thread that changes it may answer the request."""

    NEW = 0
    QUEUED = 1
    RUNNING = 2
    DONE = 3


_NEW, _QUEUED, _DONE = RequestState.NEW, RequestState.QUEUED, RequestState.DONE


@mypyc_attr(allow_interpreted_subclasses=True)
class InferenceResponse:
    """One response to a request: outputs in the model's order, or an error; and response parameters."""

    __slots__ = ("error", "outputs", "parameters")

    def __init__(
        self,
        outputs: list[Tensor],
        error: ConchError | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        self.outputs = outputs
        self.error = error
        self.parameters = parameters


Responder = Callable[["InferenceRequest", InferenceResponse | None, bool], None]
"""Takes (request, response, final); the response is None for a final flag alone. Returns at once.

A slow client holds a decoupled model back by the request's `Reader`.
"""


class RegionPart(NamedTuple):
    """A part of a shared-memory region; offset and size in bytes."""

    region: str
    offset: int
    byte_size: int


class NamedRegions:
    """The places of a request's tensors in shared-memory regions, by the names of the tensors.

    Attributes:
        inputs: Places of inputs, which have no data before they are bound.
        outputs: Places of outputs.
    """

    __slots__ = ("inputs", "outputs")

    def __init__(self) -> None:
        self.inputs: dict[str, RegionPart] = {}
        self.outputs: dict[str, RegionPart] = {}


class MemoryBindings(Protocol):
    """The shared-memory regions of a request; wraps its responder once attached.

    Attributes:
        responder: The inner responder; set by `attach`.
    """

    responder: Responder

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Places the outputs of a response and passes it on."""

    def attach(self, request: InferenceRequest) -> None:
        """Wraps the responder of a complete request."""

    def buffer(self, name: str, byte_size: int) -> memoryview | None:
        """Memory for an output to be written to directly; None if there is none, or too little."""

    def device(self, name: str) -> DeviceMemory | None:
        """The device memory of an output; None if it goes elsewhere."""

    def release(self) -> None:
        """Releases the regions."""


class HeldCount(Protocol):
    """Bytes of requests that are held; see `HeldBytes`."""

    def add(self, change: int) -> None:
        """Changes their number."""


class Watchable(Protocol):
    """Counters of a model version, told that a request has a watch by setting `watched`."""

    watched: bool


class RequestModel(Protocol):
    """The model version of a request, as far as holders of the request use it; see `Servable`."""

    @property
    def spec(self) -> ModelSpec:
        """Its description."""

    @property
    def version_text(self) -> str:
        """The version number as the protocol carries it."""

    @property
    def statistics(self) -> Watchable:
        """Its counters."""

    def cancel(self, request: InferenceRequest) -> bool:
        """Cancels a request; see `Servable.cancel`."""


class TracedBatch(NamedTuple):
    """The span of a batch of several requests.

    Attributes:
        trace_id: 128 bits, of its own trace.
        span_id: 64 bits.
        requests: Number of requests of the batch.
        members: Trace and span ids of those that are sampled.
    """

    trace_id: int
    span_id: int
    requests: int
    members: list[tuple[int, int]]


class RunTimes:
    """Times of a batch, without a reference to it; monotonic nanoseconds, 0 while unknown.

    Attributes:
        size: Rows of the batch.
        requests: Its requests.
        batch: Its span; None without one.
    """

    __slots__ = ("batch", "end_ns", "input_end_ns", "output_start_ns", "requests", "size", "start_ns")

    def __init__(self, size: int, start_ns: int, requests: int = 1) -> None:
        self.size = size
        self.requests = requests
        self.batch: TracedBatch | None = None
        self.start_ns = start_ns
        self.input_end_ns = self.output_start_ns = self.end_ns = 0

    def unfinished(self) -> RunTimes:
        """A copy for a request that goes on."""
        times = RunTimes(self.size, self.start_ns, self.requests)
        times.batch = self.batch
        times.input_end_ns = self.input_end_ns
        return times


class SpanRecord(NamedTuple):
    """A span that model code made; see `conch.core.model_spans.span`.

    Attributes:
        name: Name of the work.
        span_id: 64 bits.
        parent_id: Id of the span around it, or of the model's span.
        start_ns: Monotonic nanoseconds.
        end_ns: Monotonic nanoseconds.
        attributes: By their names.
        error_type: The class of the exception that ended it; empty without one.
        error: Its message.
    """

    name: str
    span_id: int
    parent_id: int
    start_ns: int
    end_ns: int
    attributes: Mapping[str, str | bool | int | float]
    error_type: str
    error: str


Fact = str | int | float | Sequence[str]
"""The value of an attribute, as OpenTelemetry has them."""


TraceCopy = Callable[["InferenceRequest", RequestModel], None]
"""Attaches a trace to a copy of a request, once that is submitted."""


class Watch(Protocol):
    """Log entry and spans of one request.

    Attributes:
        times: Times of the batch it ran in last; None before it ran.
        bytes_out: Bytes of its responses, counted by the front end.
    """

    times: RunTimes | None
    bytes_out: int

    def run(self, times: RunTimes) -> None:
        """Takes the times of the batch that the request runs in now, before the model runs."""

    def step(self, request: InferenceRequest, model: RequestModel, kind: str = "ensemble-step") -> None:
        """Begins the entry of a nested request; `kind` is ``ensemble-step`` or ``model-call``."""

    def refused(self, request: InferenceRequest, error: ConchError) -> None:
        """Ends the entry of a request that was not admitted and gets no response."""

    def add_span(self, span: SpanRecord) -> None:
        """Adds a span of the model's own; one that ends after the request is lost."""

    def describe(self, facts: Mapping[str, Fact]) -> None:
        """Adds attributes of the answer, such as ``gen_ai.usage.input_tokens``; by its responder."""

    def copy_trace(self) -> TraceCopy | None:
        """Begins the trace of a copy of the request, which is linked to it; None if it is not sampled."""

    @property
    def trace_context(self) -> str:
        """JSON with ``traceparent`` and ``tracestate`` of the request's span; empty without one."""


@mypyc_attr(allow_interpreted_subclasses=True)
class InferenceRequest:
    """One request for one model.

    The responder may be called from any thread. `respond` lets exactly one final call through; decoupled
    models respond any number of times before it.

    Attributes:
        model: The version that serves the request, once it has taken it.
        model_name: Name as the client gave it.
        model_version: Version as the client gave it, a number or a label; empty for the default one.
        id: The client's request id, or empty.
        inputs: Input tensors by name, in the client's order.
        requested: Names of the outputs the client wants, or None for all of them.
        classes: Number of classes of outputs that are wanted as classifications.
        parameters: Custom request parameters.
        priority: Priority level, 0 for the model's default.
        timeout_us: Queue timeout in microseconds, 0 for the model's default.
        correlation_id: Sequence the request belongs to; 0 or empty for none.
        sequence_start: True if it opens its sequence.
        sequence_end: True if it ends its sequence.
        deadline_ns: Monotonic time after which the client no longer waits, or None.
        depth: Number of requests around it, if a model or an ensemble has made it; else unset.
        empty_final: True if a decoupled request wants a final response even if it is empty.
        batch_size: Rows it adds to a batch; 1 for models without batching.
        batch_key: Requests share a batch only if their keys are equal.
        received_ns: Monotonic time at which the request reached the server.
        queued_ns: Monotonic time at which the scheduler took it.
        cancelled: Set when the client no longer waits.
        context: State of the front end for sending the response; its attribute `caller`, if it has one, is
            the call that the request came with. Of a model's call, the request that the model executes.
        side: The version that a route has chosen for it, by which rule, and the number of the rollout, 0 for
            none; unset without a route.
        sequence: The scheduler's `LiveSequence` of the request; None for none.
        rescheduled: Set by a model that runs the request again instead of ending it.
        answered: True if the last response has been given, also while the request waits to run again.
        failed: True if a model itself has answered with an error.
        backend_state: A backend's state of a rescheduled request until it runs again; unset before.
        reader: Bounds the responses that a client has yet to read, if the model is decoupled; unset for no
            bound. The front end sets it, or the request that this one is a part of.
        responses_wait: True if responses may be held before they are sent, so that arrays which the model
            may change have to be copied.
        signature: The same object for requests that differ only in their id and their tensors' bytes, so
            that validation results can be shared; None if unknown.
        named_regions: The shared-memory regions of the request by name, before its admission binds them; None
            for none.
        region_bindings: The shared-memory regions of the request, bound; None for none.
        watch: Log entry and spans of the request; None if it is neither logged nor traced.
        output_start_ns: Set by a model that tells when it begins to make the outputs of its next response;
            unset, or 0, otherwise.
        on_cancel: Set by an instance that does not block: called once, with the request, if it is
            cancelled while it runs; from any thread with no lock held, possibly just after its last response.
        held: Counts the request's bytes until it is answered; None if they do not count.
        held_bytes: These bytes; 0, before it is admitted, for the size of the client's message.
        filler: True if the request only fills a row of a batch; it is not counted, its responses go nowhere.
    """

    filler: ClassVar[bool] = False

    __slots__ = (
        "_responder",
        "backend_state",
        "batch_key",
        "batch_size",
        "cancelled",
        "classes",
        "completed",
        "context",
        "correlation_id",
        "deadline_ns",
        "depth",
        "empty_final",
        "failed",
        "held",
        "held_bytes",
        "id",
        "inputs",
        "model",
        "model_name",
        "model_version",
        "named_regions",
        "on_cancel",
        "output_start_ns",
        "parameters",
        "priority",
        "queued_ns",
        "reader",
        "received_ns",
        "region_bindings",
        "requested",
        "rescheduled",
        "responses_wait",
        "sequence",
        "sequence_end",
        "sequence_start",
        "side",
        "signature",
        "state",
        "timeout_us",
        "watch",
    )

    depth: int
    backend_state: object
    output_start_ns: int
    reader: Reader
    side: tuple[int, str, int]
    on_cancel: Callable[[InferenceRequest], None]
    __deletable__ = ("on_cancel",)

    def __init__(
        self,
        model_name: str,
        model_version: str,
        inputs: dict[str, Tensor],
        responder: Responder,
        received_ns: int,
        request_id: str = "",
        requested: tuple[str, ...] | None = None,
        parameters: dict[str, Parameter] | None = None,
    ) -> None:
        self.model: RequestModel | None = None
        self.model_name = model_name
        self.model_version = model_version
        self.id = request_id
        self.inputs = inputs
        self.requested = requested
        self.classes: dict[str, int] | None = None
        self.parameters = parameters
        self.priority = 0
        self.timeout_us = 0
        self.correlation_id: int | str = 0
        self.sequence_start = False
        self.sequence_end = False
        self.deadline_ns: int | None = None
        self.empty_final = False
        self.batch_size = 1
        self.batch_key: object = None
        self.received_ns = received_ns
        self.queued_ns = 0
        self.cancelled = False
        self.state = _NEW
        self.signature: object = None
        self.context: object = None
        self.named_regions: NamedRegions | None = None
        self.region_bindings: MemoryBindings | None = None
        self.watch: Watch | None = None
        self.sequence: object = None
        self.rescheduled = False
        self.failed = False
        self.completed = False
        self.responses_wait = False
        self.held: HeldCount | None = None
        self.held_bytes = 0
        self._responder = responder

    def respond(self, response: InferenceResponse | None, final: bool = True) -> None:
        """Sends one response; a call after the final one does nothing. Does not wait for a slow client.

        Args:
            response: The response; None ends a decoupled request without another one.
            final: True if this is the last response.
        """
        if self.completed:
            return
        if final:
            self.completed = True
            # A rescheduled request leaves its queue when the scheduler reaches it.
            if self.state is not _QUEUED:
                self.state = _DONE
            held = self.held
            if held is not None:
                self.held = None
                held.add(-self.held_bytes)
        self._responder(self, response, final)

    @property
    def backpressure(self) -> bool:
        """See `Reader.backpressure`."""
        reader = getattr(self, "reader", None)
        return reader is not None and reader.backpressure

    def when_writable(self, work: Callable[[], object]) -> None:
        """See `Reader.when_writable`."""
        reader = getattr(self, "reader", None)
        if reader is None:
            work()
        else:
            reader.when_writable(work)

    def wait_until_writable(self) -> None:
        """See `Reader.wait_until_writable`; for models after each response but the last."""
        reader = getattr(self, "reader", None)
        if reader is not None:
            reader.wait_until_writable()

    @property
    def outermost(self) -> InferenceRequest:
        """The request of a client for which models and ensembles have made this one; itself if none have."""
        outer = self
        while True:
            context, reader = outer.context, getattr(outer, "reader", None)
            around = context if isinstance(context, InferenceRequest) else reader
            if not isinstance(around, InferenceRequest):
                return outer
            outer = around

    @property
    def responder(self) -> Responder:
        """The outermost responder."""
        return self._responder

    def wrap_responder(self, between: Callable[[Responder], Responder], layer: ResponderLayer) -> None:
        """Wraps the responder; `ResponderLayer` has the order of the calls."""
        bindings = self.region_bindings
        if layer.inside_regions and bindings is not None:
            bindings.responder = between(bindings.responder)
        else:
            self._responder = between(self._responder)
        self.responses_wait |= layer.waits

    def discard(self) -> None:
        """Releases the regions of a request that was not admitted."""
        if self.region_bindings is not None:
            self.region_bindings.release()

    def is_abandoned(self, now_ns: int) -> bool:
        """True if the request is cancelled or its deadline has passed."""
        return self.cancelled or (self.deadline_ns is not None and now_ns >= self.deadline_ns)

    def notify_cancelled(self) -> None:
        """Calls `on_cancel`, if it is set and has not been called."""
        try:
            on_cancel = self.on_cancel
            del self.on_cancel  # only the thread whose `del` succeeds calls it
        except AttributeError:
            return
        on_cancel(self)

    def fail(self, error: ConchError) -> None:
        """Sends an error as the final response."""
        self.respond(InferenceResponse([], error), True)

    @property
    def log_prefix(self) -> str:
        """Prefix of messages about this request; empty without a request id."""
        return id_prefix(self.id)


def id_prefix(request_id: str) -> str:
    """Prefix of messages about a request; unlike in Triton, empty without an id."""
    return f"[request id: {request_id}] " if request_id else ""
