"""The OpenAPI document of the REST front end: a table of its routes in words, beside the routing tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from conch.frontends.http.openapi_schemas import SCHEMAS
from conch.frontends.http.replies import json_reply
from conch.frontends.http.routing import ApiRoute, route

Operation = dict[str, Any]

_PARAMETERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "model": ("Name of the model, not percent-decoded.", {"type": "string", "pattern": "^[^/]+$"}),
    "version": ("Number of the version.", {"type": "string", "pattern": "^[0-9]+$"}),
    "region": ("Name of the region.", {"type": "string", "pattern": "^[^/]+$"}),
    "repository": (
        "Name of the repository; without effect on the index, else refused.",
        {"type": "string", "pattern": "^[^/]+$"},
    ),
}
_MEANINGS = {
    400: "The request is wrong, or what it asks whether it is so is not.",
    403: "The API is restricted, and the header that opens it is missing; or a page of another origin asks.",
    404: "There is no such model, version, region or path.",
    405: "The path has other methods.",
    429: "Too much waits already; try again later.",
    500: "The server, or the model, has failed, or the JSON has a value of the wrong type, as Triton has it.",
    501: "The server does not do that.",
    503: "The server, or the model, can't answer now, or the server is not set up to do that.",
}
_ALWAYS = (400, 403, 404, 405, 503)


def openapi_routes(version: str) -> list[ApiRoute]:
    """The route of the document.

    Args:
        version: Version of the server.
    """
    reply = document(version)

    async def openapi(request: Request) -> Response:
        return json_reply(reply)

    return [route("/openapi[.]json", ["GET"], "metadata", openapi)]


def document(version: str) -> dict[str, Any]:
    """The document.

    Args:
        version: Version of the server.
    """
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "conch",
            "version": version,
            "description": "Triton's HTTP protocol: KServe v2 with Triton's extensions.",
        },
        "paths": {path: _item(path, operations) for path, operations in _paths()},
        "components": {"schemas": SCHEMAS},
    }


def _item(path: str, operations: Mapping[str, Operation]) -> dict[str, Any]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    item: dict[str, Any] = {**operations}
    if names:
        item["parameters"] = [
            {"name": name, "in": "path", "required": True, "description": text, "schema": schema}
            for name in names
            for text, schema in (_PARAMETERS[name],)
        ]
    return item


def _paths() -> Iterator[tuple[str, dict[str, Operation]]]:
    """The table."""
    page = {"description": "Links to all of this.", "content": {"text/html": {}}}
    yield "/", {"get": _operation("A page for people", "metadata", page)}
    yield "/openapi.json", {"get": _operation("This document", "metadata", _json({"type": "object"}))}
    yield "/v2", {"get": _operation("Server metadata", "metadata", _named("ServerMetadata"))}
    for what in ("live", "ready"):
        yield f"/v2/health/{what}", {"get": _operation(f"Whether the server is {what}", "health", _EMPTY)}
    yield (
        "/v2/models/stats",
        {"get": _operation("Statistics of all models", "statistics", _named("Statistics"))},
    )
    for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        for suffix, operation in _of_models():
            yield path + suffix, operation
    for path in ("/v2/models/{model}/trace/setting", "/v2/trace/setting"):
        yield path, _setting("Trace settings", "trace", "TraceSettings", "TraceChanges")
    yield "/v2/logging", _setting("Log settings", "logging", "LogSettings", "LogChanges")
    for path in ("/v2/repository", "/v2/repository/{repository}"):
        for suffix, operation in _of_repositories():
            yield path + suffix, operation
    for kind, name in (("system", "System"), ("cuda", "Cuda")):
        for path in (f"/v2/{kind}sharedmemory", f"/v2/{kind}sharedmemory/region/{{region}}"):
            for suffix, operation in _of_regions(name):
                yield path + suffix, operation


def _of_models() -> Iterator[tuple[str, dict[str, Operation]]]:
    yield "", {"get": _operation("Model metadata", "metadata", _named("ModelMetadata"))}
    yield "/ready", {"get": _operation("Whether the model is ready", "health", _EMPTY)}
    yield "/config", {"get": _operation("Model configuration", "model-config", _named("ModelConfig"))}
    yield "/stats", {"get": _operation("Statistics of the model", "statistics", _named("Statistics"))}
    reply = {
        "description": "The response; with binary outputs behind its JSON if any are asked for.",
        "content": {**_named("InferResponse")["content"], "application/octet-stream": {}},
    }
    infer = _operation("Run the model", "inference", reply, "InferRequest", (429, 500, 501))
    infer["requestBody"]["content"]["application/octet-stream"] = {}
    yield "/infer", {"post": infer}
    generate = _operation(
        "Run the model with flat JSON",
        "inference",
        _named("GenerateResponse"),
        "GenerateRequest",
        (429, 500, 501),
    )
    yield "/generate", {"post": generate}
    events = {"description": "The responses as server-sent events.", "content": {"text/event-stream": {}}}
    stream = _operation(
        "Run the model with flat JSON and stream what it responds",
        "inference",
        events,
        "GenerateRequest",
        (429, 500, 501),
    )
    # What the model answers first decides the status also where the answer is an event.
    for status in (400, 404, 429, 500, 501, 503):
        stream["responses"][str(status)]["content"]["text/event-stream"] = {}
    yield "/generate_stream", {"post": stream}


def _of_repositories() -> Iterator[tuple[str, dict[str, Operation]]]:
    category = "model-repository"
    index = _operation("All models", category, _named("Index"), "IndexRequest", (500,), required=False)
    yield "/index", {"post": index}
    for action, text in (("load", "Load or reload a model"), ("unload", "Unload a model")):
        operation = _operation(
            text, category, _EMPTY, f"{action.title()}Request", (429, 500, 501), required=False
        )
        yield f"/models/{{model}}/{action}", {"post": operation}


def _of_regions(name: str) -> Iterator[tuple[str, dict[str, Operation]]]:
    category = "shared-memory"
    yield "/status", {"get": _operation(f"{name} regions", category, _named(f"{name}Regions"))}
    register = _operation(
        "Register a region", category, _EMPTY, f"{name}Registration", (429, 500, 501), required=True
    )
    yield "/register", {"post": register}
    yield (
        "/unregister",
        {"post": _operation("Unregister a region, or all of them", category, _EMPTY, None, (501,))},
    )


def _setting(text: str, category: str, schema: str, changes: str) -> dict[str, Operation]:
    return {
        "get": _operation(text, category, _named(schema)),
        "post": _operation(
            f"Change {text.lower()}", category, _named(schema), changes, (500, 501), required=False
        ),
    }


_EMPTY: dict[str, Any] = {"description": "Yes, or done."}


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": "The answer.", "content": {"application/json": {"schema": schema}}}


def _named(name: str) -> dict[str, Any]:
    return _json({"$ref": f"#/components/schemas/{name}"})


def _operation(
    summary: str,
    category: str,
    reply: Mapping[str, Any],
    body: str | None = None,
    statuses: tuple[int, ...] = (),
    required: bool = True,
) -> Operation:
    """One operation.

    Args:
        summary: What it does.
        category: What it belongs to, for restrictions.
        reply: Its response if all goes well.
        body: Name of the schema of its body; None for none.
        statuses: What else it may answer than what all may.
        required: Whether there has to be a body.
    """
    errors = {
        str(status): {"description": _MEANINGS[status], "content": dict(_named("Error")["content"])}
        for status in sorted({*_ALWAYS, *statuses})
    }
    operation: Operation = {"summary": summary, "tags": [category], "responses": {"200": reply, **errors}}
    if body is not None:
        operation["requestBody"] = {"required": required, "content": dict(_named(body)["content"])}
    return operation
