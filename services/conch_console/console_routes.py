"""The routes of the console: which path needs which right, and what answers it; with the security headers.

Reading routes and actions that may block run on pools; the loop only parses and sends. Threads and locks:
event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from urllib.parse import parse_qs

import orjson

from conch.access.principals import EVERY_MODEL
from conch.core.errors import ConchError, InvalidArgumentError, UnsupportedError, as_conch_error
from conch.door.thread_pool import ThreadPool
from conch.frontends.http.chat_route import ChatRoute
from conch.frontends.http.flow_control import UnreadBodyError
from conch.frontends.http.http_exchange import EVENT_STREAM, Headers, HttpExchange, Reply
from conch.frontends.http.http_pools import result_of
from conch.frontends.http.http_routing import Route, RouteTable, route
from conch.frontends.http.json_body import JSON, error_reply, json_reply, read_body
from conch.observability.tracing.trace_ring import TraceRing
from conch_console.config_view import ConfigView
from conch_console.console_access import READING, ConsoleAccess, Need, User
from conch_console.console_actions import ConsoleActions, LoadFailedError
from conch_console.console_options import ConsoleOptions
from conch_console.live_feed import LiveFeed
from conch_console.log_ring import LogRing
from conch_console.model_views import ModelViews
from conch_console.server_views import ServerViews
from conch_console.static_files import StaticFiles
from conch_console.trace_sampling import TraceSampling
from conch_console.try_route import TryRoute

POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    b"connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
_HEADERS: Final[Headers] = [
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
_API_HEADERS: Final[Headers] = [*_HEADERS, (b"cache-control", b"no-store")]
_BODY_BYTES: Final = 1 << 20
_MODEL: Final = "/api/models/(?P<model>[^/]+)"
_LOG_LINES: Final = 500
_SETTLE_S: Final = 1.0

Handler = Callable[..., Coroutine[Any, Any, Reply | None]]
"""Takes exchange, user where the route needs one, and the groups of the path."""


@dataclass(frozen=True, slots=True)
class ConsoleParts:
    """Parts of the console that its routes read and change."""

    options: ConsoleOptions
    access: ConsoleAccess
    static: StaticFiles
    server: ServerViews
    models: ModelViews
    configs: ConfigView
    actions: ConsoleActions
    sampling: TraceSampling
    feed: LiveFeed
    logs: LogRing
    traces: TraceRing
    infer: TryRoute
    chat: ChatRoute | None
    reading: ThreadPool
    changing: ThreadPool


class ConsoleRoutes:
    """Builds the table of routes."""

    def __init__(self, parts: ConsoleParts) -> None:
        self._parts = parts

    def table(self) -> list[Route]:
        """All routes."""
        parts = self._parts
        views, models, actions = parts.server, parts.models, parts.actions

        def read(work: Callable[..., Any]) -> Handler:
            async def handle(exchange: HttpExchange, user: User, **path: str) -> Reply:
                return json_reply(await self._run(parts.reading, work, *path.values()))

            return handle

        def change(
            pattern: str,
            action: str,
            work: Callable[..., Any],
            takes_body: bool = True,
            then: Callable[[], None] = _nothing,
        ) -> Route:
            async def handle(exchange: HttpExchange, user: User, **path: str) -> Reply:
                given = [await _json(exchange)] if takes_body else []
                audited = partial(self._audited, action, path.get("model", ""), work)
                try:
                    done = await self._run(parts.changing, audited, user, *path.values(), *given)
                except LoadFailedError as failed:
                    error = failed.error
                    content = {"error": error.message, "code": error.code, "findings": failed.findings}
                    return json_reply(content, error.http_status)
                then()
                return json_reply({} if done is None else done)

            return self._route(pattern, Need.CONTROL, action, POST=handle)

        return [
            self._route(
                "/api/session", Need.NOTHING, GET=self._session, POST=self._log_in, DELETE=self._log_out
            ),
            self._route("/api/live", Need.READ, GET=self._live),
            self._route("/api/server", Need.READ, GET=read(views.about)),
            self._route("/api/models", Need.READ, GET=read(models.all)),
            self._route(_MODEL, Need.READ, GET=read(models.one)),
            self._route(f"{_MODEL}/config", Need.READ, GET=read(parts.configs.show)),
            self._route(f"{_MODEL}/history", Need.READ, GET=read(models.history)),
            self._route(f"{_MODEL}/rollout", Need.READ, GET=read(models.rollout)),
            self._route(f"{_MODEL}/profiles", Need.READ, GET=read(models.profiles)),
            self._route("/api/rollouts", Need.READ, GET=read(models.rollouts)),
            self._route("/api/fronts", Need.READ, GET=read(views.fronts)),
            self._route("/api/traces", Need.READ, GET=self._traces),
            self._route("/api/logs", Need.READ, GET=self._logs),
            self._route("/api/settings", Need.SETTINGS, GET=read(views.settings)),
            change(f"{_MODEL}/load", "load_model", actions.load),
            change(f"{_MODEL}/unload", "unload_model", actions.unload),
            change(f"{_MODEL}/rollout/action", "update_rollout", actions.change_rollout),
            change("/api/drain", "drain", actions.drain, takes_body=False),
            change("/api/settings/log", "update_log_settings", actions.change_log),
            change("/api/settings/trace", "update_trace_settings", actions.change_traces),
            change(
                f"(?:{_MODEL}|/api/traces)/sample",
                "update_trace_settings",
                actions.sample,
                then=self._settle,
            ),
            self._route(
                f"{_MODEL}(?:/versions/(?P<version>[0-9]+))?/infer", Need.INFER, "infer", POST=self._infer
            ),
            self._route("/api/chat", Need.READ, GET=self._chat_models),
            self._route(f"{_MODEL}/chat", Need.INFER, "infer", POST=self._chat),
            self._route("/(?P<file>[a-zA-Z0-9_./-]*)", Need.NOTHING, GET=self._file, HEAD=self._file),
        ]

    def _route(self, pattern: str, need: Need, action: str = READING, **handlers: Handler) -> Route:
        return route(pattern, list(handlers), "console", partial(self._checked, need, action, handlers))

    async def _checked(
        self, need: Need, action: str, handlers: Mapping[str, Handler], exchange: HttpExchange, **path: str
    ) -> Reply | None:
        """Answers a request of a user who may do this. Raises ConchError: the user may not."""
        access = self._parts.access
        handler = handlers[exchange.method]
        if exchange.method not in ("GET", "HEAD"):
            access.check_origin(exchange.fields)
        if need is Need.NOTHING:
            return await handler(exchange, **path)
        user = access.admit(exchange, need, action, path.get("model", ""))
        exchange.access = user.grant
        return await handler(exchange, user, **path)

    def _audited(self, action: str, model: str, work: Callable[..., Any], user: User, *arguments: Any) -> Any:
        """Does what a user has asked for, and audits it; on the pool."""
        error: ConchError | None = None
        try:
            return work(user, *arguments)
        except LoadFailedError as failed:
            error = failed.error
            raise
        except Exception as failed:  # of any kind: it is audited, and raised again
            error = as_conch_error(failed)
            raise
        finally:
            self._parts.access.changed(user, action, model, error)

    def _settle(self) -> None:
        """Puts sampled settings back in time, whether a page is open then or not."""
        sampling = self._parts.sampling
        sampling.settle()
        if sampling.state():
            asyncio.get_running_loop().call_later(_SETTLE_S, self._settle)

    async def _run(self, pool: ThreadPool, work: Callable[..., Any], *arguments: Any) -> Any:
        return await result_of(lambda: pool.submit(work, *arguments))

    async def _file(self, exchange: HttpExchange, file: str) -> Reply:
        return self._parts.static.answer(exchange, file)

    async def _session(self, exchange: HttpExchange) -> Reply:
        options, access = self._parts.options, self._parts.access
        user = access.user(exchange)
        found: dict[str, Any] = {"tokens": access.takes_login, "policy": options.policy}
        if user is not None:
            found |= {
                "user": user.name,
                "role": "admin" if user.allows(Need.SETTINGS, EVERY_MODEL) else "viewer",
                "read": user.allows(Need.READ, EVERY_MODEL),
                "logged_in": bool(user.peer.credential),
                "control": options.allow_control and user.allows(Need.CONTROL),
                "infer": options.allow_infer and user.allows(Need.INFER),
                "switches": {"control": options.allow_control, "infer": options.allow_infer},
            }
        return json_reply(found)

    async def _log_in(self, exchange: HttpExchange) -> Reply:
        token = (await _json(exchange)).get("token")
        if not isinstance(token, str):
            raise InvalidArgumentError("token must be a text")
        cookies = self._parts.access.log_in(exchange, token.strip())
        return Reply(200, [JSON, *((b"set-cookie", each.encode()) for each in cookies)], b"{}")

    async def _log_out(self, exchange: HttpExchange) -> Reply:
        cookie = self._parts.access.log_out(exchange.fields)
        return Reply(200, [JSON, (b"set-cookie", cookie.encode())], b"{}")

    async def _traces(self, exchange: HttpExchange, user: User) -> Reply:
        sampling = self._parts.sampling
        sampling.settle()
        settings = sampling.settings.settings()
        head = orjson.dumps(
            {"level": settings["trace_level"], "mode": settings["trace_mode"], "sampling": sampling.state()}
        )
        return Reply(200, [JSON], [head[:-1], b',"traces":[', b",".join(self._parts.traces.newest()), b"]}"])

    async def _logs(self, exchange: HttpExchange, user: User) -> Reply:
        logs = self._parts.logs
        return json_reply({"line": logs.count, "records": logs.newest(_LOG_LINES)})

    async def _infer(self, exchange: HttpExchange, user: User, model: str, version: str) -> None:
        await self._parts.infer(exchange, user.grant.name, model, version)

    async def _chat_models(self, exchange: HttpExchange, user: User) -> Reply:
        models = () if self._parts.chat is None else await self._parts.chat.models()
        return json_reply({"models": [each._asdict() for each in models]})

    async def _chat(self, exchange: HttpExchange, user: User, model: str) -> None:
        if self._parts.chat is None:
            raise UnsupportedError("this server has no chats: it serves no routes of OpenAI")
        await self._parts.chat.answer(exchange, model)

    async def _live(self, exchange: HttpExchange, user: User) -> None:
        """Streams to one viewer until it leaves, falls behind, may not read any more, or the server stops."""
        query = parse_qs(exchange.query)
        feed = self._parts.feed
        viewer = feed.join(query.get("model", [""])[-1], query.get("logs") == ["1"], self._parts.chat)
        task = asyncio.current_task()
        assert task is not None
        viewer.on_dropped = task.cancel  # it waits for the client to read, and the connection ends with it
        try:
            exchange.on_disconnect = viewer.end
            exchange.begin_response(200, EVENT_STREAM, b":\n\n")
            while text := await viewer.take():
                try:
                    user = self._parts.access.renew(exchange, user)
                except ConchError:  # audited; the page hears why when it asks again
                    break
                await exchange.send(text)
                if exchange.lost:
                    return
            if not exchange.lost:
                exchange.end()
        finally:
            feed.leave(viewer)


def _nothing() -> None:
    """Takes no step: most changes need no further step."""


class ConsoleApp:
    """Answers all requests of the console."""

    def __init__(self, parts: ConsoleParts) -> None:
        self._access = parts.access
        # The routes check origins themselves, as a console may have names besides addresses.
        self._routes = RouteTable(ConsoleRoutes(parts).table(), checks_origin=False)

    def __call__(self, exchange: HttpExchange) -> Coroutine[Any, Any, None] | None:
        """Answers a request, or returns a coroutine that does."""
        exchange.extra_headers = _API_HEADERS if exchange.path.startswith("/api/") else _HEADERS
        try:
            self._access.check_host(exchange.header_values("host"))
        except ConchError as error:
            exchange.respond(*error_reply(error))
            return None
        return self._routes(exchange)


async def _json(exchange: HttpExchange) -> Mapping[str, Any]:
    """The JSON object of a small body; empty without a body. Raises InvalidArgumentError: it is none."""
    try:
        body = await read_body(exchange, _BODY_BYTES)
    except InvalidArgumentError as error:
        kind = UnreadBodyError if isinstance(error, UnreadBodyError) else InvalidArgumentError
        raise kind(f"the body may have {_BODY_BYTES} bytes, in few chunks") from None
    try:
        found = orjson.loads(body) if body else {}
    except ValueError as error:
        raise InvalidArgumentError(f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidArgumentError("the body must be a JSON object")
    return found
