"""Adapts the table of operations to REST: reads requests, asks the door, sends JSON.

The page at ``/`` links to the endpoints and to pages of conch's documentation.

Threads and locks: endpoints run on the event loop; large bodies are parsed on `Pools`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path as FilePath
from typing import Any
from urllib.parse import quote

from conch.access.access_guard import UNGUARDED, AccessGuard
from conch.access.principals import ANY, Grant
from conch.core.admission import Admission
from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import ConchError, InvalidArgumentError
from conch.core.model_control import IndexEntry, LoadParameter
from conch.core.rollouts import RolloutReport
from conch.core.statistics_snapshot import VersionStatistics
from conch.door import operation_table as table
from conch.door.checked_operations import audit_failure
from conch.door.door import Door
from conch.door.operation_handlers import (
    CudaRegistration,
    LabelChange,
    LoadRequest,
    ModelMetadata,
    ModelRequest,
    RolloutChange,
    RolloutStart,
    SystemRegistration,
    TraceChanges,
    UnloadRequest,
    refuse_repository_name,
)
from conch.frontends import result_objects as results
from conch.frontends.http.generate.generate_route import generate_routes
from conch.frontends.http.http_exchange import ClientDisconnectError, HttpExchange, Reply
from conch.frontends.http.http_pools import Pools, result_of
from conch.frontends.http.http_routing import Route, RouteHandler
from conch.frontends.http.json_body import (
    JSON,
    MOST_BYTES,
    empty_reply,
    json_list,
    json_reply,
    parsed,
    read_body,
    read_settings,
    text_error,
)
from conch.frontends.http.jsontext.json_loader import load
from conch.frontends.http.jsontext.json_scanner import JsonSyntaxError
from conch.frontends.http.openapi import document
from conch.frontends.http.routes import operation_json as json

Path = Mapping[str, str]
"""The fields of a path template; optional ones may be empty."""


@dataclass(frozen=True, slots=True)
class _Form:
    """The HTTP form of one operation.

    Attributes:
        read: Reads the plain request.
        write: Writes the result, of a path, on the thread of the operation.
        check: Raises before the body is read.
    """

    operation: table.Operation[Any, Any]
    read: Callable[[HttpExchange, Path], Awaitable[Any]]
    write: Callable[[Any, Path], Reply]
    check: Callable[[Path], None] = lambda path: None


def api_routes(
    door: Door,
    pools: Pools,
    most_bytes: int = MOST_BYTES,
    clock: Clock = monotonic_ns,
    admission: Admission | None = None,
    guard: AccessGuard = UNGUARDED,
    console_url: Callable[[], str] = str,
) -> list[Route]:
    """Returns all routes but that of infer.

    Args:
        door: The core.
        pools: Pools for large bodies.
        most_bytes: Largest body of JSON.
        clock: Monotonic time in nanoseconds.
        admission: Admission of the front end; None for a new one.
        guard: Checks the callers of the port.
        console_url: Gives the console's URL; empty while it is not open.
    """
    reply = document(door.version)

    async def openapi(exchange: HttpExchange) -> Reply:
        return json_reply(reply)

    endpoints: dict[str, RouteHandler] = {
        table.HOME_PAGE.name: home_endpoint(door, pools, console_url),
        table.OPENAPI.name: openapi,
        table.DOCS_PAGE.name: docs_endpoint(pools),
    }
    for form in _forms(door, pools, most_bytes, guard):
        endpoints[form.operation.name] = _endpoint(form, door, guard)
    return [*generate_routes(door, pools, most_bytes, clock, admission), *_routes(endpoints)]


def _check_repository(path: Path) -> None:
    refuse_repository_name(path["repository"])


def _routes(endpoints: Mapping[str, RouteHandler]) -> list[Route]:
    """Returns one route for each path template, in the order of the table."""
    templates: dict[str, dict[str, table.Endpoint]] = {}
    for entry in table.ENDPOINTS:
        if entry.name in endpoints:
            for template in entry.paths:
                templates.setdefault(template, {})[entry.http_method] = entry

    def dispatched(by_method: Mapping[str, table.Endpoint]) -> RouteHandler:
        if len(by_method) == 1:
            (entry,) = by_method.values()
            return endpoints[entry.name]

        def dispatch(exchange: HttpExchange, **path: str) -> Coroutine[Any, Any, Reply | None] | None:
            return endpoints[by_method[exchange.method].name](exchange, **path)

        return dispatch

    return [
        Route(
            re.compile(table.path_pattern(template)),
            tuple(by_method),
            next(iter(by_method.values())).access,
            dispatched(by_method),
        )
        for template, by_method in templates.items()
    ]


def _endpoint(form: _Form, door: Door, guard: AccessGuard) -> RouteHandler:
    async def answer(exchange: HttpExchange, **path: str) -> Reply:
        try:
            form.check(path)
            door.check(form.operation, path.get("model", ""))
        except ConchError as error:
            audit_failure(form.operation, guard, exchange, path.get("model", ""), error)
            raise
        plain = await form.read(exchange, path)

        def begin() -> Future[Reply]:
            if exchange.lost:
                raise ClientDisconnectError
            future = door.ask(
                form.operation,
                lambda: plain,
                lambda result: form.write(result, path),
                exchange,
                guard,
                exchange.size,
            )
            exchange.on_disconnect = future.cancel  # what waits leaves the queue
            return future

        return await result_of(begin)

    return answer


def _forms(door: Door, pools: Pools, most_bytes: int, guard: AccessGuard) -> list[_Form]:
    async def body_of(exchange: HttpExchange, required: bool = False) -> Any:
        return await read_settings(exchange, pools, most_bytes, required)

    async def index(exchange: HttpExchange, path: Path) -> bool:
        return json.ready_only(await body_of(exchange))

    async def load_model(exchange: HttpExchange, path: Path) -> LoadRequest:
        names = (name.decode("latin-1") for name in exchange.fields)
        may_upload = guard.may_upload(exchange.client, names)
        body = await read_body(exchange, most_bytes)
        parameters = await parsed(exchange, pools, _load_parameters, body) if body else {}
        return LoadRequest(path["model"], parameters, may_upload)

    async def unload_model(exchange: HttpExchange, path: Path) -> UnloadRequest:
        return UnloadRequest(path["model"], json.unload_dependents(await body_of(exchange)))

    async def own_body_of(exchange: HttpExchange) -> Any:
        try:
            return await body_of(exchange)
        except JsonSyntaxError as error:  # INTERNAL, as in Triton, is for Triton's routes
            raise InvalidArgumentError(error.message) from None

    async def label_change(exchange: HttpExchange, path: Path) -> LabelChange:
        version = json.label_version(await own_body_of(exchange))
        return LabelChange(path["model"], path["label"], version)

    async def log_changes(exchange: HttpExchange, path: Path) -> Any:
        return json.log_changes(await body_of(exchange))

    async def trace_changes(exchange: HttpExchange, path: Path) -> TraceChanges:
        return TraceChanges(path.get("model", ""), json.trace_changes(await body_of(exchange)))

    async def system_registration(exchange: HttpExchange, path: Path) -> SystemRegistration:
        body = await body_of(exchange, required=True)
        return SystemRegistration(path["region"], *json.system_registration(body))

    async def cuda_registration(exchange: HttpExchange, path: Path) -> CudaRegistration:
        body = await body_of(exchange, required=True)
        return CudaRegistration(path["region"], *json.cuda_registration(body))

    def check_registration(path: Path, kind: str) -> None:
        if not path["region"]:
            raise InvalidArgumentError(f"'region name' is necessary to register {kind} shared memory region")

    return [
        _Form(
            table.SERVER_METADATA, _nothing, lambda server, path: json_reply(results.server_object(server))
        ),
        _Form(table.SERVER_LIVE, _nothing, lambda live, path: _status({"live": live}, live)),
        _Form(table.SERVER_READY, _nothing, lambda ready, path: _status({"ready": ready}, ready)),
        _Form(table.ALL_STATISTICS, _model, _statistics),
        _Form(table.MODEL_METADATA, _model, _metadata),
        _Form(table.MODEL_READY, _model, _model_status),
        _Form(table.MODEL_CONFIG, _model, lambda spec, path: json_reply(spec.config)),
        _Form(table.MODEL_STATISTICS, _model, _statistics),
        _Form(table.TRACE_SETTINGS, _traced_model, _trace),
        _Form(table.UPDATE_TRACE_SETTINGS, trace_changes, _trace),
        _Form(table.LOG_SETTINGS, _nothing, _settings),
        _Form(table.UPDATE_LOG_SETTINGS, log_changes, _settings),
        _Form(table.REPOSITORY_INDEX, index, _index),
        _Form(table.LOAD_MODEL, load_model, _done, _check_repository),
        _Form(table.UNLOAD_MODEL, unload_model, _done, _check_repository),
        _Form(table.SET_LABEL, label_change, _done, _check_repository),
        _Form(table.REMOVE_LABEL, _label, _done, _check_repository),
        *_rollout_forms(own_body_of),
        _Form(table.SYSTEM_REGIONS, _region, _list_of(results.system_region_object)),
        _Form(table.REGISTER_SYSTEM, system_registration, _done, partial(check_registration, kind="system")),
        _Form(table.UNREGISTER_SYSTEM, _region, _done),
        _Form(table.CUDA_REGIONS, _region, _list_of(results.cuda_region_object)),
        _Form(table.REGISTER_CUDA, cuda_registration, _done, partial(check_registration, kind="cuda")),
        _Form(table.UNREGISTER_CUDA, _region, _done),
    ]


def _rollout_forms(body_of: Callable[[HttpExchange], Awaitable[Any]]) -> list[_Form]:
    async def named(exchange: HttpExchange, path: Path) -> str:
        refuse_repository_name(path["repository"])
        return path["model"]

    async def start(exchange: HttpExchange, path: Path) -> RolloutStart:
        return RolloutStart(path["model"], *json.rollout_start(await body_of(exchange)))

    async def change(exchange: HttpExchange, path: Path) -> RolloutChange:
        weight = json.rollout_weight(await body_of(exchange))
        return RolloutChange(path["model"], path["action"], weight)

    async def delete(exchange: HttpExchange, path: Path) -> RolloutChange:
        return RolloutChange(path["model"], "delete")

    def reply(report: RolloutReport, path: Path) -> Reply:
        return json_reply(report.as_object())

    return [
        _Form(table.GET_ROLLOUT, named, reply),
        _Form(table.START_ROLLOUT, start, reply, _check_repository),
        _Form(table.UPDATE_ROLLOUT, change, reply, _check_repository),
        _Form(table.DELETE_ROLLOUT, delete, reply, _check_repository),
    ]


async def _nothing(exchange: HttpExchange, path: Path) -> None:
    """Reads a request without fields."""


async def _model(exchange: HttpExchange, path: Path) -> ModelRequest:
    return ModelRequest(path.get("model", ""), path.get("version", ""))


async def _label(exchange: HttpExchange, path: Path) -> LabelChange:
    return LabelChange(path["model"], path["label"])


async def _traced_model(exchange: HttpExchange, path: Path) -> str:
    return path.get("model", "")


async def _region(exchange: HttpExchange, path: Path) -> str:
    return path["region"]


def _metadata(metadata: ModelMetadata, path: Path) -> Reply:
    return json_reply(results.metadata_object(metadata))


def _status(status: Mapping[str, object], passed: bool) -> Reply:
    return json_reply(status, 200 if passed else 400)


def _model_status(ready: bool, path: Path) -> Reply:
    return _status({"name": path["model"], "ready": ready}, ready)


def _done(result: None, path: Path) -> Reply:
    return empty_reply()


def _settings(settings: Any, path: Path) -> Reply:
    return json_reply(settings)


def _trace(settings: Mapping[str, Sequence[str]], path: Path) -> Reply:
    return json_reply(json.trace_object(settings))


def _statistics(models: list[VersionStatistics], path: Path) -> Reply:
    return Reply(200, [JSON], b'{"model_stats":%b}' % json_list(models, results.statistics_object))


def _index(entries: list[IndexEntry], path: Path) -> Reply:
    return Reply(200, [JSON], json_list(entries, json.entry_object))


def _list_of(convert: Callable[[Any], Any]) -> Callable[[list[Any], Path], Reply]:
    return lambda items, path: json_reply([convert(item) for item in items])


def _load_parameters(body: memoryview) -> dict[str, LoadParameter]:
    return json.load_parameters(load(body))


_HTML = (b"content-type", b"text/html; charset=utf-8")
_TEXT = (b"content-type", b"text/plain; charset=utf-8")
_PACKAGE = FilePath(__file__).parents[3]
_PAGE = re.compile(r"[a-z-]+\.md")
_SERVER = (
    ("/v2/health/live", "live"),
    ("/v2/health/ready", "ready"),
    ("/v2", "metadata"),
    ("/v2/models/stats", "statistics"),
    ("/openapi.json", "OpenAPI"),
)
_DOCS = (
    ("/docs/index.md", "conch"),
    ("/docs/protocol.md", "what it serves of the protocols"),
    ("/docs/clients.md", "clients"),
    ("/docs/python-models.md", "Python models"),
    ("/docs/settings.md", "settings"),
    ("/docs/operations.md", "operation"),
    ("https://github.com/kserve/open-inference-protocol", "the protocol"),
    (
        "https://github.com/triton-inference-server/server/tree/main/docs/protocol",
        "its extensions",
    ),
)
_OF_MODELS = (("/ready", "ready"), ("", "metadata"), ("/config", "config"), ("/stats", "statistics"))


def home_endpoint(door: Door, pools: Pools, console_url: Callable[[], str]) -> RouteHandler:
    """Returns the endpoint of the page."""

    def made(grant: Grant | None) -> Reply:
        models = [
            (model.spec.name, number)
            for _, entry in sorted(door.models.entries.items())
            for number, model in sorted(entry.ready.items())
            if grant is None or grant.principal.allows(ANY, model.spec.name)
        ]
        return Reply(200, [_HTML], page(door.server_id, door.version, models, console_url()).encode())

    async def home(exchange: HttpExchange) -> Reply:
        door.check_running()
        return await result_of(partial(pools.parsing.submit, made, exchange.access))

    return home


def docs_endpoint(pools: Pools) -> RouteHandler:
    """Returns the endpoint of the pages of conch's documentation."""

    async def docs(exchange: HttpExchange, page: str) -> Reply:
        content = await result_of(partial(pools.parsing.submit, _docs_page, page))
        if content is None:
            return text_error(f"there is no page '{page}'; /docs/index.md is the first one", 404)
        return Reply(200, [_TEXT], content)

    return docs


def _docs_page(page: str) -> bytes | None:
    """A page; None if there is none of the name, or none at all."""
    if _PAGE.fullmatch(page):
        # A wheel has them inside the package, a checkout at its root.
        for directory in (_PACKAGE / "docs", _PACKAGE.parents[1] / "docs"):
            try:
                return (directory / page).read_bytes()
            except OSError:
                continue
    return None


def page(server: str, version: str, models: list[tuple[str, int]], console: str = "") -> str:
    """Returns the page; `models` are names and versions, `console` is the console's URL or empty."""
    server_links = [*_SERVER, (console, "console")] if console else _SERVER
    title = f"{escape(server)} (conch {escape(version)})"
    lines = [_model_links(name, number) for name, number in models] or ["no model is loaded"]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head><body>\n'
        f"<h1>{title}</h1>\n"
        f"<h2>Server</h2>\n{_list([_link(*each) for each in server_links])}"
        f"<h2>Models</h2>\n{_list(lines)}"
        f"<h2>Documentation</h2>\n{_list([_link(*each) for each in _DOCS])}"
        f"</body></html>\n"
    )


def _model_links(name: str, version: int) -> str:
    path = f"/v2/models/{quote(name, safe='')}/versions/{version}"
    text = f"{escape(name)}, version {version}"
    return ": ".join((text, ", ".join(_link(path + suffix, what) for suffix, what in _OF_MODELS)))


def _link(address: str, text: str) -> str:
    return f'<a href="{escape(address)}">{escape(text)}</a>'


def _list(lines: list[str]) -> str:
    return "<ul>\n" + "".join(f"<li>{line}</li>\n" for line in lines) + "</ul>\n"
