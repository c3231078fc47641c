"""SageMaker: ``/ping``, ``/invocations``, and ``/models`` of multi-model endpoints.

Pings and inference are aliases of REST; loads and unloads are operations of `platform_table`. Used by:
`platform_options`; bound by `http_server`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import parse_qs

import orjson

from conch.core.errors import ConchError, InvalidArgumentError
from conch.core.server_state import ServerState
from conch.core.tensor import Buffer
from conch.frontends.http.flow_control import Body
from conch.frontends.http.http_connection import Handler
from conch.frontends.http.http_exchange import Headers, HttpExchange, Reply
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
from conch.frontends.operations import platform_table as table
from conch.frontends.operations.operation_table import Endpoint, Operation, path_pattern
from conch.frontends.operations.platform_table import RegisterRequest
from conch_platforms.binary_mime import BinaryMime
from conch_platforms.platform_api import Answering, PrepareRequest, RestApi, alias
from conch_platforms.sagemaker_models import RegisteredModel, is_memory_error
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


@dataclass(frozen=True, slots=True)
class SageMakerPlatform:
    """Settings of the port.

    Attributes:
        default_model: Model of ``/invocations``; empty for none.
        ping_mode: ``ready`` or ``live``.
        inference_type: ``infer``, ``generate`` or ``generate_stream``.
        sessions: Stateful sessions.
    """

    sessions: SageMakerSessions
    default_model: str = ""
    ping_mode: str = "ready"
    inference_type: str = "infer"
    title: str = "SageMaker"

    @property
    def prepare(self) -> PrepareRequest | None:
        """See `Platform`: sessions are sequences."""
        return self.sessions.prepare

    def check(self, core: ServerState) -> None:
        """See `Platform`: SageMaker learns by its pings what is loaded."""

    def bind(self, api: RestApi) -> Handler:
        """See `Platform`."""
        return _SageMakerHandlers(self, api).table()


class _SageMakerHandlers:
    def __init__(self, platform: SageMakerPlatform, api: RestApi) -> None:
        self._platform = platform
        self._api = api

    def table(self) -> RouteTable:
        """The routes; other paths get Triton's empty 400."""
        routes = [
            _route(table.SAGEMAKER_PING, self._ping),
            _route(table.SAGEMAKER_INVOCATIONS, self._invocations),
            _route(table.SAGEMAKER_INVOKE, self._invoke),
            _route(table.SAGEMAKER_LIST_MODELS, self._models, table.SAGEMAKER_LOAD_MODEL),
            _route(table.SAGEMAKER_GET_MODEL, self._model, table.SAGEMAKER_UNLOAD_MODEL),
        ]
        api = self._api
        return RouteTable(routes, api.restrictions, api.refused, unmatched=empty_reply(400))

    def _ping(self, exchange: HttpExchange) -> Answering:
        return alias(self._api, exchange, f"/v2/health/{self._platform.ping_mode}")

    def _invocations(self, exchange: HttpExchange) -> Any:
        model = self._platform.default_model or UNSPECIFIED_MODEL
        path = f"/v2/models/{model}/{self._platform.inference_type}"
        return self._inference(exchange, lambda: alias(self._api, exchange, path))

    def _invoke(self, exchange: HttpExchange, model: str) -> Any:
        models = self._api.services.sagemaker_models
        try:
            if models is None:
                return self._run(table.SAGEMAKER_GET_MODEL, model)  # says why there are none
            identifier = models.identifier(model)
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
        exchange.translate = partial(_translated, self._platform.sessions, exchange)
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
                self._api.core.end_sequence(sessions.close(name), name)
                exchange.respond(200, [(CLOSED_HEADER, name.encode())])
            else:
                begin()  # it responds by itself
        except ConchError as error:
            exchange.respond(*error_reply(error))

    def _models(self, exchange: HttpExchange) -> Any:
        if exchange.method == "GET":
            (token,) = parse_qs(exchange.query).get("next_page_token", [""])[:1]
            return self._list(token)
        return self._load(exchange)

    async def _list(self, token: str) -> Reply:
        page = await self._run(table.SAGEMAKER_LIST_MODELS, token)
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
        await self._run(table.SAGEMAKER_LOAD_MODEL, RegisterRequest(name, url))
        return empty_reply()

    def _model(self, exchange: HttpExchange, model: str) -> Any:
        if exchange.method == "GET":
            return self._get(model)
        log.info("Unloading SageMaker TargetModel: %s", exchange.header(_TARGET_MODEL) or model)
        return self._unload(model)

    async def _get(self, model: str) -> Reply:
        return json_reply(_model_object(await self._run(table.SAGEMAKER_GET_MODEL, model)))

    async def _unload(self, model: str) -> Reply:
        await self._run(table.SAGEMAKER_UNLOAD_MODEL, model)
        return empty_reply()

    async def _run(self, operation: Operation[Any, Any], request: Any) -> Any:
        api = self._api
        pool = api.pools.operations.choose(operation.runs_on, api.core)
        if pool is None:
            return operation.handler(api.core, api.services, request)
        return await result_of(partial(pool.submit, operation.handler, api.core, api.services, request))


def _route(endpoint: Endpoint, handler: Callable[..., Any], *others: Endpoint) -> Route:
    """The route of endpoints with one path."""
    methods = [each.http_method for each in (endpoint, *others)]
    return route(path_pattern(endpoint.paths[0]), methods, endpoint.access, handler)


def _text_of(body: Any, field: str) -> str:
    value = member(body, field)
    if not isinstance(value, str):
        raise InvalidArgumentError(f"the load request has no text '{field}'")
    return text(value)


def _model_object(model: RegisteredModel) -> dict[str, str]:
    return {"modelName": model.name, "modelUrl": model.url}


def _request_type(body: Buffer) -> str:
    """What a request wants of its session besides an inference: ``NEW_SESSION``, ``CLOSE`` or nothing."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ""
    kind = found.get("requestType") if isinstance(found, dict) else None
    return kind if isinstance(kind, str) else ""


def _translated(
    sessions: SageMakerSessions, exchange: HttpExchange, status: int, headers: Headers, body: Body
) -> tuple[int, Headers]:
    """Status and headers of an inference response, as SageMaker's contract has them."""
    if status == 200:
        return status, _MIME.headers(headers)
    sessions.failed(exchange)
    if status == 501 and any(name == _ACCEPT_ENCODING for name, _ in headers):
        return 415, headers
    # Errors of the client have its own words in their texts.
    error = body[:_ERROR_BYTES] if status >= 500 and isinstance(body, bytes) else b""
    if is_memory_error(error.decode(errors="replace")):
        return 507, headers
    return status, headers
