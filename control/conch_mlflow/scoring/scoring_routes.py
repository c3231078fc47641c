"""The routes of MLflow's scoring protocol: ``/v2/models/M/invocations``, ``/ping`` and ``/version``.

Rows are sent to the model in one request, or in several if they are more than its `max_batch_size`: clients
of MLflow know no such limit. What comes back is encoded on the model's thread.

Threads and locks: event loop, but for `_Scoring._submit` and `_Call.respond`.
"""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Final

import orjson

from conch.access.principals import ANY, INFERS, OPEN
from conch.core.errors import ConchError, InvalidArgumentError, UnsupportedError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.response_errors import unsendable
from conch.core.servable import Servable
from conch.core.spec import ModelSpec
from conch.core.tensor import Tensor
from conch.door import operation_table as table
from conch.door.operation_table import Endpoint, path_pattern
from conch.frontends.http.http_exchange import ClientDisconnectError, HttpExchange, Reply
from conch.frontends.http.http_pools import loaded
from conch.frontends.http.http_routing import Route, RouteHandler, RouteTable, route
from conch.frontends.http.json_body import JSON, error_reply, parsed, read_body
from conch.frontends.http.route_provider import Answering, RestApi
from conch_mlflow.scoring.scoring_body import read_body as read_scored
from conch_mlflow.scoring.scoring_tensors import (
    joined_rows,
    predictions,
    request_tensors,
    split_rows,
    wanted_outputs,
)
from conch_mlflow.served_files import SIGNATURE_FILE
from conch_mlflow.signature import Signature, SignatureError, parse_signature

INVOCATIONS = Endpoint(
    "invocations",
    "inference",
    "Run the model by MLflow's scoring protocol",
    http_method="POST",
    paths=("/v2/models/{model}[/versions/{version}]/invocations",),
    roles=INFERS,
)
PING = Endpoint("mlflow_ping", "health", "Whether the server is ready", paths=("/ping",), roles=OPEN)
VERSION = Endpoint("mlflow_version", "metadata", "The server's version", paths=("/version",), roles=ANY)
ENDPOINTS: Final = (INVOCATIONS, PING, VERSION)
"""MLflow's calls, as entries like those of the table of operations."""

_QUICK_BYTES = 64 << 10  # of a body that is read on the event loop
_MOST_KNOWN = 1000
_ONE = "MLflow's scoring protocol has one response, and the model may have any number"


def scoring_table(api: RestApi) -> RouteTable:
    """The table of the routes; paths that it does not have go on to the next provider."""
    scoring = _Scoring(api)
    routes = [
        _route(INVOCATIONS, scoring.invocations),
        _route(PING, scoring.ping),
        _route(VERSION, scoring.version),
    ]
    labels = api.door.models.labels
    return RouteTable(
        routes, api.guard, api.refusals, api.cors, api.unmatched, labels=labels, endpoints=ENDPOINTS
    )


def _route(endpoint: Endpoint, handler: RouteHandler) -> Route:
    return route(path_pattern(endpoint.paths[0]), [endpoint.http_method], endpoint.access, handler)


class _Scoring:
    def __init__(self, api: RestApi) -> None:
        self._api = api
        self._signatures: dict[tuple[str, int], tuple[ModelSpec, Signature]] = {}

    def ping(self, exchange: HttpExchange) -> Answering:
        """Answers a probe."""
        return self._api.alias(exchange, table.SERVER_READY.paths[0])

    async def version(self, exchange: HttpExchange) -> Reply:
        """Answers with a text, as MLflow's server does."""
        return Reply(200, [(b"content-type", b"text/plain")], self._api.door.version.encode())

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
            if len(call.body) <= _QUICK_BYTES:
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

    def _submit(self, call: _Call, model: Servable | None) -> None:
        """Decodes and submits a request; any thread."""
        exchange, names = call.exchange, call.names
        scored = read_scored(call.body, exchange.header("content-type"))
        # All versions of a route have the same inputs.
        spec = self._api.door.describe(*names) if model is None else model.spec
        signature = call.signature = self._signature(spec)
        batches = split_rows(request_tensors(scored, spec, signature), spec.max_batch_size)
        call.requests = [
            InferenceRequest(
                *names,
                inputs,
                partial(call.respond, number),
                call.received_ns,
                requested=wanted_outputs(spec, signature),
            )
            for number, inputs in enumerate(batches)
        ]
        call.parts = [[] for _ in batches]
        for number, request in enumerate(call.requests):
            request.context = exchange
            if number and hasattr(call.requests[0], "side"):  # of a rollout, one for all rows
                request.side = call.requests[0].side
            if exchange.lost:  # while the pool decoded it; `abandon` found no request
                self._api.admission.cancel(request)
            size = 0 if number else len(call.body)
            self._api.admission.admit(request, False, model, exchange, size, single=_ONE)

    def _signature(self, spec: ModelSpec) -> Signature:
        """The signature of a version. Raises InvalidArgumentError: it has none."""
        key = (spec.identifier, spec.version)
        known, signature = self._signatures.get(key, (None, None))
        if known is not spec or signature is None:
            try:
                text = (spec.version_directory / SIGNATURE_FILE).read_bytes()
                signature = parse_signature(orjson.loads(text))
            except (OSError, ValueError, SignatureError):
                signature = None
            if signature is None:
                raise InvalidArgumentError(
                    f"model '{spec.name}' has no signature of MLflow, which this route needs; use "
                    f"/v2/models/{spec.name}/infer"
                )
            if len(self._signatures) >= _MOST_KNOWN:
                self._signatures.clear()
            self._signatures[key] = (spec, signature)
        return signature


class _Call:
    """The requests to a model that answer one HTTP request, and their responses.

    Attributes:
        requests: The requests: several if the rows are more than a batch of the model.
        parts: The outputs of each, once it is answered.
    """

    def __init__(
        self, api: RestApi, exchange: HttpExchange, names: tuple[str, str], received_ns: int
    ) -> None:
        self._admission = api.admission
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self.exchange = exchange
        self.names = names
        self.received_ns = received_ns
        self.body: memoryview | bytes = b""
        self.signature = Signature((), ())
        self.requests: list[InferenceRequest] = []
        self.parts: list[list[Tensor]] = []
        self.answer: asyncio.Future[Reply] = self._loop.create_future()

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
        if reply is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._done, reply)
        except RuntimeError:
            pass  # the loop is closed

    def abandon(self) -> None:
        """Cancels the requests after a disconnect."""
        self.cancel()
        if not self.answer.done():
            self.answer.set_exception(ClientDisconnectError())

    def cancel(self) -> None:
        """Cancels the requests that still run."""
        requests, self.requests = self.requests, []
        for request in requests:
            if not request.completed:
                self._admission.cancel(request)

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
        return Reply(200, [JSON], predictions(outputs, self.signature))

    def _done(self, reply: Reply) -> None:
        self.cancel()  # after an error others may run; breaks a reference cycle, too
        if not self.answer.done():
            self.answer.set_result(reply)


def _ignore(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
    """Responder of a request that is not submitted."""
