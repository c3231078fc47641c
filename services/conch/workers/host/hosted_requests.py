"""Requests and batches in a worker, decoded from messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import ClassVar

from conch.core.errors import ConchError
from conch.core.request import (
    Fact,
    InferenceRequest,
    RequestModel,
    Responder,
    RunTimes,
    SpanRecord,
    TraceCopy,
)
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import ModelSpec
from conch.core.tensor import Tensor
from conch.ipc.channel import WireError
from conch.ipc.codec import (
    CANCELLED,
    FILLER,
    NO_DEADLINE,
    SEQUENCE_END,
    SEQUENCE_START,
    Options,
    batch_of,
    decode_requests,
    number_of,
)
from conch.ipc.response_credit import WINDOW
from conch.ipc.tensors import Area, ReceivedMessage


class HostedRequest(InferenceRequest):
    """A request from the server.

    Attributes:
        number: Its number on the socket.
        granted: Response units that the server has granted; changed by the thread that reads.
        spent: Units used, which the last response may overdraw; changed by the sending thread.
        gone: True once its last response was sent, or the server has forgotten it.
        waiting: Function for `when_writable` to call.
        area: Its inputs where a library reads them by their addresses; None if `inputs` has them.
    """

    __slots__ = ("area", "gone", "granted", "number", "spent", "waiting")

    area: Area | None
    number: int
    granted: int
    spent: int
    gone: bool
    waiting: list[Callable[[], object]] | None

    @property
    def backpressure(self) -> bool:
        """True if the next response has to wait until the server grants units for it."""
        return self.granted <= self.spent and not self.gone

    def when_writable(self, work: Callable[[], object]) -> None:
        """See `Reader.when_writable`."""
        if self.waiting is None:
            self.waiting = []
        self.waiting.append(work)
        if not self.backpressure:
            self.granted_more()

    def wait_until_writable(self) -> None:
        """Returns at once: the next response waits."""

    def granted_more(self) -> None:
        """Calls what waits for units, unless there are none; any thread."""
        while self.waiting and not self.backpressure:
            try:
                work = self.waiting.pop()
            except IndexError:
                return  # another thread has called it
            work()


class HostedFiller(HostedRequest):
    """A padding row of a batch."""

    filler: ClassVar[bool] = True

    __slots__ = ()


class HostedRequests:
    """Requests of executing batches, open and rescheduled ones.

    Args:
        spec: The model version.
        responder: Takes their responses.
        add_span: Takes spans that the model makes, with the number of the request.
        by_address: The model reads inputs by their addresses.
    """

    def __init__(
        self,
        spec: ModelSpec,
        responder: Responder,
        add_span: Callable[[int, SpanRecord], None],
        by_address: bool = False,
    ) -> None:
        self._name = spec.name
        self._version = str(spec.version)
        self.responder = responder
        self._add_span = add_span
        self._by_address = by_address
        self._batches: dict[int, Sequence[HostedRequest]] = {}
        self._unfinished: dict[int, HostedRequest] = {}

    def get(self, number: int) -> HostedRequest | None:
        """A request whose last response was not sent, or that may run again."""
        request = self._unfinished.get(number)
        if request is None:
            batch, index = batch_of(number)
            requests = self._batches.get(batch, ())
            request = requests[index] if index < len(requests) else None
        return None if request is None or request.gone or request.number != number else request

    def remove(self, request: HostedRequest) -> None:
        """Removes a completed request."""
        request.gone = True
        self._unfinished.pop(request.number, None)
        if request.waiting:
            request.granted_more()

    def keep(self, request: HostedRequest) -> None:
        """Keeps a request, even a completed one, to which the server may still refer."""
        request.gone = False
        self._unfinished[request.number] = request

    def end_batch(self, number: int, left: Iterable[HostedRequest] = ()) -> None:
        """Removes an executed batch; keeps those of its requests that go on."""
        staying = set()
        for request in left:
            staying.add(request.number)
            if request.rescheduled:
                self.keep(request)
                continue
            self._unfinished[request.number] = request
            if request.gone:  # another thread has just sent its last response
                self._unfinished.pop(request.number, None)
        requests = self._batches.pop(number, ())
        if self._unfinished:
            for request in requests:
                if request.number not in staying:
                    self._unfinished.pop(request.number, None)

    def batch(self, number: int, received: ReceivedMessage) -> Batch:
        """Decodes a batch.

        Raises:
            WireError: The message is malformed.
            UnreachableError: The memory of a tensor can't be opened here.
        """
        columns = decode_requests(received)
        count = len(columns.rows)
        areas = received.areas(count) if self._by_address else None
        lists: Iterable[list[Tensor]] = repeat([], count) if areas else received.lists(count)
        for failure in (received.unreachable or {}).values():
            raise failure
        name, version, responder = self._name, self._version, self.responder
        requests: list[InferenceRequest] = []
        own: list[HostedRequest] = []
        fillers = 0
        first = number_of(number, 0)
        numbers = columns.numbers or repeat(0)
        for row, request_id, options, former, tensors, area in zip(
            columns.rows, columns.ids, columns.options, numbers, lists, areas or repeat(None), strict=False
        ):
            received_ns, queued_ns, deadline, size, flags = row
            inputs: dict[str, Tensor] = {}
            for tensor in tensors:
                inputs[tensor.name] = tensor
            if former:
                request = self._resumed(former, inputs)
            else:
                kind = HostedFiller if flags & FILLER else HostedRequest
                request = kind(name, version, inputs, responder, received_ns, request_id, options.requested)
                request.number = first + len(own)
                request.granted, request.spent, request.gone = WINDOW, 0, False
                request.waiting = None
            request.area = area
            request.queued_ns = queued_ns
            request.deadline_ns = None if deadline == NO_DEADLINE else deadline
            request.batch_size = size
            if flags or former:
                request.sequence_start = flags & SEQUENCE_START != 0
                request.sequence_end = flags & SEQUENCE_END != 0
                request.cancelled = flags & CANCELLED != 0
                fillers += request.filler
            if options.more:
                self._set_options(request, options, bool(former))
            requests.append(request)
            own.append(request)
        self._batches[number] = own
        batch = Batch(requests, columns.size, None if columns.instance < 0 else columns.instance)
        batch.compute_start_ns = columns.start_ns
        batch.fillers = fillers
        return batch

    def _resumed(self, number: int, inputs: dict[str, Tensor]) -> HostedRequest:
        """A request that runs again."""
        request = self._unfinished.get(number)
        if request is None:
            raise WireError(f"request {number} runs again, but has not run")
        request.inputs = inputs
        request.rescheduled = False
        return request

    def _set_options(self, request: HostedRequest, options: Options, again: bool) -> None:
        if options.parameters is not None and not again:
            request.parameters = dict(options.parameters)
        request.correlation_id = options.correlation_id
        request.priority = options.priority
        request.timeout_us = options.timeout_us
        if options.trace:
            request.watch = _HostedWatch(options.trace, partial(self._add_span, request.number))


class _HostedWatch:
    """A `Watch` of a worker: it knows the trace, and sends spans; all else is recorded in the server."""

    def __init__(self, trace_context: str, add_span: Callable[[SpanRecord], None]) -> None:
        self.times: RunTimes | None = None
        self.bytes_out = 0
        self.trace_context = trace_context
        self.add_span = add_span

    def run(self, times: RunTimes) -> None:
        """Times are recorded in the server."""

    def step(self, request: InferenceRequest, model: RequestModel, kind: str = "") -> None:
        """Calls of a worker are recorded in the server."""

    def refused(self, request: InferenceRequest, error: ConchError) -> None:
        """Likewise."""

    def describe(self, facts: Mapping[str, Fact]) -> None:
        """Likewise."""

    def copy_trace(self) -> TraceCopy | None:
        """Likewise: the server copies requests."""
        return None
