"""The infer route: decodes a request, submits it to admission, encodes its response.

The way of a request, by thread; no locks:

1. Event loop: `InferRoute.__call__` checks the headers, and `_on_body` the size of the body.
2. Event loop, or the parsing pool if it takes long: `_submit` decodes the request and submits it. The loop
   runs batches of fast models itself, see `conch.ipc.loop`.
3. Any thread, such as the model's: `_respond` encodes the response. What takes long is left to the pool.
4. Event loop: `InferCall.send` sends the reply, which has come through the `ReplyMailbox`.

With front processes, the front may decode the body before step 2, and encode the response in place of step 3.

A request that is refused gets its reply in step 1 or 2 (`_refuse`). After a disconnect, `InferCall.abandon`
cancels the request.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from conch.core.admission import Admission, Fit, Hold
from conch.core.clock import Clock
from conch.core.errors import ConchError, InternalError, InvalidArgumentError, UnavailableError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.servable import Servable
from conch.door.door import Door
from conch.frontends.fair_pool import FairPool
from conch.frontends.header_forwarding import HeaderForwarder
from conch.frontends.http.flow_control import MOST_CHUNKS, TooManyChunksError, UnreadBodyError, body_size
from conch.frontends.http.http_exchange import DecodedBody, FrontReply, HttpExchange, Reply
from conch.frontends.http.http_loop import HttpLoop
from conch.frontends.http.infer.infer_request import (
    QUICK_BODY,
    UNREAD_HEAD,
    LargeRegionsError,
    RequestDecoder,
    add_raw_tensor,
    check_head,
    read_head,
    unpacked_body,
)
from conch.frontends.http.infer.infer_response import BinaryOutputs, ResponseEncoder, failure
from conch.frontends.http.jsontext.json_loader import SlowTextError

log = logging.getLogger(__name__)

DECOUPLED: Final = "HTTP end point doesn't support models with decoupled transaction policy"
_EXITING = "Server exiting"
Work = Callable[[], Reply | None]
"""Slow work: decodes and submits a request, or builds a reply; returns the reply, if there is one already."""


class InferCall:
    """One infer request between its headers and its response.

    Attributes:
        exchange: The HTTP request.
        model_name: Model name in the path.
        version: Version in the path, or empty.
        received_ns: Time of the request's arrival.
        model: The model, if already resolved.
        head: Its headers, parsed.
        wanted: Outputs to send as binary.
        request: The core request, from before it is submitted until its reply is sent.
    """

    __slots__ = (
        "_admission",
        "exchange",
        "head",
        "model",
        "model_name",
        "received_ns",
        "request",
        "version",
        "wanted",
    )

    wanted: BinaryOutputs

    def __init__(
        self, admission: Admission, exchange: HttpExchange, model_name: str, version: str, received_ns: int
    ) -> None:
        self._admission = admission
        self.exchange = exchange
        self.model_name = model_name
        self.version = version
        self.received_ns = received_ns
        self.model: Servable | None = None
        self.head = UNREAD_HEAD
        self.request: InferenceRequest | None = None

    @property
    def caller(self) -> HttpExchange:
        """The HTTP request, for the context of the core request."""
        return self.exchange

    def send(self, reply: Reply | FrontReply) -> None:
        """Sends the reply; event loop."""
        # Breaks a reference cycle that would keep the tensors until garbage collection.
        self.request = None
        if not isinstance(reply, Reply):
            reply.send()
        elif not self.exchange.began:
            self.exchange.respond(*reply)

    def abandon(self) -> None:
        """Cancels the request after a disconnect; event loop."""
        request, self.request = self.request, None
        if request is not None:
            self._admission.cancel(request)


class ReplyMailbox:
    """Has replies from any thread sent on the event loop; replies close together share a wake-up.

    Lock-free: `_empty` clears `_waking` before it reads the queue, so a reply that is added later wakes the
    loop again.
    """

    def __init__(self, loop: HttpLoop) -> None:
        self._loop = loop
        self._filled: deque[tuple[InferCall, Reply | FrontReply]] = deque()
        self._waking = False

    def put(self, call: InferCall, reply: Reply | FrontReply) -> None:
        """Queues a reply for `InferCall.send`; any thread."""
        self._filled.append((call, reply))
        if not self._waking:
            self._waking = True
            self._loop.call_soon(self._empty)

    def _empty(self) -> None:
        self._waking = False  # first: later replies wake the loop again
        filled = self._filled
        while filled:
            call, reply = filled.popleft()
            call.send(reply)


class InferRoute:
    """Serves infer requests.

    Args:
        door: The core.
        loop: The loop of the port.
        workers: Pool for large bodies.
        clock: Monotonic time in nanoseconds.
        most_bytes: Largest JSON, raw or decompressed body.
        forward_pattern: Headers to forward as parameters; empty for none.
        admission: Admission of the front end; None for a new one.
    """

    def __init__(
        self,
        door: Door,
        loop: HttpLoop,
        workers: FairPool,
        clock: Clock,
        most_bytes: int,
        forward_pattern: str = "",
        admission: Admission | None = None,
    ) -> None:
        self._admission = admission or door.admission("http")
        self._workers = workers
        self._clock = clock
        self._most_bytes = most_bytes
        self._loop = loop
        self._mailbox = ReplyMailbox(loop)
        self._decode = RequestDecoder(most_bytes)
        self._encode = ResponseEncoder()
        self._forwarder = HeaderForwarder(forward_pattern) if forward_pattern else None

    def __call__(self, exchange: HttpExchange, model: str, version: str) -> None:
        """Checks the headers of a request; refuses it at once, or reads its body."""
        call = InferCall(self._admission, exchange, model, version, self._clock())
        try:
            if self._admission.closed:
                self._admission.check_open()
            call.model = self._admission.resolve_name(model, version)
            call.head = read_head(exchange.fields, exchange.length, self._most_bytes)
        except ConchError as error:
            call.send(self._refuse(call, None, error))
            return
        exchange.on_disconnect = call.abandon
        # For bodies whose length is not known. Binary tensors behind JSON have no limit.
        has_binary = not call.head.packed and (call.head.json_size or 0) > 0
        most_bytes = sys.maxsize if has_binary else self._most_bytes
        exchange.read_body(most_bytes, partial(self._on_body, call), self._admission.held)

    def _on_body(self, call: InferCall) -> None:
        """Submits a request with its body, on the pool if that takes long."""
        exchange = call.exchange
        if exchange.unread:
            call.send(self._refuse(call, None, self._unread_error(call)))
            return
        decoded = exchange.take_decoded() if exchange.decoded else None
        body = exchange.take_body() if decoded is None else decoded
        if decoded is not None or call.head.is_short(exchange.size):
            try:
                refusal = self._submit(call, body, None)
            except (LargeRegionsError, SlowTextError):
                pass  # it takes long though it is short
            else:
                if refusal is not None:
                    call.send(refusal)
                return
        hold = Hold(self._admission.held)
        try:
            hold.grow(exchange.size)
            if not self.run_on_pool(call, partial(self._submit, call, body, hold), hold.release):
                raise UnavailableError(_EXITING)
        except ConchError as error:
            hold.release()
            call.send(self._refuse(call, None, error))

    def _submit(self, call: InferCall, body: memoryview | DecodedBody, hold: Hold | None) -> Reply | None:
        """Decodes and submits a request; returns the reply if it is refused.

        Args:
            call: The call.
            body: Its body.
            hold: Counts the body until it is admitted; None on the loop, for what is quick.

        Raises:
            LargeRegionsError: Without `hold`: the request takes long; it has no effect yet.
            SlowTextError: Without `hold`: the JSON takes long; the request has no effect yet.
        """
        quick = hold is None
        plain_bytes = 0
        request: InferenceRequest | None = None
        fit: Fit | None = None
        exchange, names = call.exchange, (call.model_name, call.version)
        try:
            if not isinstance(body, memoryview):
                request, call.wanted = body.request(self._respond), BinaryOutputs(body.binary)
                request.received_ns = call.received_ns
            else:
                head = call.head
                grow = _ignore if hold is None else hold.grow
                body = unpacked_body(body, head, exchange.length, self._most_bytes, grow)
                plain_bytes = len(body)
                if head.json_size == 0 or not body:
                    request = InferenceRequest(*names, {}, self._respond, call.received_ns)
                    fit = partial(add_raw_tensor, body)
                    call.wanted = BinaryOutputs(True)
                else:
                    request, call.wanted = self._decode(
                        names,
                        body,
                        head.json_size,
                        self._respond,
                        call.received_ns,
                        QUICK_BODY if quick else None,
                    )
            request.context = call
            if call.head.packed:
                request.held_bytes = plain_bytes or sum(each.nbytes for each in request.inputs.values())
            if self._forwarder is not None:
                texts = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in exchange.headers]
                self._forwarder.forward(request, texts)
            if exchange.hooks is not None:
                exchange.hooks.prepare(request, exchange)
            # With a correlation id, a draining version may have the sequence.
            model = None if request.correlation_id else call.model
            call.request = request
            if not quick and exchange.lost:  # while the pool decoded it; `abandon` found no request
                self._admission.cancel(request)
            if hold is not None:
                hold.release()
            claim = self._admission.admit(
                request, quick, model, exchange, exchange.size, single=DECOUPLED, fit=fit
            )
            if claim is not None:
                self._loop.queue_inline(claim)
        except (LargeRegionsError, SlowTextError):
            raise
        except Exception as error:  # boundary: the client gets an answer, whatever happens
            return self._refuse(call, request, error)
        return None

    def _refuse(self, call: InferCall, request: InferenceRequest | None, error: Exception) -> Reply:
        """Releases and logs a request that is not admitted; returns its reply."""
        if request is None:  # the log shows the model of the path
            request = InferenceRequest(call.model_name, call.version, {}, self._respond, call.received_ns)
        exchange, received_ns = call.exchange, call.received_ns
        return failure(self._admission.refuse(request, error, exchange, exchange.size, received_ns))

    def _respond(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Encodes a response; any thread."""
        call = request.context
        assert isinstance(call, InferCall)
        if call.exchange.decoded and response is not None and response.error is None:
            left = call.exchange.leave_encoding(request, response)
            if left is not None:
                self._mailbox.put(call, left)
                return
        answer = self._encode.answer(request, response, call.wanted, call.head.encoding)
        watch = request.watch
        if isinstance(answer, Reply):
            if watch is not None:
                watch.bytes_out += body_size(answer.body)
            self._mailbox.put(call, answer)
            return
        if watch is not None:
            watch.bytes_out += _tensor_bytes(response)  # the body does not exist yet
        if not self.run_on_pool(call, answer):
            self._mailbox.put(call, failure(UnavailableError(_EXITING)))

    def run_on_pool(self, call: InferCall, work: Work, then: Callable[[], object] = lambda: None) -> bool:
        """Runs slow work on the parsing pool and sends its reply; any thread. False if the pool is closed.

        `then` is called at the end, also of work that does not begin as its client is gone.
        """
        exchange = call.exchange
        try:
            queued = self._workers.submit_for(
                exchange.client, lambda: exchange.lost, self._on_pool, call, work
            )
        except RuntimeError:
            return False
        queued.add_done_callback(lambda _: then())
        return True

    def _on_pool(self, call: InferCall, work: Work) -> None:
        reply: Reply | None
        try:
            reply = work()
        except ConchError as error:
            reply = failure(error)
        except Exception:  # boundary: the top of the pool's work
            log.exception("a request or response of model '%s' could not be handled", call.model_name)
            request = call.request  # the loop may take it away meanwhile
            prefix = "" if request is None else request.log_prefix
            reply = failure(InternalError(f"{prefix}the request or its response could not be handled"))
        if reply is not None:
            self._mailbox.put(call, reply)

    def _unread_error(self, call: InferCall) -> ConchError:
        exchange = call.exchange
        if exchange.refusal is not None:
            return exchange.refusal
        if exchange.chunks > MOST_CHUNKS:
            return TooManyChunksError()
        text = (
            f"Decompressed data size exceeds the maximum allowed value of {self._most_bytes} bytes. Use "
            f"--http-max-input-size to increase the limit."
        )
        if not call.head.packed:
            try:
                check_head(call.head.json_size, exchange.size, self._most_bytes)
            except InvalidArgumentError as refused:
                text = refused.message
        return UnreadBodyError(text)


def _ignore(size: int) -> None:
    """Counts nothing."""


def _tensor_bytes(response: InferenceResponse | None) -> int:
    return 0 if response is None else sum(tensor.nbytes for tensor in response.outputs)
