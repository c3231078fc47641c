"""OpenAI's routes by vLLM's own layer: its ASGI application, called with the bodies of requests."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from types import SimpleNamespace
from typing import Any

from .answer import VllmAnswer, texts
from .engine_setup import AbsentError, Engine, SetupError, call, find

ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/rerank",
    "/v1/score",
    "/tokenize",
    "/detokenize",
)
"""vLLM's application has others, such as for profiling and scaling, which nothing may reach."""

_ENTRY = "vllm.entrypoints.launchers.api_server.entry"
_OLD_ENTRY = "vllm.entrypoints.openai.api_server"


class NativeRoutes:
    """vLLM's application for one engine.

    Raises:
        AbsentError: A function that it takes is missing.
        SetupError: vLLM refuses a setting of ``openai.json``.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._build = _needed("build_app")
        self._init_state = _needed("init_app_state")
        self._arguments = _arguments(engine)
        self._app: Any = None
        self._paths: frozenset[str] = frozenset()

    def has(self, route: str) -> bool:
        """True if the model has a route."""
        return route in self._paths

    async def open(self) -> None:
        """Makes the application; the engine has started."""
        engine, arguments = self._engine, self._arguments
        client = engine.client
        # What the engine has made of its arguments, such as defaults that depend on the model.
        for field in dataclasses.fields(engine.arguments):
            setattr(arguments, field.name, getattr(engine.arguments, field.name))
        model = {"supported_tasks": engine.tasks, "model_config": client.model_config}
        app = call(self._build, arguments, **model)
        await call(self._init_state, client, app.state, arguments, supported_tasks=engine.tasks)
        app.state.server = SimpleNamespace(should_exit=False)  # its handler of a dead engine sets it
        self._app = app
        self._paths = frozenset(ROUTES) & {getattr(each, "path", "") for each in app.routes}

    async def serve(
        self, route: str, body: bytes, request_id: str, answer: VllmAnswer, gone: asyncio.Event
    ) -> None:
        """Responds with the pieces of the HTTP response; aborts the request once `gone` is set."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": route,
            "raw_path": route.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": _headers(body, request_id),
            "client": None,
            "server": ("conch", 80),
            "state": {},
        }
        exchange = _Exchange(self._engine, body, answer, gone)
        await self._app(scope, exchange.receive, exchange.send)


class _Exchange:
    """One request of the application, as ASGI's two functions."""

    def __init__(self, engine: Engine, body: bytes, answer: VllmAnswer, gone: asyncio.Event) -> None:
        self._engine = engine
        self._body: bytes | None = body
        self._answer = answer
        self._gone = gone
        self._head: dict[str, bool | int | str] | None = None

    async def receive(self) -> dict[str, Any]:
        """The body, then the client's leaving."""
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        """Sends a piece; the head goes with the first one."""
        if message["type"] == "http.response.start":
            types = [value for name, value in message["headers"] if name == b"content-type"]
            self._head = {"http_status": message["status"]}
            self._head["content_type"] = (types[0] if types else b"application/json").decode("latin-1")
        elif message["type"] == "http.response.body" and not self._engine.dead:
            body, last = message.get("body", b""), not message.get("more_body", False)
            head, self._head = self._head, None
            if body or head is not None:
                await self._answer.send({"text_output": texts([bytes(body)])}, last, head)
            elif last:
                await self._answer.end()


def _headers(body: bytes, request_id: str) -> list[tuple[bytes, bytes]]:
    return [
        (b"host", b"conch"),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", request_id.encode()),
    ]


def _needed(name: str) -> Any:
    found = find(f"{_ENTRY}:{name}", f"{_OLD_ENTRY}:{name}")
    if found is None:
        raise AbsentError(f"this version of vLLM has no '{name}'")
    return found


def _arguments(engine: Engine) -> Any:
    """Arguments of vLLM's server, as its command line would give them."""
    make = find(
        "vllm.entrypoints.launchers.cli_args:make_arg_parser",
        "vllm.entrypoints.openai.cli_args:make_arg_parser",
    )
    parser_class = find(
        "vllm.utils.argparse_utils:FlexibleArgumentParser", "vllm.utils:FlexibleArgumentParser"
    )
    if make is None or parser_class is None:
        raise AbsentError("this version of vLLM has no parser of its server's arguments")
    engines = {field.name for field in dataclasses.fields(engine.arguments)}
    flags: list[str] = []
    for key, value in engine.files.openai.items():
        if key not in engines:
            flags += _flag(key, value)
    modules = [f"{name}={path}" for name, path in (engine.files.adapters or {}).items()]
    if modules and "lora_modules" not in engine.files.openai:
        flags += ["--lora-modules", *modules]
    parser = make(parser_class())

    def refuse(message: str) -> None:
        raise SetupError(f"vLLM refuses a setting of 'openai.json': {message}")

    parser.error = refuse
    arguments = parser.parse_args(flags)
    check = find(
        "vllm.entrypoints.launchers.cli_args:validate_parsed_serve_args",
        "vllm.entrypoints.openai.cli_args:validate_parsed_serve_args",
    )
    if check is not None:
        try:
            check(arguments)
        except (TypeError, ValueError) as error:
            refuse(str(error))
    return arguments


def _flag(key: str, value: Any) -> list[str]:
    name = f"--{key.replace('_', '-')}"
    if isinstance(value, bool):
        return [name] if value else []
    if isinstance(value, list):
        return [name, *(each if isinstance(each, str) else json.dumps(each) for each in value)]
    return [name, value if isinstance(value, str) else json.dumps(value)]
