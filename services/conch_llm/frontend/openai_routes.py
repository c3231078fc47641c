"""OpenAI's routes and Anthropic's: the fixed list of paths, and what all requests pass before their handler.

Checks, in order: known path, CORS, method, API key or access policy, key of a restricted route, origin. Paths
are matched as a whole, never by a prefix, and may begin with ``/openai``, as in KServe.

Threads and locks: event loop only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import parse_qs, unquote

from conch.access.principals import ANY, CONTROLS, INFERS, OPEN, Roles
from conch.core.errors import ConchError, PermissionDeniedError, UnavailableError
from conch.door import operation_table as table
from conch.door.operation_handlers import LoadRequest, UnloadRequest
from conch.frontends.http.cors import cross_origin_reason
from conch.frontends.http.http_exchange import HttpExchange
from conch.frontends.http.http_pools import loaded, result_of
from conch.frontends.http.json_body import JSON
from conch.frontends.http.route_provider import Answering, RestApi
from conch_llm.contract import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    EMBEDDINGS,
    MESSAGES,
    PREFIXES,
    RERANK,
    RESPONSES,
    SCORE,
    TOKENIZE,
)
from conch_llm.frontend.dialects.response_store import ResponseStore
from conch_llm.frontend.error_forms import OPENAI_ERRORS, ErrorForm, errors_of
from conch_llm.frontend.inference_routes import InferenceRoutes
from conch_llm.frontend.llm_metrics import LlmMetrics
from conch_llm.frontend.model_names import ModelNames
from conch_llm.frontend.openai_access import OpenAiAccess
from conch_llm.frontend.openai_call import OpenAiCall
from conch_llm.frontend.openai_errors import (
    RequestError,
    UnknownPathError,
    WrongMethodError,
)
from conch_llm.frontend.request_fields import MODEL
from conch_llm.frontend.request_fields import checked as checked_fields
from conch_llm.openai_settings import OpenAiSettings

_KSERVE = "/openai"
_MODELS = "/v1/models"
_LOAD, _UNLOAD = "/load", "/unload"

Work = Callable[[OpenAiCall], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Route:
    """One path.

    Attributes:
        name: Its path without ids, for metrics.
        method: Its HTTP method.
        category: Category for restrictions.
        roles: Roles of which one is needed; none for calls without credentials.
        work: Answers.
        action: Name of the operation, for the audit log.
        model: The model that the path names; empty for none.
        errors: Form of its errors.
    """

    name: str
    method: str
    category: str
    roles: Roles
    work: Work
    action: str = "infer"
    model: str = ""
    errors: ErrorForm = OPENAI_ERRORS


class OpenAiHandler:
    """Answers the requests of one port.

    Args:
        settings: Settings by flags.
        metrics: Counts what the routes do.
        api: The port's REST routes.
        store: Keeps responses, for all ports.
    """

    def __init__(
        self, settings: OpenAiSettings, metrics: LlmMetrics, api: RestApi, store: ResponseStore
    ) -> None:
        self._api = api
        self._metrics = metrics
        self._names = ModelNames(api.door.models, settings.lora_separator)
        # Headers are read as Latin-1.
        own = {
            category: (key, value.encode().decode("latin-1"))
            for category, (key, value) in settings.restrictions.items()
        }
        self._access = OpenAiAccess(api.access, {**api.guard.restricted, **own}, settings.keys, self._names)
        self._inference = InferenceRoutes(api.door, api.admission, api.clock, api.pools, settings, store)
        self._routes = self._table()

    def __call__(self, exchange: HttpExchange) -> Answering:
        """Answers a request, or returns a coroutine that does."""
        path = exchange.path
        ours = path.startswith(PREFIXES)
        if path.startswith(f"{_KSERVE}/"):
            path = path[len(_KSERVE) :]
        route = self._routes.get(path) or self._part_route(path, exchange.method)
        if route is None:
            if ours:
                pools, most = self._api.pools, self._api.most_bytes
                call = OpenAiCall(exchange, "unknown", self._metrics, pools, most, errors_of(path))
                call.fail(UnknownPathError(f"Unknown request URL: {exchange.method} {exchange.path}"))
                return None
            return self._api.unmatched(exchange)
        inference = route.category == "inference"
        if inference and self._api.cors is not None and self._api.cors.answer(exchange):
            return None
        call = OpenAiCall(
            exchange, route.name, self._metrics, self._api.pools, self._api.most_bytes, route.errors
        )
        try:
            self._check(exchange, route)
        except ConchError as error:
            call.fail(error)
            return None
        return call.run(self._answer(call, route))

    def _check(self, exchange: HttpExchange, route: _Route) -> None:
        if exchange.method != route.method:
            raise WrongMethodError(route.name, route.method)
        self._access.admit(exchange, route.category, route.roles, route.action, route.model)
        if route.method == "POST" and route.category != "inference":
            page = cross_origin_reason(exchange.fields)
            if page:
                raise PermissionDeniedError(f"a web page of another origin may not ask for this: {page}")

    async def _answer(self, call: OpenAiCall, route: _Route) -> None:
        if route.category == "inference":
            self._inference.check_open()
        await route.work(call)

    # The list of routes

    def _table(self) -> Mapping[str, _Route]:
        found: dict[str, _Route] = {}

        def get(path: str, category: str, roles: Roles, work: Work, action: str) -> None:
            found[path] = _Route(path, "GET", category, roles, work, action)

        def post(route: str, *aliases: str) -> None:
            for path in (route, *aliases):
                answer = partial(self._infer, route)
                found[path] = _Route(path, "POST", "inference", INFERS, answer, errors=errors_of(path))

        get(_MODELS, "model-repository", ANY, self._list, "list_models")
        get("/health", "health", OPEN, self._health, "")
        get("/ping", "health", OPEN, self._health, "")
        get("/health/live", "health", OPEN, self._alias(table.SERVER_LIVE.paths[0]), "")
        get("/health/ready", "health", OPEN, self._alias(table.SERVER_READY.paths[0]), "")
        get("/version", "metadata", ANY, self._version, "server_metadata")
        for route in (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, MESSAGES, COUNT_TOKENS):
            post(route)
        post(TOKENIZE)
        post(DETOKENIZE)
        post(SCORE, "/score")
        post(RERANK, "/rerank", "/v2/rerank")
        return found

    def _part_route(self, path: str, method: str) -> _Route | None:
        """The route of a path with the id of a response, or of a model, which may hold slashes."""
        if path.startswith(f"{RESPONSES}/"):
            return self._response_route(unquote(path[len(RESPONSES) + 1 :]), method)
        if not path.startswith(f"{_MODELS}/"):
            return None
        name = unquote(path[len(_MODELS) + 1 :])
        name_of = f"{_MODELS}/{{model}}"
        if method == "POST":
            for end, work, action in (
                (_UNLOAD, self._unload, "unload_model"),
                (_LOAD, self._load, "load_model"),
            ):
                if name.endswith(end) and len(name) > len(end):
                    model = name.removesuffix(end)
                    return _Route(
                        name_of + end,
                        "POST",
                        "model-repository",
                        CONTROLS,
                        partial(work, model=model),
                        action,
                        model,
                    )
        if not name:
            return None
        return _Route(name_of, "GET", "model-repository", ANY, partial(self._get, model=name), "get_model")

    def _response_route(self, name: str, method: str) -> _Route | None:
        """The route of a response that is kept."""
        if not name or "/" in name:
            return None
        work = self._remove if method == "DELETE" else self._stored
        verb = method if method == "DELETE" else "GET"
        return _Route(f"{RESPONSES}/{{id}}", verb, "inference", INFERS, partial(work, name=name))

    async def _stored(self, call: OpenAiCall, name: str) -> None:
        for given in parse_qs(call.exchange.query, keep_blank_values=True):
            raise RequestError(f"`{given[:64]}` is not supported: the response is sent whole", given[:64])
        call.respond(200, [JSON], self._inference.dialects.stored(call, name))

    async def _remove(self, call: OpenAiCall, name: str) -> None:
        self._inference.dialects.remove(call, name)
        call.reply({"id": name, "object": "response", "deleted": True})

    # Routes without a model, and of models themselves

    async def _list(self, call: OpenAiCall) -> None:
        every = parse_qs(call.exchange.query).get("all", ["0"])[-1].lower() in ("1", "true")
        entries = [
            await self._inference.entry(model)
            for model in self._names.all()
            if (every or model.capability.speaks) and self._access.shows(call.exchange, ANY, model.own_name)
        ]
        call.reply({"object": "list", "data": entries})

    async def _get(self, call: OpenAiCall, model: str) -> None:
        found = self._access.model(call.exchange, model, ANY)
        if found is None:
            raise UnavailableError(f"The model `{model}` is not in memory: a request to it loads it")
        call.reply(await self._inference.entry(found))

    async def _health(self, call: OpenAiCall) -> None:
        call.respond(200 if self._api.door.loaded else 503, [])

    async def _version(self, call: OpenAiCall) -> None:
        call.reply({"version": self._api.door.version})

    def _alias(self, path: str) -> Work:
        async def answer(call: OpenAiCall) -> None:
            work = self._api.alias(call.exchange, path)
            if work is not None:
                await work

        return answer

    async def _load(self, call: OpenAiCall, model: str) -> None:
        if any(each.own_name == model for each in self._names.all()):
            raise RequestError(f"Model '{model}' is already loaded", "model")
        await self._change(call, table.LOAD_MODEL, LoadRequest(model, {}, False))
        loaded_model = self._names.find(model)
        if loaded_model is None:
            raise UnavailableError(f"The model `{model}` has been evicted since its load")
        call.reply(await self._inference.entry(loaded_model))

    async def _unload(self, call: OpenAiCall, model: str) -> None:
        await self._change(call, table.UNLOAD_MODEL, UnloadRequest(model, False))
        call.reply({"status": "success", "model": model})

    async def _change(self, call: OpenAiCall, operation: table.Operation[Any, None], request: Any) -> None:
        """Loads or unloads a model, by the rules of REST."""
        api = self._api
        try:
            api.door.check(operation)
        except UnavailableError as error:  # by a flag: another try fails too
            raise RequestError(f"Model load/unload requires explicit mode: {error.message}") from None
        guard = self._access.guard
        await result_of(
            lambda: api.door.ask(operation, lambda: request, lambda done: done, call.exchange, guard)
        )

    # Routes of inference

    async def _infer(self, route: str, call: OpenAiCall) -> None:
        """Finds the model of a request, and answers it."""
        body = await call.read()
        name = checked_fields(body, MODEL, ("model",))["model"]
        model = self._access.model(call.exchange, name)
        while model is None:
            await loaded(call.exchange, self._api.admission, name, "")
            model = self._access.model(call.exchange, name)
        await self._inference.answer(call, route, model, body)
