"""ModelStreamInfer: many requests on one stream.

Responses of models that are not decoupled are sent in the order of their requests, decoupled ones as they
come. A model that sends faster than the client reads waits, see `Reader`. Errors are messages and leave the
stream open, unless the client sends the metadata ``triton_grpc_error: true``, which makes them gRPC errors.
Owns: the slots of each stream's open requests.
Threads and locks: one lock for each stream, held while a message is written, so that order is kept.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

from conch.core.clock import Clock
from conch.core.errors import ConchError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.response_errors import unsendable
from conch.core.servable import InlineClaim
from conch.core.spec import ModelSpec
from conch.core.tensor import Buffer
from conch.door.door import Door
from conch.frontends.grpc.guarded_rpcs import PrepareRequest
from conch.frontends.grpc.request_decoder import LONG_BYTES, RequestDecoder
from conch.frontends.grpc.response_encoder import (
    RETRY_PARAMETER,
    ResponseEncoder,
    encode_parameters,
    joined,
    retry_metadata,
)
from conch.frontends.grpc.rpc_calls import Metadata, StreamRpc
from conch.frontends.grpc.wire_format import length_header
from conch.frontends.load_reports import LoadReports, trailing
from conch.protocol import inference_pb2

_OK = 0
_ERROR_MESSAGE = 1
_INFER_RESPONSE = 2
_FINAL = encode_parameters({"triton_final_response": True})
_NOT_FINAL = encode_parameters({"triton_final_response": False})
SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."


class _Slot:
    """A request's slot in its stream; holds its messages until earlier ordered requests are done."""

    __slots__ = ("_admitted", "_waits", "done", "messages", "ordered", "request", "stream", "waited")

    def __init__(self, stream: InferStream) -> None:
        self.stream = stream
        self.request: InferenceRequest | None = None
        self.ordered = False
        self.messages: list[bytes] = []
        self.done = False
        self.waited = False
        self._admitted = False
        self._waits = 0

    def wait_began(self) -> None:
        """See `WaitObserver`."""
        with self.stream.lock:
            self.waited = True
            self._waits += 1

    def wait_ended(self) -> None:
        """See `WaitObserver`; reads the next message if the request was the last one read."""
        with self.stream.lock:
            self._waits -= 1
            reads = self._admitted and not self._waits
        if reads:
            self.stream.call.read_next()

    def admitted(self) -> bool:
        """Notes that `Admission.admit` has returned; True if the request does not wait any more."""
        with self.stream.lock:
            self._admitted = True
            return not self._waits

    @property
    def caller(self) -> StreamRpc:
        """The call, for the context of a request."""
        return self.stream.call


class InferStream:
    """The requests of one ModelStreamInfer call; `deadline_ns` is monotonic, None without a deadline."""

    def __init__(self, call: StreamRpc, handler: StreamInferHandler, real_errors: bool) -> None:
        self.call = call
        self._handler = handler
        self._real_errors = real_errors
        self.lock = threading.Lock()
        self._open: set[_Slot] = set()
        self._ordered: deque[_Slot] = deque()
        self._complete = False  # no more requests are taken
        self._closing = (_OK, "")
        self.deadline_ns: int | None = None

    def on_message(self, message: Buffer | None) -> None:
        """Receives a request, or None at half-close."""
        if message is None:
            with self.lock:
                # Also while draining: what comes is read in order, so no request was dropped.
                self._complete, self._closing = True, (_OK, "")
                finished = not self._open
            if finished:
                self._close(_OK, "")
            return
        slot = _Slot(self)
        with self.lock:
            if self._complete:
                return  # draining: the stream closes with a status, and nothing more is read
            self._open.add(slot)
        self._handler.submit(self.call, slot, message)

    def on_cancel(self) -> None:
        """Cancels all requests in flight: the client has cancelled the call or disconnected."""
        with self.lock:
            requests = [slot.request for slot in self._open if slot.request is not None]
            for slot in self._open:
                slot.request = None  # breaks a reference cycle
            self._open.clear()
            self._ordered.clear()
        for request in requests:
            self._handler.admission.cancel(request)

    def on_drain(self, status: int, details: str) -> None:
        """Takes no more requests; closes with the status when those in flight are done."""
        with self.lock:
            if self._complete:
                return  # the client has ended the stream
            self._complete, self._closing = True, (status, details)
            finished = not self._open
        if finished:
            self._close(status, details)

    def _close(self, status: int, details: str, metadata: Metadata | None = None) -> None:
        self.call.close(status, details, trailing(self._handler.reports, metadata))

    def send(self, slot: _Slot, message: bytes | None, final: bool, error: ConchError | None = None) -> None:
        """Sends a serialised ModelStreamInferResponse, or holds it until earlier ordered requests are done.

        `message` may be None; `final` ends the request; `error` is the error in the message.
        """
        if error is not None and self._real_errors:
            self._close(error.grpc_status, error.message, retry_metadata(error))
            self.on_cancel()
            return
        # Writes under the lock, or two threads could swap their messages.
        with self.lock:
            if slot not in self._open:
                return
            if message is not None:
                if not slot.ordered or self._ordered[0] is slot:
                    self.call.write(message)
                else:
                    slot.messages.append(message)
            if final:
                slot.done = True
                slot.request = None  # breaks a reference cycle
                self._open.discard(slot)
                self._flush()
            finished = self._complete and not self._open
        if finished:
            self._close(*self._closing)

    def order(self, slot: _Slot) -> None:
        """Makes a request's responses wait for those of earlier ordered requests."""
        with self.lock:
            if slot in self._open and not slot.ordered:
                slot.ordered = True
                self._ordered.append(slot)

    def _flush(self) -> None:
        """Removes done requests at the head; sends the held messages of the next one."""
        ordered = self._ordered
        while ordered:
            for message in ordered[0].messages:
                self.call.write(message)
            ordered[0].messages = []
            if not ordered[0].done:
                return
            ordered.popleft()


class StreamInferHandler:
    """Handles ModelStreamInfer calls; for the arguments see `InferHandler`.

    Attributes:
        admission: Admits the requests.
        received: Number of requests so far.
        reports: Adds load reports to the trailing metadata, or None.
    """

    def __init__(
        self,
        door: Door,
        queue_inline: Callable[[InlineClaim], None],
        encoder: ResponseEncoder,
        clock: Clock,
        decoding: Executor,
        prepare: PrepareRequest | None = None,
        compression: str | None = None,
        reports: LoadReports | None = None,
    ) -> None:
        self.admission = door.admission("grpc-stream")
        self._compression = compression
        self._queue_inline = queue_inline
        self._encoder = encoder
        self._clock = clock
        self._decode = RequestDecoder()
        self._decoding = decoding
        self._prepare = prepare
        self.received = 0
        self.reports = reports

    def __call__(self, call: StreamRpc) -> None:
        """Opens a stream."""
        real_errors = any(key == "triton_grpc_error" and value == "true" for key, value in call.metadata)
        stream = InferStream(call, self, real_errors)
        stream.deadline_ns = call.deadline_ns(self._clock())
        call.on_drain = stream.on_drain
        call.start(stream.on_message, stream.on_cancel, self._compression)

    def submit(self, call: StreamRpc, slot: _Slot, message: Buffer, polling: bool = True) -> None:
        """Submits one request of a stream, then reads the next one.

        `polling` is True on a transport's thread, which leaves long messages to a pool.
        """
        self.received += 1
        now_ns = self._clock()
        request: InferenceRequest | None = None
        try:
            if polling and len(message) >= LONG_BYTES and self._decode.is_long(message):
                work = partial(self.submit, call, slot, message, False)
                self.admission.defer(len(message), self._decoding, work)
                return
            request = self._decode(message, self._respond, now_ns)
            request.context = slot
            request.reader = call
            request.deadline_ns = slot.stream.deadline_ns
            slot.request = request
            if self._prepare is not None:
                self._prepare(request, call, len(message))
            claim = self.admission.admit(
                request, polling, None, call, len(message), fit=_order, observer=slot
            )
            if claim is not None:
                self._queue_inline(claim)
            if slot.waited and not slot.admitted():
                return  # the next message is read when the wait ends
        except Exception as error:  # boundary: the client gets an answer, whatever happens
            # A local variable for the error would be in a reference cycle with its traceback.
            self._send_error(slot, request, self.admission.refuse(request, error, call, len(message), now_ns))
        # Last, so that requests are queued in order: another thread may handle the next message.
        call.read_next()

    def _send_error(self, slot: _Slot, request: InferenceRequest | None, error: ConchError) -> None:
        """Sends the error of a request that no model has taken."""
        if request is not None:
            request.discard()
        slot.stream.order(slot)
        response = inference_pb2.ModelStreamInferResponse(error_message=error.message)
        if request is not None:
            response.infer_response.id = request.id
        if error.retry_after_ms is not None:
            response.infer_response.parameters[RETRY_PARAMETER].int64_param = error.retry_after_ms
        slot.stream.send(slot, response.SerializeToString(), True, error)

    def _respond(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        slot = request.context
        assert isinstance(slot, _Slot)
        try:
            if response is None and not request.empty_final:
                slot.stream.send(slot, None, final)
                return
            error = None if response is None else response.error
            if error is not None and request.model is None:
                self._send_error(slot, request, error)
                return
            parts = self._encoder.parts(request, None if error is not None else response)
            parts.append(_FINAL if final else _NOT_FINAL)
            if error is not None and error.retry_after_ms is not None:
                parts.append(encode_parameters({RETRY_PARAMETER: error.retry_after_ms}))
            message: list[Buffer] = [length_header(_INFER_RESPONSE, sum(map(_size, parts))), *parts]
            if error is not None:
                text = error.message.encode()
                message[:0] = [length_header(_ERROR_MESSAGE, len(text)), text]
            whole = joined(message)
            if request.watch is not None:
                request.watch.bytes_out += len(whole)
            slot.stream.send(slot, whole, final, error)
        except ConchError as shown:
            self._send_error(slot, request, shown)
        except Exception as failure:  # boundary: outputs that user code has made
            self._send_error(slot, request, unsendable(request.model_name, response, failure))


def _order(request: InferenceRequest, spec: ModelSpec) -> None:
    """Keeps the responses of models that are not decoupled in the order of their requests."""
    if not spec.decoupled:
        slot = request.context
        assert isinstance(slot, _Slot)
        slot.stream.order(slot)


def _size(part: Buffer) -> int:
    return part.nbytes if type(part) is memoryview else len(part)
