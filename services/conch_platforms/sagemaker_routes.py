"""SageMaker: ``/ping``, ``/invocations``, and ``/models`` of multi-model endpoints.

Pings and inference are aliases of REST.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, quote

import orjson

from conch.access.principals import CONTROLS, INFERS, OPEN, READS
from conch.core.errors import ConchError, InvalidArgumentError, ModelMemoryError
from conch.core.request import InferenceRequest
from conch.core.tensor import Buffer
from conch.door import operation_table as table
from conch.door.operation_table import Endpoint, Operation, RunsOn, path_pattern
from conch.frontends.http.flow_control import Body
from conch.frontends.http.http_connection import Handler
from conch.frontends.http.http_exchange import ExchangeHooks, Headers, HttpExchange, Reply
from conch.frontends.http.http_pools import result_of
from conch.frontends.http.http_routing import Route, RouteTable, route
from conch.frontends.http.json_body import (
    empty_reply,
    error_reply,
    json_reply,
    member,
    read_settings,
    text_error,
)
from conch.frontends.http.jsontext.json_scanner import JsonSyntaxError
from conch.frontends.http.jsontext.json_values import text
from conch.frontends.http.route_provider import Answering, RestApi, RouteProvider
from conch_platforms.binary_mime import BinaryMime
from conch_platforms.sagemaker_models import RegisteredModel, SageMakerModels, is_memory_error
from conch_platforms.sagemaker_sessions import (
    CLOSED_HEADER,
    NEW,
    NEW_HEADER,
    SESSION,
    SageMakerSessions,
)

log = logging.getLogger(__name__)

UNSPECIFIED_MODEL = "unspecified_SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"
"""Name of the default model where there is none; Triton's."""
_MIME = BinaryMime("application/vnd.sagemaker-triton.binary+json;json-header-size=")
_TARGET_MODEL = "x-amzn-sagemaker-target-model"
_ACCEPT_ENCODING = b"accept-encoding"
_MOST_SESSION_BODY = 1024
_ERROR_BYTES = 64 * 1024


_MODEL = "/models/{model}"
PING = Endpoint(
    "sagemaker_ping", "health", "Whether the server is ready or live", paths=("/ping",), roles=OPEN
)
INVOCATIONS = Endpoint(
    "sagemaker_invocations",
    "inference",
    "Run the default model",
    http_method="POST",
    paths=("/invocations",),
    roles=INFERS,
)
INVOKE = Endpoint(
    "sagemaker_invoke",
    "inference",
    "Run a model",
    http_method="POST",
    paths=(_MODEL + "/invoke",),
    roles=INFERS,
)
LIST_MODELS = Endpoint(
    "sagemaker_list_models", "model-repository", "Loaded models", paths=("/models",), roles=READS
)
GET_MODEL = Endpoint(
    "sagemaker_get_model", "model-repository", "A loaded model", paths=(_MODEL,), roles=READS
)
LOAD_MODEL = Endpoint(
    "sagemaker_load_model",
    "model-repository",
    "Load a model",
    http_method="POST",
    paths=("/models",),
    roles=CONTROLS,
)
UNLOAD_MODEL = Endpoint(
    "sagemaker_unload_model",
    "model-repository",
    "Unload a model",
    http_method="DELETE",
    paths=(_MODEL,),
    roles=CONTROLS,
)
ENDPOINTS = (PING, INVOCATIONS, INVOKE, LIST_MODELS, GET_MODEL, LOAD_MODEL, UNLOAD_MODEL)
"""SageMaker's calls, as entries like those of the table of operations."""


@dataclass(frozen=True, slots=True)
class SageMakerPlatform(RouteProvider):
    """Settings of the port.

    Attributes:
        sessions: Stateful sessions.
        default_model: Model of ``/invocations``; empty for none.
        ping_mode: ``ready`` or ``live``.
        inference_type: ``infer``, ``generate``, ``generate_stream`` or ``invocations``.
        models_root: Directory in which SageMaker puts models; None if this is no multi-model endpoint.
    """

    sessions: SageMakerSessions
    default_model: str = ""
    ping_mode: str = "ready"
    inference_type: str = "infer"
    models_root: Path | None = None
    title: ClassVar[str] = "SageMaker"

    def bind(self, api: RestApi) -> Handler:
        """Returns the table of SageMaker's routes; other paths get Triton's empty 400."""
        handlers = _SageMakerHandlers(self, api)
        routes = [
            _route(handlers.ping, PING),
            _route(handlers.invocations, INVOCATIONS),
        ]
        if handlers.loaded is not None:
            routes += [
                _route(handlers.invoke, INVOKE),
                _route(handlers.models, LIST_MODELS, LOAD_MODEL),
                _route(handlers.model, GET_MODEL, UNLOAD_MODEL),
            ]
        return RouteTable(routes, api.guard, api.refusals, unmatched=_refuse_path)


def _refuse_path(exchange: HttpExchange) -> None:
    exchange.respond(*empty_reply(400))


class _Hooks(ExchangeHooks):
    """Sessions are sequences; responses are as SageMaker's contract has them."""

    def __init__(self, sessions: SageMakerSessions) -> None:
        self._sessions = sessions

    def prepare(self, request: InferenceRequest, exchange: HttpExchange) -> None:
        self._sessions.prepare(request, exchange)

    def translate(
        self, exchange: HttpExchange, status: int, headers: Headers, body: Body
    ) -> tuple[int, Headers]:
        if status == 200:
            return status, _MIME.headers(headers)
        self._sessions.failed(exchange)
        if status == 501 and any(name == _ACCEPT_ENCODING for name, _ in headers):
            return 415, headers
        text = body[:_ERROR_BYTES].decode(errors="replace") if isinstance(body, bytes) else ""
        if status == ModelMemoryError.http_status and ModelMemoryError.BEGINNING in text:
            return 507, headers
        # Errors of the client have its own words in their texts.
        if status >= 500 and is_memory_error(text):
            return 507, headers
        return status, headers


class _SageMakerHandlers:
    # On the threads for loads: an unload waits for requests in flight.
    _CHANGE: ClassVar[Operation[Callable[[], None], None]] = Operation(
        "sagemaker_change",
        "model-repository",
        "Load or unload a model of the endpoint",
        roles=CONTROLS,
        handler=lambda core, services, change: change(),
        runs_on=RunsOn.LOAD,
    )

    def __init__(self, platform: SageMakerPlatform, api: RestApi) -> None:
        self._platform = platform
        self._api = api
        self._hooks = _Hooks(platform.sessions)
        root, archives = platform.models_root, api.door.archives
        self.loaded: SageMakerModels | None = None
        if root is not None and archives is not None:
            self.loaded = SageMakerModels(archives, root, platform.default_model)

    def ping(self, exchange: HttpExchange) -> Answering:
        return self._api.alias(exchange, f"/v2/health/{self._platform.ping_mode}")

    def invocations(self, exchange: HttpExchange) -> Any:
        model = self._platform.default_model or UNSPECIFIED_MODEL
        path = f"/v2/models/{quote(model, safe='')}/{self._platform.inference_type}"
        return self._inference(exchange, lambda: self._api.alias(exchange, path))

    def invoke(self, exchange: HttpExchange, model: str) -> Any:
        try:
            identifier = self._registry.identifier(model)
        except ConchError as error:
            exchange.respond(*error_reply(error))
            return None
        log.info("Invoking SageMaker TargetModel: %s", exchange.header(_TARGET_MODEL) or model)
        return self._inference(exchange, lambda: self._api.infer(exchange, identifier, ""))

    def _inference(self, exchange: HttpExchange, begin: Callable[[], Any]) -> Any:
        """Begins an inference request, unless it only opens or closes a session."""
        try:
            _MIME.read(exchange)
        except ConchError as error:
            exchange.respond(*error_reply(error))
            return None
        exchange.hooks = self._hooks
        if SESSION not in exchange.fields:
            return begin()
        if self._platform.inference_type != "infer":
            text = f"sessions are for inference type infer, and this is {self._platform.inference_type}"
            exchange.respond(*text_error(text, 400))
            return None
        short = exchange.length is not None and exchange.length <= _MOST_SESSION_BODY
        if not short:
            return begin()
        exchange.read_body(_MOST_SESSION_BODY, partial(self._session, exchange, begin))
        return None

    def _session(self, exchange: HttpExchange, begin: Callable[[], Any]) -> None:
        """Opens or closes a session, or runs the inference, once there is a body."""
        kind = _request_type(exchange.keep_body())
        name, sessions = exchange.header(SESSION.decode()), self._platform.sessions
        try:
            if kind == NEW and name != NEW:
                raise InvalidArgumentError(f"a session is opened by a request whose session is {NEW}")
            if kind == NEW:
                exchange.respond(200, [(NEW_HEADER, sessions.open()[1])])
            elif kind == "CLOSE":
                self._api.door.end_sequence(sessions.close(name), name)
                exchange.respond(200, [(CLOSED_HEADER, name.encode())])
            else:
                begin()  # it responds by itself
        except ConchError as error:
            exchange.respond(*error_reply(error))

    @property
    def _registry(self) -> SageMakerModels:
        assert self.loaded is not None, "its routes are those of a multi-model endpoint"
        return self.loaded

    def models(self, exchange: HttpExchange) -> Any:
        if exchange.method == "GET":
            (token,) = parse_qs(exchange.query).get("next_page_token", [""])[:1]
            return self._list(token)
        return self._load(exchange)

    async def _list(self, token: str) -> Reply:
        page = self._registry.page(token)
        body: dict[str, Any] = {"models": [_model_object(each) for each in page.models]}
        if page.next_token:
            body["nextPageToken"] = page.next_token
        return json_reply(body)

    async def _load(self, exchange: HttpExchange) -> Reply:
        try:
            body = await read_settings(exchange, self._api.pools, self._api.most_bytes, required=True)
        except JsonSyntaxError as error:
            # Triton's 500 for it would tell SageMaker that the container is at fault.
            raise InvalidArgumentError(error.message) from None
        name, url = (_text_of(body, field) for field in ("model_name", "url"))
        log.info("Loading SageMaker TargetModel: %s", exchange.header(_TARGET_MODEL) or name)
        await self._change(lambda: self._registry.load(name, url))
        return empty_reply()

    def model(self, exchange: HttpExchange, model: str) -> Any:
        if exchange.method == "GET":
            return self._get(model)
        log.info("Unloading SageMaker TargetModel: %s", exchange.header(_TARGET_MODEL) or model)
        return self._unload(model)

    async def _get(self, model: str) -> Reply:
        return json_reply(_model_object(self._registry.get(model)))

    async def _unload(self, model: str) -> Reply:
        await self._change(lambda: self._registry.unload(model))
        return empty_reply()

    async def _change(self, change: Callable[[], None]) -> None:
        self._api.door.check(table.LOAD_MODEL)
        await result_of(lambda: self._api.door.ask(self._CHANGE, lambda: change, lambda done: done))


def _route(handler: Callable[..., Any], *endpoints: Endpoint) -> Route:
    """The route of endpoints with one path."""
    first = endpoints[0]
    return route(
        path_pattern(first.paths[0]), [each.http_method for each in endpoints], first.access, handler
    )


def _text_of(body: Any, field: str) -> str:
    value = member(body, field)
    if not isinstance(value, str):
        raise InvalidArgumentError(f"the load request has no text '{field}'")
    return text(value)


def _model_object(model: RegisteredModel) -> dict[str, str]:
    return {"modelName": model.name, "modelUrl": model.url}


def _request_type(body: Buffer) -> str:
    """Request type of a stateful session: ``NEW_SESSION`` or ``CLOSE``; empty for an inference alone."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ""
    kind = found.get("requestType") if isinstance(found, dict) else None
    return kind if isinstance(kind, str) else ""
