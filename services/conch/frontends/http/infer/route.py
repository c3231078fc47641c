"""The infer route: one HTTP request in, one response out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, Final

from conch.core.clock import Clock
from conch.core.errors import (
    ConchError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
    UnsupportedError,
)
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.servable import Servable
from conch.core.server_core import ServerCore
from conch.frontends.grpc.single import SingleResponse
from conch.frontends.http.connection import CONNECTION, RAW_NAMES, TOO_MANY_CHUNKS, Connection
from conch.frontends.http.exchange import Exchange, watch
from conch.frontends.http.infer.compression import ENCODINGS, accepted, compressed, decompressed
from conch.frontends.http.infer.decode import RequestDecoder
from conch.frontends.http.infer.forward import forwarder
from conch.frontends.http.infer.headers import body_length, check_head, head_length
from conch.frontends.http.infer.raw import raw_tensor
from conch.frontends.http.infer.response import ResponseEncoder, check_single, is_long
from conch.frontends.http.infer.wanted import Wanted
from conch.frontends.http.jsontext.load import QUICK_BYTES
from conch.frontends.http.loop import LoopThread
from conch.frontends.http.replies import error_body

log = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]
Reply = tuple[int, Headers, bytes]
"""Status, headers, body."""

DECOUPLED: Final = "HTTP end point doesn't support models with decoupled transaction policy"
_QUICK_BODY = 1 << 20
_QUICK_COMPRESSION = 16 * 1024
_JSON: Final = (b"content-type", b"application/json")
_OCTETS: Final = (b"content-type", b"application/octet-stream")
_CLOSE: Final = (b"connection", b"close")


Answer = Reply | Callable[[], Reply]
"""A reply, or what makes it if that takes long."""


class TooManyChunksError(InvalidArgumentError):
    """A body comes in so many pieces that the connection is given up."""


class _Call:
    """One request on its way: what has come of it, and what is needed to answer it.

    Attributes:
        model_name: The name in the path.
        version: The version in the path, or empty.
        model: The model, if it can be told by these.
        headers: The headers, with names as the client wrote them.
        packed: Whether the body is compressed.
        head: How long the JSON is; None for the whole body.
        read: Gives the body, once.
        now_ns: When the request arrived.
        future: Gets the reply, or what makes it if that takes long.
        encoding: How the reply is to be compressed, or None.
        wanted: Which outputs are sent in binary form.
    """

    __slots__ = (
        "encoding",
        "future",
        "head",
        "headers",
        "model",
        "model_name",
        "now_ns",
        "packed",
        "read",
        "version",
        "wanted",
    )

    def __init__(self, model_name: str, version: str, now_ns: int) -> None:
        self.model_name = model_name
        self.version = version
        self.now_ns = now_ns
        self.model: Servable | None = None
        self.headers: Headers = []
        self.packed = False
        self.head: int | None = None
        self.read: Callable[[], memoryview] = _nothing
        self.future: asyncio.Future[Answer]
        self.encoding: bytes | None = None
        self.wanted = Wanted(False)


def _nothing() -> memoryview:
    return memoryview(b"")


class InferRoute:
    """Answers infer requests.

    Args:
        core: Runs the requests.
        thread: The loop that this runs on.
        workers: Where bodies are handled that take long.
        clock: Monotonic time in nanoseconds.
        most_bytes: Largest JSON, raw or decompressed body.
        forward_pattern: Which headers become request parameters; empty for none.

    Attributes:
        refused: How many requests came after `refuse`.
    """

    def __init__(
        self,
        core: ServerCore,
        thread: LoopThread,
        workers: Executor,
        clock: Clock,
        most_bytes: int,
        forward_pattern: str = "",
    ) -> None:
        self._core = core
        self._workers = workers
        self._clock = clock
        self._most_bytes = most_bytes
        self._exchange = Exchange(core, thread)
        self._decode = RequestDecoder(most_bytes)
        self._encode = ResponseEncoder()
        self._forward = forwarder(forward_pattern)
        self._refusing = False
        self.refused = 0

    def refuse(self) -> None:
        """Takes no more requests."""
        self._refusing = True

    async def __call__(self, scope: Any, receive: Any, send: Any, name: bytes, version: bytes | None) -> None:
        """Answers one request."""
        reply: Reply | None
        try:
            reply = await self._answer(scope, receive, name.decode(), (version or b"").decode())
        except ConchError as error:
            reply = error_answer(error)
            if self._refusing or isinstance(error, TooManyChunksError):
                reply[1].append(_CLOSE)
        except Exception as error:
            log.exception("a request could not be handled")
            reply = error_answer(InternalError(f"the request could not be handled: {error}"))
        if reply is not None:
            status, headers, body = reply
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Any, receive: Any, name: str, version: str) -> Reply | None:
        """The response to a request; None where nobody waits for it."""
        now_ns = self._clock()
        if self._refusing:
            self.refused += 1
            raise UnavailableError("Server exiting")
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        call = _Call(name, version, now_ns)
        call.model = self._model(name, version)
        encoding = headers.get(b"content-encoding")
        if encoding is not None:
            if encoding not in (*ENCODINGS, b"identity", b""):
                return unsupported_encoding()
            call.packed = encoding in ENCODINGS
        call.head = head_length(headers)
        length = body_length(headers)
        if length is not None and not call.packed:
            check_head(call.head, length, self._most_bytes)
        accept = headers.get(b"accept-encoding")
        if accept is not None:
            call.encoding = accepted(accept)
        connection: Connection | None = scope.get(CONNECTION)
        size = await _read_body(call, connection, scope, receive, length)
        if size is None:
            return None
        loop = asyncio.get_running_loop()
        call.future = loop.create_future()
        if self._forward is not None:
            call.headers = scope.get(RAW_NAMES) or scope["headers"]
        text = size if call.head is None else call.head
        if size <= _QUICK_BODY and text <= QUICK_BYTES and not call.packed:
            request = self.submit(call)
        else:
            request = await loop.run_in_executor(self._workers, self.submit, call)
        watch(connection, self._core, request)
        try:
            answer = await call.future
        finally:
            if connection is not None:
                connection.on_disconnect = None
        if isinstance(answer, tuple):
            return answer
        return await loop.run_in_executor(self._workers, answer)

    def _model(self, name: str, version: str) -> Servable | None:
        """The model; None for one that may only be found by the sequence that a request belongs to."""
        try:
            return self._core.model(name, version)
        except ConchError:
            if name in self._core.registry.draining:
                return None
            raise

    def submit(self, call: _Call) -> InferenceRequest:
        """Makes a request of a body and submits it; on the loop only if that is quick.

        Raises:
            ConchError: The body is malformed, or the model refuses the request.
        """
        body = call.read()
        call.read = _nothing
        if call.packed:
            body = memoryview(decompressed(body, self._most_bytes))
        head, model, core = call.head, call.model, self._core
        check_head(head, len(body), self._most_bytes)
        if head == 0 or not body:
            request = InferenceRequest(call.model_name, call.version, {}, self._respond, call.now_ns)
            tensor = raw_tensor(request, (model or core.model_for(request)).spec, body)
            request.inputs[tensor.name] = tensor
            call.wanted = Wanted(True)
        else:
            names = call.model_name, call.version
            request, call.wanted = self._decode(names, body, head, self._respond, call.now_ns)
        request.context = call
        if self._forward is not None:
            self._forward(request, call.headers)
        core.check_takes(request)
        if model is None or request.correlation_id:
            model = core.model_for(request)
        if model.spec.decoupled:
            request.intercept(lambda responder: SingleResponse(responder, core.cancel, DECOUPLED), waits=True)
        core.submit(request, False, model)
        return request

    def _respond(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        call = request.context
        assert isinstance(call, _Call)
        answer: Answer
        try:
            if response is not None and response.error is not None:
                answer = error_answer(response.error)
            else:
                response = check_single(response)
                answer = self._success(request, response, call)
        except ConchError as error:
            answer = error_answer(error)
        except Exception as error:
            log.exception("a response of model '%s' could not be sent", request.model_name)
            answer = error_answer(InternalError(f"the response could not be sent: {error}"))
        self._exchange.mailbox.put(call.future, answer)

    def _success(self, request: InferenceRequest, response: InferenceResponse, call: _Call) -> Answer:
        wanted = call.wanted
        if is_long(response, wanted):
            # The model's thread goes on; the model may write to its arrays then.
            kept = InferenceResponse(
                [tensor.detached(tensor.name) for tensor in response.outputs],
                parameters=response.parameters,
            )
            return lambda: self._long(request, kept, call)
        head, tail = self._encode(request, response, wanted)
        headers, parts = _framed(head, tail)
        size = sum(map(len, parts))
        if call.encoding is None or size <= _QUICK_COMPRESSION:
            return _reply(headers, parts, call.encoding)
        whole = b"".join(parts)
        return lambda: _reply(headers, [whole], call.encoding)

    def _long(self, request: InferenceRequest, response: InferenceResponse, call: _Call) -> Reply:
        try:
            head, tail = self._encode(request, response, call.wanted)
        except ConchError as error:
            return error_answer(error)
        headers, parts = _framed(head, tail)
        return _reply(headers, parts, call.encoding)


async def _read_body(
    call: _Call, connection: Connection | None, scope: Any, receive: Any, length: int | None
) -> int | None:
    """Reads the body; returns its size, or None if the client has gone away."""
    gathered = None if connection is None else connection.gather(scope, length)
    parts: list[bytes] = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        if connection is not None and connection.too_many_chunks:
            raise TooManyChunksError(TOO_MANY_CHUNKS)
        if message["body"]:
            parts.append(message["body"])
        more = message.get("more_body", False)
    if gathered is not None:
        call.read = gathered.body
        return gathered.size
    call.read = lambda: memoryview(parts[0] if len(parts) == 1 else b"".join(parts))
    return sum(map(len, parts))


def _framed(head: bytes, tail: list[Any]) -> tuple[Headers, list[Any]]:
    if tail:
        return [_OCTETS, (b"inference-header-content-length", b"%d" % len(head))], [head, *tail]
    return [_JSON], [head]


def _reply(headers: Headers, parts: list[Any], encoding: bytes | None) -> Reply:
    if encoding is not None:
        parts = list(compressed(parts, encoding))
        headers = [*headers, (b"content-encoding", encoding)]
    body = b"".join(parts)
    return 200, [*headers, (b"content-length", b"%d" % len(body))], body


def error_answer(error: ConchError) -> Reply:
    """The response that tells of an error."""
    body = error_body(error.message)
    headers: Headers = [_JSON, (b"content-length", b"%d" % len(body))]
    if error.retry_after_ms is not None:
        headers.append((b"retry-after", b"%d" % -(-error.retry_after_ms // 1000)))
    return error.http_status, headers, body


def unsupported_encoding() -> Reply:
    """The response to a request in an encoding that is not known."""
    status, headers, body = error_answer(UnsupportedError("Unsupported compression type"))
    return status, [*headers, (b"accept-encoding", b"gzip, deflate")], body
