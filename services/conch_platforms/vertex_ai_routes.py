"""Vertex AI: one health route, one predict route, and a header that redirects predictions to REST paths."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import quote

from conch.core.errors import ConchError
from conch.door import operation_table as table
from conch.door.door import Door
from conch.door.operation_table import Endpoint, Operation, path_pattern
from conch.frontends.http.flow_control import Body
from conch.frontends.http.http_connection import Handler
from conch.frontends.http.http_exchange import ExchangeHooks, Headers, HttpExchange
from conch.frontends.http.http_routing import wrong_method
from conch.frontends.http.json_body import empty_reply, error_reply, text_error
from conch.frontends.http.route_provider import Answering, RestApi, RouteProvider
from conch_platforms.binary_mime import BinaryMime
from conch_platforms.default_models import check_loaded, only_model

_MIME = BinaryMime("application/vnd.vertex-ai-triton.binary+json;json-header-size=")
_REDIRECT = b"x-vertex-ai-triton-redirect"
_METRICS = "/metrics"
# A literal path comes before a template that matches it.
_TARGETS: tuple[Endpoint, ...] = (
    table.SERVER_METADATA,
    table.SERVER_LIVE,
    table.SERVER_READY,
    table.ALL_STATISTICS,
    table.MODEL_METADATA,
    table.MODEL_READY,
    table.MODEL_CONFIG,
    table.MODEL_STATISTICS,
    table.INFER,
    table.GENERATE,
    table.GENERATE_STREAM,
    table.REPOSITORY_INDEX,
    table.LOAD_MODEL,
    table.UNLOAD_MODEL,
    table.SYSTEM_REGIONS,
    table.REGISTER_SYSTEM,
    table.UNREGISTER_SYSTEM,
    table.CUDA_REGIONS,
    table.REGISTER_CUDA,
    table.UNREGISTER_CUDA,
)
_PATTERNS = tuple(
    (re.compile(path_pattern(template)), endpoint) for endpoint in _TARGETS for template in endpoint.paths
)


@dataclass(frozen=True, slots=True)
class VertexAiPlatform(RouteProvider):
    """Settings of the port.

    Attributes:
        predict_route: Path of predictions.
        health_route: Path of health checks.
        default_model: Model of predictions; empty for the only one.
    """

    predict_route: str
    health_route: str
    default_model: str = ""
    title: ClassVar[str] = "Vertex AI"

    def check(self, door: Door) -> None:
        """Checks that the default model is loaded."""
        check_loaded(door, self.default_model or only_model(door))

    def bind(self, api: RestApi) -> Handler:
        """Returns the handler of the two routes."""
        return _VertexAiHandler(self, api)


class _VertexAiHandler:
    def __init__(self, platform: VertexAiPlatform, api: RestApi) -> None:
        self._platform = platform
        self._api = api

    def __call__(self, exchange: HttpExchange) -> Answering:
        """Answers a request; other paths than the two get Triton's empty 400."""
        platform = self._platform
        if exchange.path == platform.health_route:
            return self._api.alias(exchange, table.SERVER_READY.paths[0])
        if exchange.path != platform.predict_route:
            exchange.respond(*empty_reply(400))
            return None
        if exchange.method != "POST":
            exchange.respond(*wrong_method(["POST"]))
            return None
        redirect = exchange.fields.get(_REDIRECT)
        if redirect is not None:
            return self._redirected(exchange, f"/{redirect.decode('latin-1')}")
        try:
            model = platform.default_model or only_model(self._api.door)
        except ConchError as error:
            exchange.respond(*error_reply(error))
            return None
        return self._infer(exchange, f"/v2/models/{quote(model, safe='')}/infer")

    def _infer(self, exchange: HttpExchange, path: str) -> Answering:
        try:
            _MIME.read(exchange)
        except ConchError as error:
            exchange.respond(*error_reply(error))
            return None
        exchange.hooks = _HOOKS
        return self._api.alias(exchange, path)

    def _redirected(self, exchange: HttpExchange, path: str) -> Answering:
        """Answers a prediction as a request for another path, unless that changes the server."""
        if path == _METRICS:
            if self._api.metrics is None:
                exchange.respond(*empty_reply(400))
                return None
            exchange.path, exchange.method = _METRICS, "GET"
            return self._api.metrics(exchange)
        endpoint = next((each for pattern, each in _PATTERNS if pattern.fullmatch(path)), None)
        if endpoint is None:
            exchange.respond(*empty_reply(400))
            return None
        if isinstance(endpoint, Operation) and endpoint.mutates:
            text = f"'{path}' changes the server, which requests from Vertex AI may not"
            exchange.respond(*text_error(text, 403))
            return None
        if endpoint is table.INFER:
            return self._infer(exchange, path)
        return self._api.alias(exchange, path, endpoint.http_method)


class _Hooks(ExchangeHooks):
    def translate(
        self, exchange: HttpExchange, status: int, headers: Headers, body: Body
    ) -> tuple[int, Headers]:
        # Vertex AI drops the length's own header; clients that call the container directly read it.
        return status, _MIME.headers(headers, keep_length=True)


_HOOKS = _Hooks()
