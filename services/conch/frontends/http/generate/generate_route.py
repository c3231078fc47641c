"""Serves generate and generate_stream: requests in flat JSON, responses as JSON or server-sent events.

Used by: `api_routes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from conch.core.admission import Admission
from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import ConchError, InvalidArgumentError, UnsupportedError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.response_errors import unsendable
from conch.core.servable import Servable
from conch.core.server_state import ServerState
from conch.frontends.http.generate.generate_queue import Item, ResponseQueue
from conch.frontends.http.generate.generate_request import map_request, parse_document
from conch.frontends.http.generate.generate_response import answer_object, http10_sender
from conch.frontends.http.http_connection import CONNECTION
from conch.frontends.http.http_pools import Pools
from conch.frontends.http.http_routing import ApiRoute, route
from conch.frontends.http.json_body import JSON, MOST_BYTES, client_of, error_body, parsed, read_body
from conch.frontends.http.jsontext.json_loader import SlowTextError
from conch.frontends.operations import operation_table as table
from conch.frontends.operations.operation_table import path_pattern

_COMMENT = b":\n\n"
"""A comment, which clients of event streams ignore."""
_COMMENT_CHUNK = b"%x\r\n%b\r\n" % (len(_COMMENT), _COMMENT)
EVENTS = "text/event-stream; charset=utf-8"
_NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates "
    "various number of responses"
)


def generate_routes(
    core: ServerState,
    pools: Pools,
    most_bytes: int = MOST_BYTES,
    clock: Clock = monotonic_ns,
    admission: Admission | None = None,
) -> list[ApiRoute]:
    """Returns the routes.

    Args:
        core: The server core.
        pools: Pools for large bodies.
        most_bytes: Limit of a body, and of its tensors together.
        clock: Monotonic time in nanoseconds.
        admission: Admission of the front end; None for a new one.
    """
    submit = Submission(core, pools, most_bytes, clock, admission or core.admission("http"))

    async def generate(request: Request, model: str, version: str) -> Response:
        call = await submit(request, model, version)
        try:
            return await single(call)
        finally:
            await call.end()

    async def stream(request: Request, model: str, version: str) -> Response:
        call = await submit(request, model, version)
        try:
            first = await call.responses.take()
            if first is None:
                raise ClientDisconnect
            return EventStream(call, first)
        except BaseException:
            await call.end()
            raise

    return [
        route(path_pattern(table.GENERATE.paths[0]), ["POST"], table.GENERATE.access, generate),
        route(path_pattern(table.GENERATE_STREAM.paths[0]), ["POST"], table.GENERATE_STREAM.access, stream),
    ]


class GenerateCall:
    """A running request and its responses.

    Args:
        admission: Admission of the front end.
        receive: ASGI receive; reports a disconnect.

    Attributes:
        responses: The responses.
    """

    def __init__(self, admission: Admission, receive: Receive) -> None:
        self._admission = admission
        self._request: InferenceRequest | None = None
        self.responses = ResponseQueue(asyncio.get_running_loop())
        self._gone = False
        self._watch = asyncio.ensure_future(self._until_gone(receive))

    def begin(self, request: InferenceRequest) -> None:
        """Sets the request before it is submitted; any thread."""
        self._request = request

    async def _until_gone(self, receive: Callable[[], Awaitable[Message]]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._give_up()

    def _give_up(self) -> None:
        """Closes the queue and cancels the request."""
        self._gone = True
        self.responses.close()
        if self._request is not None and not self._request.completed:
            self._admission.cancel(self._request)

    async def end(self) -> None:
        """Cancels a running request and stops watching for a disconnect."""
        self._give_up()
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)

    def respond(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Encodes and queues a response, on the model's thread."""
        try:
            item = _item(request, response, final)
        except ConchError as error:
            item = _failure(error, final)
        except Exception as error:
            # A missing response would go unnoticed, so the request ends, as after a worker's failure.
            item = _failure(unsendable(request.model_name, response, error), True)
        if request.watch is not None:
            request.watch.bytes_out += len(item.body or b"")
        self.responses.put(item)


def _item(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> Item:
    if response is None:
        return Item(None, 200, final)
    if response.error is not None:
        return _failure(response.error, final)
    model = request.model
    assert model is not None, "only a request that has been submitted is answered"
    return Item(answer_object(model.spec.name, model.version_text, request.id, response), 200, final)


def _failure(error: ConchError, final: bool) -> Item:
    return Item(error_body(error.message), error.http_status, final, error.retry_after_ms)


class Submission:
    """Decodes and submits generate requests; for the arguments see `generate_routes`."""

    def __init__(
        self, core: ServerState, pools: Pools, most_bytes: int, clock: Clock, admission: Admission
    ) -> None:
        self._core = core
        self._pools = pools
        self._most_bytes = most_bytes
        self._clock = clock
        self._admission = admission

    async def __call__(self, request: Request, name: str, version: str) -> GenerateCall:
        """Submits a request. Raises ConchError: it is malformed, or its model does not take it."""
        received = _GenerateBody(name, version, self._clock())
        try:
            self._admission.check_open()
            self._core.check_running()
            model = self._admission.resolve_name(name, version)
            if request.headers.get("content-encoding", "identity") not in ("identity", ""):
                raise UnsupportedError("Unsupported content-encoding, only 'identity' is supported.")
            received.body = await read_body(request, self._most_bytes)
            call = GenerateCall(self._admission, request.receive)
            try:
                client = client_of(request)
                try:
                    self._submit(received, call, model, client, True)
                except SlowTextError:
                    await parsed(request, self._pools, self._submit, received, call, model, client, False)
            except BaseException:
                await call.end()
                raise
        except ConchError as error:
            refused = received.request or InferenceRequest(
                name, version, {}, _ignore_response, received.received_ns
            )
            self._admission.refuse(
                refused, error, client_of(request), len(received.body), received.received_ns
            )
            raise
        return call

    def _submit(
        self, received: _GenerateBody, call: GenerateCall, model: Servable, client: str, quick: bool
    ) -> None:
        mapped = map_request(parse_document(received.body, quick), model.spec, self._most_bytes)
        request = received.request = InferenceRequest(
            received.name,
            received.version,
            mapped.inputs,
            call.respond,
            received.received_ns,
            mapped.id,
            parameters=mapped.parameters or None,
        )
        call.begin(request)
        self._admission.admit(request, False, model, client, len(received.body))


@dataclass(slots=True)
class _GenerateBody:
    """An HTTP request while it is decoded."""

    name: str
    version: str
    received_ns: int
    body: bytes = b""
    request: InferenceRequest | None = None


def _ignore_response(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
    """Responder of a malformed request."""


async def single(call: GenerateCall) -> Response:
    """Returns the only response of a request; an error if there is not exactly one."""
    only: Item | None = None
    while True:
        item = await call.responses.take()
        if item is None:
            raise ClientDisconnect
        if item.body is not None:
            if only is not None:
                break
            only = item
            if item.status != 200:
                break
        if item.final:
            break
    if only is None or (item.body is not None and item is not only):
        only = _failure(InvalidArgumentError(_NOT_ONE), True)
    return Response(only.body, only.status, _retry_after(only), JSON)


def _retry_after(item: Item) -> dict[str, str] | None:
    if item.retry_after_ms is None:
        return None
    return {"retry-after": str(-(-item.retry_after_ms // 1000))}


class EventStream(Response):
    """Responses as server-sent events, one per response with content; the first decides the status."""

    def __init__(self, call: GenerateCall, first: Item) -> None:
        self._exchange = call
        self._first = first
        super().__init__(None, first.status, _retry_after(first), EVENTS)
        self.raw_headers = [(key, value) for key, value in self.raw_headers if key != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Streams the events as fast as the client reads."""
        send = http10_sender(scope, send)
        item: Item | None = self._first
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            if CONNECTION in scope:
                scope[CONNECTION].filler = _COMMENT if scope["http_version"] == "1.0" else _COMMENT_CHUNK
            while item is not None:
                if item.body is not None:
                    event = b"data: " + item.body + b"\n\n"
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                item = None if item.final else await self._exchange.responses.take()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._exchange.end()
