"""The route ``/v2/models/M/invocations``: MLflow's scoring protocol for all models with columns.

Rows are sent to the model in one request, or in several if they are more than its `max_batch_size`: callers
with tables know no such limit. What comes back is encoded on the model's thread.

Threads and locks: event loop, but for `_Invocations._read` and `_submit`, and `_Call.add` and `respond`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Final

from conch.access.principals import INFERS
from conch.core.errors import ConchError, InvalidArgumentError, UnsupportedError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.response_errors import unsendable
from conch.core.servable import Servable
from conch.core.spec import ModelSpec
from conch.core.tensor import Tensor
from conch.door.operation_table import Endpoint, path_pattern
from conch.frontends.http.http_exchange import ClientDisconnectError, HttpExchange, Reply
from conch.frontends.http.http_pools import loaded
from conch.frontends.http.http_routing import RouteTable, route
from conch.frontends.http.json_body import error_reply, parsed, read_body
from conch.frontends.http.route_provider import RestApi
from conch_frames.interface import FrameInterface, interface_of
from conch_frames.invocations.replies import import_format, predictions, reply_type
from conch_frames.invocations.request_body import ARROW_TYPE, needs_arrow, read_request
from conch_frames.invocations.request_inputs import joined_rows, request_tensors, split_rows

INVOCATIONS = Endpoint(
    "invocations",
    "inference",
    "Run the model on rows: JSON, CSV, Arrow or Parquet",
    http_method="POST",
    paths=("/v2/models/{model}[/versions/{version}]/invocations",),
    roles=INFERS,
)
ENDPOINTS: Final = (INVOCATIONS,)
"""The calls, as entries like those of the table of operations."""

_QUICK_BYTES = 4 << 10  # of a body that is read on the event loop; CSV of short fields takes 0.4 ms a KiB
_QUICK_REQUESTS = 32  # that are submitted or cancelled in one turn of the event loop; each takes 40 us
_MOST_KNOWN = 1000
_ONE = "invocations have one response, and the model may have any number"


def invocation_table(api: RestApi, most_unpacked_bytes: int) -> RouteTable:
    """The table of the route; paths that it does not have go on to the next provider."""
    handler = _Invocations(api, most_unpacked_bytes).invocations
    pattern = path_pattern(INVOCATIONS.paths[0])
    routes = [route(pattern, [INVOCATIONS.http_method], INVOCATIONS.access, handler)]
    labels = api.door.models.labels
    return RouteTable(
        routes, api.guard, api.refusals, api.cors, api.unmatched, labels=labels, endpoints=ENDPOINTS
    )


class _Invocations:
    def __init__(self, api: RestApi, most_unpacked_bytes: int) -> None:
        self._api = api
        self._most_unpacked_bytes = most_unpacked_bytes
        self._interfaces: dict[tuple[str, int], tuple[ModelSpec, FrameInterface]] = {}

    async def invocations(self, exchange: HttpExchange, model: str, version: str) -> Reply:
        """Runs a model."""
        api, received_ns = self._api, self._api.clock()
        call = _Call(api, exchange, (model, version), received_ns)
        try:
            api.admission.check_open()
            api.door.check_running()
            found = await loaded(exchange, api.admission, model, version)
            if exchange.fields.get(b"content-encoding", b"identity") not in (b"identity", b""):
                raise UnsupportedError("Unsupported content-encoding, only 'identity' is supported.")
            call.body = await read_body(exchange, api.most_bytes)
            exchange.on_disconnect = call.abandon
            call.kind = reply_type(exchange.header("accept"))
            arrow = needs_arrow(exchange.header("content-type")) or call.kind == ARROW_TYPE
            # All versions of a route have the same inputs.
            spec = api.door.describe(model, version) if found is None else found.spec
            # An interface that is not known is in the model's files.
            if len(call.body) <= _QUICK_BYTES and not arrow and self._known(spec) is not None:
                self._read(call, spec)
            else:
                await parsed(exchange, api.pools, self._read, call, spec)
            if len(call.batches) <= _QUICK_REQUESTS:
                self._submit(call, found)
            else:
                await parsed(exchange, api.pools, self._submit, call, found)
        except ConchError as error:
            refused = InferenceRequest(model, version, {}, _ignore, received_ns)
            api.admission.refuse(
                call.requests[0] if call.requests else refused, error, exchange, len(call.body), received_ns
            )
            call.cancel()
            raise
        return await call.answer

    def _read(self, call: _Call, spec: ModelSpec) -> None:
        """Decodes a request; any thread."""
        import_format(call.kind)
        interface = call.interface = self._interface(spec)
        columns = interface.columns
        kind = call.exchange.header("content-type")
        request = read_request(call.body, kind, self._most_unpacked_bytes, columns.wants)
        call.batches = split_rows(request_tensors(request, interface), columns.most_rows)
        call.parts = [[] for _ in call.batches]

    def _submit(self, call: _Call, model: Servable | None) -> None:
        """Submits the requests until one has failed; any thread."""
        assert call.interface is not None, "set when the request is decoded"
        requested = tuple(rule.output for rule in call.interface.outputs)
        first: InferenceRequest | None = None
        for number, inputs in enumerate(call.batches):
            part = InferenceRequest(
                *call.names, inputs, partial(call.respond, number), call.received_ns, requested=requested
            )
            part.context = call.exchange
            if first is None:
                first = part
            elif hasattr(first, "side"):  # of a rollout, one for all rows
                part.side = first.side
            if not call.add(part):
                if number:
                    return
                self._api.admission.cancel(part)  # the client has gone; the request is counted
            size = 0 if number else len(call.body)
            self._api.admission.admit(part, False, model, call.exchange, size, single=_ONE)

    def _interface(self, spec: ModelSpec) -> FrameInterface:
        """The interface of a version. Raises InvalidArgumentError: its config contradicts itself."""
        interface = self._known(spec)
        if interface is None:
            interface = interface_of(spec)
            if len(self._interfaces) >= _MOST_KNOWN:
                self._interfaces.clear()
            self._interfaces[spec.identifier, spec.version] = (spec, interface)
        return interface

    def _known(self, spec: ModelSpec) -> FrameInterface | None:
        known, interface = self._interfaces.get((spec.identifier, spec.version), (None, None))
        return interface if known is spec else None


class _Call:
    """The requests to a model that answer one HTTP request, and their responses.

    Attributes:
        batches: Inputs of the requests: several if the rows are more than a batch of the model.
        requests: The requests that have been submitted; none any more when the call is over.
        parts: The outputs of each, once it is answered.
    """

    def __init__(
        self, api: RestApi, exchange: HttpExchange, names: tuple[str, str], received_ns: int
    ) -> None:
        self._admission = api.admission
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._over = self._replied = False
        self.exchange = exchange
        self.names = names
        self.received_ns = received_ns
        self.body: memoryview | bytes = b""
        self.interface: FrameInterface | None = None
        self.kind = ""
        self.batches: list[dict[str, Tensor]] = []
        self.requests: list[InferenceRequest] = []
        self.parts: list[list[Tensor]] = []
        self.answer: asyncio.Future[Reply] = self._loop.create_future()

    def add(self, request: InferenceRequest) -> bool:
        """Adds a request; False if the call is over, as another has failed or the client has gone."""
        with self._lock:
            if not self._over:
                self.requests.append(request)
            return not self._over

    def respond(
        self, number: int, request: InferenceRequest, response: InferenceResponse | None, final: bool
    ) -> None:
        """Takes a response, and encodes all after the last one; any thread."""
        try:
            reply = self._reply(number, response)
        except ConchError as error:
            reply = error_reply(error)
        except Exception as error:  # boundary: outputs that user code has made
            reply = error_reply(unsendable(request.model_name, response, error))
        if request.watch is not None and response is not None:
            request.watch.bytes_out += sum(each.nbytes for each in response.outputs)
        with self._lock:
            if reply is None or self._replied:
                return
            self._replied = True
        try:
            self._loop.call_soon_threadsafe(self._done, reply)
        except RuntimeError:
            pass  # the loop is closed

    def abandon(self) -> None:
        """Cancels the requests after a disconnect."""
        self.cancel()
        if not self.answer.done():
            self.answer.set_exception(ClientDisconnectError())
            self.answer.exception()  # asyncio logs it if it is not read, as after an error of the parser

    def cancel(self) -> None:
        """Cancels the requests that still run, in several turns of the loop if they are many."""
        with self._lock:
            self._over = True
            requests, self.requests = self.requests, []
        self._cancel_some(request for request in requests if not request.completed)

    def _cancel_some(self, requests: Iterator[InferenceRequest]) -> None:
        count = 0
        for request in islice(requests, _QUICK_REQUESTS):
            self._admission.cancel(request)
            count += 1
        if count == _QUICK_REQUESTS:
            self._loop.call_soon(self._cancel_some, requests)

    def _reply(self, number: int, response: InferenceResponse | None) -> Reply | None:
        """The reply; None while other requests run."""
        if response is None:
            raise InvalidArgumentError(_ONE)
        if response.error is not None:
            raise response.error
        outputs = response.outputs
        if len(self.parts) > 1:
            # The model goes on, and may write to its arrays.
            detached = [each.detached(each.name) for each in outputs]
            with self._lock:
                self.parts[number] = detached
                if not all(self.parts):
                    return None
            outputs = joined_rows(self.parts)
        assert self.interface is not None, "set before a request is submitted"
        body = predictions(outputs, self.interface, self.kind)
        return Reply(200, [(b"content-type", self.kind.encode())], body)

    def _done(self, reply: Reply) -> None:
        self.cancel()  # after an error others may run; breaks a reference cycle, too
        if not self.answer.done():
            self.answer.set_result(reply)


def _ignore(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
    """Responder of a request that is not submitted."""
