"""The route that sends a request to a model for the page, and its responses back as server-sent events.

The body is that of the REST port's infer route: JSON, followed by binary tensors. Every model is answered
with a stream: an event for each response, and one with the times at the end. Admission is the server's own.

Threads and locks: event loop; `respond` runs on any thread.
"""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import orjson

from conch.core.admission import Admission
from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import ConchError, ResourceExhaustedError, UnsupportedError
from conch.core.request import (
    Fact,
    InferenceRequest,
    InferenceResponse,
    RequestModel,
    RunTimes,
    SpanRecord,
    TraceCopy,
    Watch,
)
from conch.core.request_log import Caller, RequestLog
from conch.core.response_errors import unsendable
from conch.core.tensor import Array, Tensor, decode_bytes, float_array
from conch.door.door import Door
from conch.door.thread_pool import ThreadPool
from conch.frontends.http.http_exchange import EVENT_STREAM, HttpExchange
from conch.frontends.http.http_pools import result_of
from conch.frontends.http.infer.infer_request import RequestDecoder, check_head, head_length
from conch.frontends.http.infer.infer_response import HEAD_LENGTH
from conch.frontends.http.json_body import read_body
from conch.frontends.http.mailbox import Mailbox, ResponseQueue
from conch.frontends.unread_bytes import UnreadBytes

_COMMENT: Final = b":\n\n"
MOST_TRIES: Final = 32
"""Requests of one principal that run at a time."""

_MOST_RESPONSES: Final = 100_000
_MOST_ELEMENTS: Final = 200_000
"""Elements of the largest tensor sent as values, made on the model's thread; above, a summary is sent."""
_MOST_TEXT_BYTES: Final = 1 << 20

_PROTOCOL = "http"
"""Protocol of the page's requests in access log and traces; the audit log names the console's port."""


class TryRoute:
    """Sends requests of the page to models.

    Args:
        door: The core.
        pool: Decodes bodies.
        most_bytes: Largest body.
        clock: Monotonic time in nanoseconds.
    """

    def __init__(self, door: Door, pool: ThreadPool, most_bytes: int, clock: Clock = monotonic_ns) -> None:
        self._decode = RequestDecoder(most_bytes)
        self._admission = door.admission("console", TimedRequests)
        self._pool = pool
        self._most_bytes = most_bytes
        self._clock = clock
        self._running: Counter[str] = Counter()
        self._mailbox: Mailbox | None = None

    async def __call__(self, exchange: HttpExchange, principal: str, model: str, version: str = "") -> None:
        """Answers one request. Raises ConchError: it is malformed, or the model does not take it."""
        received = self._clock()
        self._admission.check_open()
        head = head_length(exchange.fields[HEAD_LENGTH]) if HEAD_LENGTH in exchange.fields else None
        body = await read_body(exchange, self._most_bytes)
        check_head(head, len(body), self._most_bytes)
        if self._running[principal] >= MOST_TRIES:
            raise ResourceExhaustedError(
                f"{MOST_TRIES} requests of pages of '{principal}' run already; try again"
            )
        self._running[principal] += 1  # once the body is there: a slow one has no place
        if self._mailbox is None:
            self._mailbox = Mailbox(asyncio.get_running_loop(), UnreadBytes())
        call = TryCall(self._admission, self._clock, self._mailbox)
        exchange.on_disconnect = call.end
        try:
            decode = partial(self._decode, (model, version), body, head, call.respond, received)
            try:
                request = await result_of(
                    lambda: self._pool.submit(_begin, decode, call, self._admission, exchange)
                )
            except ConchError as error:
                self._admission.refuse(call.request, error, exchange, len(body), received)
                raise
            exchange.begin_response(200, EVENT_STREAM, _COMMENT)
            await call.send_all(exchange, request)
            if not exchange.lost:
                exchange.end()
        finally:
            self._running[principal] -= 1
            call.end()


def _begin(
    decode: Callable[[], tuple[InferenceRequest, object]],
    call: TryCall,
    admission: Admission,
    exchange: HttpExchange,
) -> InferenceRequest:
    """Decodes and submits a request, on the pool."""
    request, _ = decode()
    call.begin(request)
    if request.named_regions is not None:
        raise UnsupportedError("requests of this page have no tensors in shared-memory regions")
    request.empty_final = False
    admission.admit(request, False, None, exchange, exchange.size)
    return request


class TryCall:
    """One request of a page and its responses.

    Attributes:
        request: The request, once it is decoded.
    """

    def __init__(self, admission: Admission, clock: Clock, mailbox: Mailbox) -> None:
        self._admission = admission
        self._clock = clock
        self._responses: ResponseQueue[tuple[bytes | None, bool]] = ResponseQueue(mailbox)
        self.request: InferenceRequest | None = None
        self._ended_ns = 0

    def respond(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Queues a response, on the model's thread or the I/O loop."""
        now = self._clock()
        body = None
        if response is not None:
            try:
                found = _response_object(response)
            except Exception as error:  # of the model's outputs, which may be anything
                found = {"error": unsendable(request.model_name, response, error).message, "code": "INTERNAL"}
            found["at_us"] = (now - request.received_ns) / 1000
            body = b"event: response\ndata: %b\n\n" % orjson.dumps(found, default=str)
        if final:
            self._ended_ns = now
        size = len(body or b"")
        if request.watch is not None:
            request.watch.bytes_out += size
        self._responses.put((body, final), size)

    def begin(self, request: InferenceRequest) -> None:
        """Sets the request before it is submitted."""
        self.request = request
        request.reader = self._responses

    async def send_all(self, exchange: HttpExchange, request: InferenceRequest) -> None:
        """Sends the responses as they come, and the times behind the last one."""
        left = _MOST_RESPONSES
        while left > 0:
            items = await self._responses.take_all()
            for body, final in items or ():
                if exchange.lost:
                    return
                if body is not None:
                    await exchange.send(body)
                if final:
                    end = orjson.dumps(timing(request, self._ended_ns))
                    await exchange.send(b"event: end\ndata: %b\n\n" % end)
                    return
            if items is None:
                return
            left -= len(items)

    def end(self) -> None:
        """Takes no more responses, and cancels the request if it still runs."""
        self._responses.close()
        if self.request is not None and not self.request.completed:
            self._admission.cancel(self.request)


class TimedRequests:
    """A `RequestLog` that notes the times of each request, and passes all on to the server's, as of HTTP.

    Args:
        within: The server's; None for none.
    """

    on = True

    def __init__(self, within: RequestLog | None) -> None:
        self._within = within
        self.adds_metadata = within is not None and within.adds_metadata

    def begin(
        self,
        request: InferenceRequest,
        model: RequestModel,
        protocol: str,
        caller: Caller | None,
        bytes_in: int,
    ) -> None:
        """Begins in the server's log, and keeps the times."""
        if self._within is not None and self._within.on:
            self._within.begin(request, model, _PROTOCOL, caller, bytes_in)
        model.statistics.watched = True
        request.watch = TimedWatch(request.watch)

    def refuse(
        self,
        request: InferenceRequest | None,
        error: ConchError,
        protocol: str,
        caller: Caller | None,
        bytes_in: int,
        received_ns: int,
    ) -> None:
        """Passes a refusal on."""
        if self._within is not None:
            self._within.refuse(request, error, _PROTOCOL, caller, bytes_in, received_ns)


class TimedWatch:
    """A `Watch` that keeps the times of the batch.

    Args:
        within: The watch of access log and traces; None for none.
    """

    def __init__(self, within: Watch | None) -> None:
        self._within = within
        self._times: RunTimes | None = None
        self.bytes_out = 0

    @property
    def times(self) -> RunTimes | None:
        """Times of the batch."""
        return self._times

    @times.setter
    def times(self, times: RunTimes | None) -> None:
        self._times = times
        if self._within is not None:
            self._within.times = times

    def run(self, times: RunTimes) -> None:
        """Keeps the times, and passes them on."""
        self._times = times
        if self._within is not None:
            self._within.run(times)

    def step(self, request: InferenceRequest, model: RequestModel, kind: str = "ensemble-step") -> None:
        """Passes a step on."""
        if self._within is not None:
            self._within.step(request, model, kind)

    def refused(self, request: InferenceRequest, error: ConchError) -> None:
        """Passes a refusal on."""
        if self._within is not None:
            self._within.refused(request, error)

    def add_span(self, span: SpanRecord) -> None:
        """Passes a span on."""
        if self._within is not None:
            self._within.add_span(span)

    def describe(self, facts: Mapping[str, Fact]) -> None:
        """Passes attributes on."""
        if self._within is not None:
            self._within.describe(facts)

    def copy_trace(self) -> TraceCopy | None:
        """The trace for a copy of the request."""
        return None if self._within is None else self._within.copy_trace()

    @property
    def trace_context(self) -> str:
        """The context of the trace; empty without one."""
        return "" if self._within is None else self._within.trace_context


def timing(request: InferenceRequest, now_ns: int) -> dict[str, Any]:
    """Microseconds of the stages of a request that has ended; the batch that it ran in."""
    found: dict[str, Any] = {"total_us": (now_ns - request.received_ns) / 1000, "stages": []}
    watch = request.watch
    times = None if watch is None else watch.times
    if times is None or not request.queued_ns:
        return found
    end = times.end_ns or now_ns
    input_end = times.input_end_ns or times.start_ns
    output_start = times.output_start_ns or end
    marks = (request.received_ns, request.queued_ns, times.start_ns, input_end, output_start, end, now_ns)
    names = ("receive", "queue", "input", "infer", "output", "respond")
    found["stages"] = [
        [name, max(after - before, 0) / 1000]
        for name, before, after in zip(names, marks, marks[1:], strict=False)
    ]
    found["batch"] = {"rows": times.size, "requests": times.requests}
    return found


# --- outputs as JSON ---------------------------------------------------------------------------------------


def _response_object(response: InferenceResponse) -> dict[str, Any]:
    """One response: its outputs and parameters, or its error."""
    if response.error is not None:
        return {"error": response.error.message, "code": response.error.code}
    return {
        "outputs": [_output(tensor) for tensor in response.outputs],
        "parameters": {key: value for key, value in (response.parameters or {}).items()},
    }


def _output(tensor: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
    tensor.fetch()
    if tensor.datatype == "BYTES":
        return found | _texts(decode_bytes(tensor.data))
    array = float_array(tensor.data, tensor.shape) if tensor.datatype == "BF16" else tensor.numpy()
    flat = array.reshape(-1)
    if flat.size > _MOST_ELEMENTS:
        return found | {"data": None, "summary": _summary(flat)}
    return found | {"data": _numbers(flat)}


def _numbers(flat: Array) -> list[Any]:
    if flat.dtype.kind == "f":
        finite = np.isfinite(flat)
        # JSON has no words for these.
        return [
            value if known else str(value)
            for value, known in zip(flat.tolist(), finite.tolist(), strict=True)
        ]
    if flat.dtype.itemsize == 8 and flat.dtype.kind in "iu":
        return [value if abs(value) < 2**53 else str(value) for value in flat.tolist()]  # of JavaScript
    values: list[Any] = flat.tolist()
    return values


def _texts(elements: Array) -> dict[str, Any]:
    """Elements as text where they are, and else as base64."""
    data: list[Any] = []
    left = _MOST_TEXT_BYTES
    for element in elements[:_MOST_ELEMENTS]:
        left -= len(element)
        if left < 0:
            break
        try:
            data.append(element.decode())
        except UnicodeDecodeError:
            data.append({"base64": base64.b64encode(element).decode()})
    return {"data": data, "left_out": len(elements) - len(data)}


def _summary(flat: Array) -> dict[str, Any]:
    if flat.dtype.kind == "b":
        return {"true": int(flat.sum()), "elements": int(flat.size)}
    values = flat.astype(np.float64)
    return {
        "elements": int(flat.size),
        "least": float(np.nanmin(values)),
        "mean": float(np.nanmean(values)),
        "most": float(np.nanmax(values)),
        "first": _numbers(flat[:100]),
    }
