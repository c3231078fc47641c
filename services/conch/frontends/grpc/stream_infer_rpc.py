"""ModelStreamInfer: many requests on one stream.

Responses of models that are not decoupled leave in the order of their requests; decoupled responses as
they come, and a model that sends them faster than the client reads is made to wait. Errors travel in
messages of their own and leave the stream open, unless its client asked for real gRPC errors with the
metadata ``triton_grpc_error: true``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor

from conch.core.clock import Clock
from conch.core.errors import ConchError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.response_errors import unsendable
from conch.core.server_state import ServerState
from conch.core.tensor import Buffer
from conch.frontends.grpc.adapter import Server, StreamCall
from conch.frontends.grpc.metadata_forwarding import HeaderForwarder
from conch.frontends.grpc.request_decoder import LONG_BYTES, RequestDecoder
from conch.frontends.grpc.response_encoder import ResponseEncoder, encode_parameters, joined
from conch.frontends.grpc.retry import PARAMETER, retry_metadata
from conch.frontends.grpc.wire_format import length_header
from conch.memory.regions import Regions
from conch.protocol import inference_pb2

_OK = 0
_ERROR_MESSAGE = 1
_INFER_RESPONSE = 2
_FINAL = encode_parameters({"triton_final_response": True})
_NOT_FINAL = encode_parameters({"triton_final_response": False})
SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."


class _Place:
    """A request's place in its stream: what it has to say, kept until it is its turn."""

    __slots__ = ("done", "messages", "ordered", "request", "stream")

    def __init__(self, stream: InferStream) -> None:
        self.stream = stream
        self.request: InferenceRequest | None = None
        self.ordered = False
        self.messages: list[bytes] = []
        self.done = False


class InferStream:
    """The requests of one ModelStreamInfer call.

    Attributes:
        deadline_ns: Monotonic time after which the client has gone, or None.
    """

    def __init__(self, call: StreamCall, handler: StreamInferHandler, real_errors: bool) -> None:
        self._call = call
        self._handler = handler
        self._real_errors = real_errors
        self._lock = threading.Lock()
        self._open: set[_Place] = set()
        self._ordered: deque[_Place] = deque()
        self._half_closed = False
        self._closing = (_OK, "")
        self.deadline_ns: int | None = None

    def on_message(self, message: bytes | None) -> None:
        """Takes a request, or None once the client has no more."""
        if message is None:
            with self._lock:
                self._half_closed = True
                finished = not self._open
            if finished:
                self._call.close()
            return
        place = _Place(self)
        with self._lock:
            if self._half_closed:
                return  # the server stops; the stream is closed with a status that says so
            self._open.add(place)
        self._handler.submit(self._call, place, message)

    def on_cancel(self) -> None:
        """Cancels everything in flight; the client has gone."""
        with self._lock:
            requests = [place.request for place in self._open if place.request is not None]
            for place in self._open:
                place.request = None  # it refers to the place
            self._open.clear()
            self._ordered.clear()
        for request in requests:
            self._handler.admission.cancel(request)

    def on_drain(self, status: int, details: str) -> None:
        """Takes no more requests and closes, with the status, when those in flight are answered."""
        with self._lock:
            self._closing = (status, details)
            self._half_closed = True
            finished = not self._open
        if finished:
            self._call.close(status, details)

    def say(self, place: _Place, message: bytes | None, final: bool, error: ConchError | None = None) -> None:
        """Sends a message of a request, or keeps it until those before it are done.

        Args:
            place: Whose message it is.
            message: A serialised ModelStreamInferResponse, or None to say nothing.
            final: Whether the request is done with it.
            error: The error the message carries, if any.
        """
        if error is not None and self._real_errors:
            self._call.close(error.grpc_status, error.message, retry_metadata(error))
            self.on_cancel()
            return
        # Written under the lock, or two threads could swap the order of what they take out of it.
        with self._lock:
            if place not in self._open:
                return
            if message is not None:
                if not place.ordered or self._ordered[0] is place:
                    self._call.write(message)
                else:
                    place.messages.append(message)
            if final:
                place.done = True
                place.request = None  # it refers to the place
                self._open.discard(place)
                self._flush()
            finished = self._half_closed and not self._open
        if finished:
            self._call.close(*self._closing)

    def wait_for_reader(self) -> None:
        """Returns when the client has not too much left to read, or none of it will be sent."""
        self._call.wait_for_reader()

    def order(self, place: _Place) -> None:
        """Says that a request's response waits for those of the requests before it."""
        with self._lock:
            if place in self._open and not place.ordered:
                place.ordered = True
                self._ordered.append(place)

    def _flush(self) -> None:
        """Forgets finished requests at the head and sends what the next ones have kept."""
        ordered = self._ordered
        while ordered:
            for message in ordered[0].messages:
                self._call.write(message)
            ordered[0].messages = []
            if not ordered[0].done:
                return
            ordered.popleft()


class StreamInferHandler:
    """Answers ModelStreamInfer calls.

    Args:
        core: Runs the requests.
        server: Leads models.
        encoder: Makes the response messages.
        clock: Monotonic time in nanoseconds.
        long: Takes long messages, off the polling threads.
        forward: Turns the stream's metadata into request parameters, or None.
        compression: gRPC's name of the algorithm responses are compressed with, or None.
        regions: The shared-memory regions that tensors may lie in; None for none.

    Attributes:
        admission: The way in for its requests.
        taken: How many requests have come in.
    """

    def __init__(
        self,
        core: ServerState,
        server: Callable[[], Server],
        encoder: ResponseEncoder,
        clock: Clock,
        long: Executor,
        forward: HeaderForwarder | None = None,
        compression: str | None = None,
        regions: Regions | None = None,
    ) -> None:
        self.admission = core.admission("grpc-stream")
        self._compression = compression
        self._server_of = server
        self._encoder = encoder
        self._clock = clock
        self._decode = RequestDecoder(regions)
        self._long = long
        self._forward = forward
        self.taken = 0

    def __call__(self, call: StreamCall) -> None:
        """Opens a stream."""
        real_errors = any(key == "triton_grpc_error" and value == "true" for key, value in call.metadata)
        stream = InferStream(call, self, real_errors)
        stream.deadline_ns = call.deadline_ns(self._clock())
        call.on_drain = stream.on_drain
        call.start(stream.on_message, stream.on_cancel, self._compression)

    def submit(self, call: StreamCall, place: _Place, message: bytes, polling: bool = True) -> None:
        """Submits one request of a stream and lets the next one come in.

        Args:
            call: The stream's call.
            place: The request's place in the stream.
            message: The request.
            polling: Whether the calling thread is a polling one, which has no time for long messages.
        """
        self.taken += 1
        if polling and len(message) >= LONG_BYTES and self._decode.is_long(message):
            self._long.submit(self.submit, call, place, message, False)
            return
        now_ns = self._clock()
        request: InferenceRequest | None = None
        try:
            request = self._decode(message, self._respond, now_ns)
            request.context = place
            request.deadline_ns = place.stream.deadline_ns
            place.request = request
            if self._forward is not None:
                self._forward(request, call.metadata)
            self.admission.check_refused(request)
            model = self.admission.resolve(request)
            if not model.spec.decoupled:
                place.stream.order(place)
            client = call.peer if self.admission.logs else ""
            claim = self.admission.admit(request, polling, model, client, len(message))
            if claim is not None:
                self._server_of().queue_inline(claim)
        except Exception as error:
            shown = self.admission.refuse(request, error, call.peer, len(message), now_ns)
            self._say_error(place, request, shown)
        # Only now may another thread take this stream's next message: requests are queued in order.
        call.read_next()

    def _say_error(self, place: _Place, request: InferenceRequest | None, error: ConchError) -> None:
        """Answers a request that never reached a model."""
        if request is not None:
            request.discard()
        place.stream.order(place)
        response = inference_pb2.ModelStreamInferResponse(error_message=error.message)
        if request is not None:
            response.infer_response.id = request.id
        if error.retry_after_ms is not None:
            response.infer_response.parameters[PARAMETER].int64_param = error.retry_after_ms
        place.stream.say(place, response.SerializeToString(), True, error)

    def _respond(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        place = request.context
        assert isinstance(place, _Place)
        try:
            if response is None and not request.empty_final:
                place.stream.say(place, None, final)
                return
            error = None if response is None else response.error
            parts = self._encoder.parts(request, None if error is not None else response)
            parts.append(_FINAL if final else _NOT_FINAL)
            if error is not None and error.retry_after_ms is not None:
                parts.append(encode_parameters({PARAMETER: error.retry_after_ms}))
            message: list[Buffer] = [length_header(_INFER_RESPONSE, sum(map(_size, parts))), *parts]
            if error is not None:
                text = error.message.encode()
                message[:0] = [length_header(_ERROR_MESSAGE, len(text)), text]
            whole = joined(message)
            if request.watch is not None:
                request.watch.bytes_out += len(whole)
            place.stream.say(place, whole, final, error)
            if not place.ordered:
                place.stream.wait_for_reader()
        except ConchError as shown:
            self._say_error(place, request, shown)
        except Exception as failure:
            self._say_error(place, request, unsendable(request.model_name, response, failure))


def _size(part: Buffer) -> int:
    return part.nbytes if type(part) is memoryview else len(part)
