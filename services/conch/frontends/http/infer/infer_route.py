"""The infer route: decodes a request, submits it to admission, encodes its response.

Threads and locks: event loop, except `_do` (parsing pool) and `_respond` (any thread).
Used by `http_server`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Final

from conch.core.admission import Admission
from conch.core.clock import Clock
from conch.core.errors import ConchError, InternalError, InvalidArgumentError, UnavailableError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.response_errors import unsendable
from conch.core.servable import Servable
from conch.core.server_state import ServerState
from conch.core.tensor import Buffer, copied
from conch.frontends.http.flow_control import MOST_CHUNKS, TooManyChunksError, UnreadBodyError, body_size
from conch.frontends.http.http_exchange import HttpExchange, Reply
from conch.frontends.http.http_loop import LoopThread, ResponseMailbox
from conch.frontends.http.http_pools import ParsingPool
from conch.frontends.http.infer.compression import ENCODINGS, accepted, decompressed
from conch.frontends.http.infer.infer_headers import HEAD_LENGTH, check_head, forwarder, head_length
from conch.frontends.http.infer.infer_request import RequestDecoder, raw_tensor
from conch.frontends.http.infer.infer_response import (
    Answer,
    BinaryOutputs,
    LongOutputError,
    ResponseEncoder,
    UnsupportedEncodingError,
    failure,
    success,
)
from conch.frontends.http.jsontext.json_loader import QUICK_BYTES, SlowTextError
from conch.memory.region_bindings import LargeBindingsError
from conch.memory.regions import Regions

log = logging.getLogger(__name__)

DECOUPLED: Final = "HTTP end point doesn't support models with decoupled transaction policy"
_QUICK_BODY = 1 << 20
_QUICK_COMPRESSION = 16 * 1024


Work = Callable[[], Answer | InferenceRequest]
"""Slow work: decodes and submits a request, or builds its response."""


class InferCall:
    """One infer request between its headers and its response.

    Attributes:
        exchange: The HTTP request.
        model_name: Model name in the path.
        version: Version in the path, or empty.
        received_ns: When the request arrived.
        model: The model, if already resolved.
        packed: True if the body is compressed.
        head: Length of the JSON; None for the whole body.
        encoding: Compression of the response, or None.
        wanted: Outputs to send as binary.
        request: The core request while it runs.
    """

    __slots__ = (
        "_route",
        "encoding",
        "exchange",
        "head",
        "model",
        "model_name",
        "packed",
        "received_ns",
        "request",
        "version",
        "wanted",
    )

    wanted: BinaryOutputs

    def __init__(
        self, route: InferRoute, exchange: HttpExchange, model_name: str, version: str, received_ns: int
    ) -> None:
        self._route = route
        self.exchange = exchange
        self.model_name = model_name
        self.version = version
        self.received_ns = received_ns
        self.model: Servable | None = None
        self.packed = False
        self.head: int | None = None
        self.encoding: bytes | None = None
        self.request: InferenceRequest | None = None

    def deliver(self, item: Answer | InferenceRequest) -> None:
        """Handles a response, a function that builds it, or the request once it is submitted."""
        if isinstance(item, Reply):
            # Breaks a reference cycle that would keep the tensors until garbage collection.
            self.request = None
            if not self.exchange.began:
                self.exchange.respond(*item)
        elif not isinstance(item, InferenceRequest):
            self._route.work(self, item)
        elif self.exchange.lost:
            self._route.cancel(item)
        elif not self.exchange.began:
            self.request = item

    def abandon(self) -> None:
        """Cancels the request after a disconnect."""
        request, self.request = self.request, None
        if request is not None:
            self._route.cancel(request)


class InferRoute:
    """Serves infer requests.

    Args:
        core: The server core.
        thread: The event loop thread.
        workers: Pool for large bodies.
        regions: Shared memory regions.
        clock: Monotonic time in nanoseconds.
        most_bytes: Largest JSON, raw or decompressed body.
        forward_pattern: Headers to forward as parameters; empty for none.
        admission: Admission of the front end; None for a new one.
    """

    def __init__(
        self,
        core: ServerState,
        thread: LoopThread,
        workers: ParsingPool,
        regions: Regions,
        clock: Clock,
        most_bytes: int,
        forward_pattern: str = "",
        admission: Admission | None = None,
    ) -> None:
        self._admission = admission or core.admission("http")
        self._workers = workers
        self._clock = clock
        self._most_bytes = most_bytes
        self._mailbox = ResponseMailbox(thread)
        self._decode = RequestDecoder(most_bytes, regions)
        self._encode = ResponseEncoder()
        self._forward = forwarder(forward_pattern)

    def cancel(self, request: InferenceRequest) -> None:
        """Cancels a request."""
        self._admission.cancel(request)

    def __call__(self, exchange: HttpExchange, model: str, version: str) -> None:
        """Checks the headers of a request; refuses it at once, or reads its body."""
        call = InferCall(self, exchange, model, version, self._clock())
        try:
            self._admission.check_open()
            call.model = self._admission.resolve_early(model, version)
            fields = exchange.fields
            encoding = fields.get(b"content-encoding")
            if encoding is not None:
                if encoding not in (*ENCODINGS, b"identity", b""):
                    raise UnsupportedEncodingError("Unsupported compression type")
                call.packed = encoding in ENCODINGS
            if HEAD_LENGTH in fields:
                call.head = head_length(fields[HEAD_LENGTH])
            if exchange.length is not None and not call.packed:
                check_head(call.head, exchange.length, self._most_bytes)
            accept = fields.get(b"accept-encoding")
            if accept is not None:
                call.encoding = accepted(accept)
        except ConchError as error:
            call.deliver(self._failed(call, None, error))
            return
        exchange.on_disconnect = call.abandon
        # A body whose length is not known is not kept beyond what could be taken of it.
        limited = call.packed or call.head is None or call.head <= 0
        exchange.read_body(self._most_bytes if limited else sys.maxsize, partial(self._run, call))

    def _run(self, call: InferCall) -> None:
        """Executes a request with its body; may respond before it returns."""
        exchange = call.exchange
        if exchange.unread:
            call.deliver(self._failed(call, None, self._unread_error(call)))
            return
        body, head, size = exchange.take_body(), call.head, exchange.size
        if size <= _QUICK_BODY and (size if head is None else head) <= QUICK_BYTES and not call.packed:
            try:
                done = self._submit(call, body, _QUICK_BODY)
            except (LargeBindingsError, SlowTextError):
                pass
            else:
                if isinstance(done, Reply):
                    call.deliver(done)
                else:
                    call.request = done  # its response is delivered later, also on the loop
                return
        self.work(call, partial(self._submit, call, body))

    def _unread_error(self, call: InferCall) -> ConchError:
        exchange = call.exchange
        if exchange.chunks > MOST_CHUNKS:
            return TooManyChunksError()
        text = (
            f"Decompressed data size exceeds the maximum allowed value of {self._most_bytes} bytes. Use "
            f"--http-max-input-size to increase the limit."
        )
        if not call.packed:
            try:
                check_head(call.head, exchange.size, self._most_bytes)
            except InvalidArgumentError as refused:
                text = refused.message
        return UnreadBodyError(text)

    def work(self, call: InferCall, what: Work) -> None:
        """Runs slow work on the parsing pool and delivers its result to the call."""
        exchange = call.exchange
        try:
            self._workers.submit_for(exchange.client, lambda: exchange.lost, self._do, call, what)
        except RuntimeError:  # the pool is closed
            error = UnavailableError("Server exiting")
            # A submitted request is already logged.
            call.deliver(self._failed(call, None, error) if call.request is None else failure(error))

    def _do(self, call: InferCall, what: Work) -> None:
        done: Answer | InferenceRequest
        try:
            done = what()
        except ConchError as error:
            done = failure(error)
        except Exception as error:
            log.exception("a request or response of model '%s' could not be handled", call.model_name)
            done = failure(InternalError(f"the request or its response could not be handled: {error}"))
        self._mailbox.put(call, done)

    def _submit(
        self, call: InferCall, body: memoryview, most_used: int | None = None
    ) -> InferenceRequest | Reply:
        """Decodes and submits a request; returns the response on failure.

        Raises:
            LargeBindingsError: The request needs the pool; it has no effect yet.
            SlowTextError: The JSON needs the pool; the request has no effect yet.
        """
        request: InferenceRequest | None = None
        exchange, head, names = call.exchange, call.head, (call.model_name, call.version)
        try:
            if call.packed:
                body = memoryview(decompressed(body, self._most_bytes))
            if call.packed or exchange.length is None:
                check_head(head, len(body), self._most_bytes)
            if head == 0 or not body:
                request = InferenceRequest(*names, {}, self._respond, call.received_ns)
                tensor = raw_tensor(request, (call.model or self._admission.resolve(request)).spec, body)
                request.inputs[tensor.name] = tensor
                call.wanted = BinaryOutputs(True)
            else:
                request, call.wanted = self._decode(
                    names, body, head, self._respond, call.received_ns, most_used
                )
            request.context = call
            if self._forward is not None:
                self._forward(request, exchange.headers)
            if exchange.hooks is not None:
                exchange.hooks.prepare(request, exchange)
            # With a correlation id, a draining version may have the sequence.
            model = None if request.correlation_id else call.model
            self._admission.admit(request, False, model, exchange, exchange.size, single=DECOUPLED)
        except (LargeBindingsError, SlowTextError):
            raise
        except Exception as error:
            return self._failed(call, request, error)
        return request

    def _failed(self, call: InferCall, request: InferenceRequest | None, error: Exception) -> Reply:
        if request is None:  # the log shows the model of the path
            request = InferenceRequest(call.model_name, call.version, {}, self._respond, call.received_ns)
        exchange, received_ns = call.exchange, call.received_ns
        return failure(self._admission.refuse(request, error, exchange, exchange.size, received_ns))

    def _respond(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Encodes a response; any thread."""
        call = request.context
        assert isinstance(call, InferCall)
        try:
            answer = self._answer(request, response, call)
        except ConchError as error:
            answer = failure(error)
        except Exception as error:
            answer = failure(unsendable(request.model_name, response, error))
        if request.watch is not None:
            # A body that is encoded later is counted by its tensors.
            request.watch.bytes_out += (
                body_size(answer.body) if isinstance(answer, Reply) else _tensor_bytes(response)
            )
        self._mailbox.put(call, answer)

    def _answer(
        self, request: InferenceRequest, response: InferenceResponse | None, call: InferCall
    ) -> Answer:
        if response is None:
            raise InternalError("expected a single response, got 0")  # Triton's text
        if response.error is not None:
            return failure(response.error)
        encoding = call.encoding
        try:
            head, tail = self._encode(request, response, call.wanted, quick=True)
        except LongOutputError:
            # The model's thread goes on; the model may write to its arrays then.
            outputs = [tensor.detached(tensor.name) for tensor in response.outputs]
            kept = InferenceResponse(outputs, parameters=response.parameters)
            return partial(self._long, request, kept, call)
        if encoding is None or sum(map(len, (*head, *tail))) <= _QUICK_COMPRESSION:
            return success(head, tail, encoding)
        behind: list[Buffer] = [copied(data) for data in tail]
        return partial(success, head, behind, encoding)

    def _long(self, request: InferenceRequest, response: InferenceResponse, call: InferCall) -> Reply:
        try:
            head, tail = self._encode(request, response, call.wanted)
        except ConchError:
            raise
        except Exception as error:
            raise unsendable(request.model_name, response, error) from None
        return success(head, tail, call.encoding)


def _tensor_bytes(response: InferenceResponse | None) -> int:
    return 0 if response is None else sum(tensor.nbytes for tensor in response.outputs)
