"""Builds the OpenAPI document of the REST front end from the table of endpoints.

Paths, methods, categories and summaries come from the table; this module adds bodies, responses and statuses.
Used by: `api_routes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from conch.frontends.http.openapi_schemas import SCHEMAS
from conch.frontends.operations import operation_table as table
from conch.frontends.operations.operation_table import ENDPOINTS, Endpoint, path_variants

_PARAMETERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "model": ("Name of the model, not percent-decoded.", {"type": "string", "pattern": "^[^/]+$"}),
    "version": ("Number of the version.", {"type": "string", "pattern": "^[0-9]+$"}),
    "page": ("Name of the page, such as index.md.", {"type": "string", "pattern": "^[^/]+$"}),
    "region": ("Name of the region.", {"type": "string", "pattern": "^[^/]+$"}),
    "repository": (
        "Name of the repository; without effect on the index, else refused.",
        {"type": "string", "pattern": "^[^/]+$"},
    ),
}
_MEANINGS = {
    400: "The request is wrong, or what it asks whether it is so is not.",
    401: "The server has an access policy, and the request no valid credentials.",
    403: "The API is restricted, and the header that opens it is missing; or a page of another origin asks; "
    "or the access policy gives the caller no role for this.",
    404: "There is no such model, version, region, page or path.",
    405: "The path has other methods.",
    429: "Too much waits already, or the caller is over a limit of the access policy; try again later.",
    500: "The server, or the model, has failed, or the JSON has a value of the wrong type, as Triton has it.",
    501: "The server does not do that.",
    503: "The server, or the model, can't answer now, or the server is not set up to do that.",
}
_ALWAYS = (400, 401, 403, 404, 405, 429, 503)
_INFER_STATUSES = (500, 501)
_BINARY: dict[str, Any] = {"application/octet-stream": {}}


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": "The answer.", "content": {"application/json": {"schema": schema}}}


def _named(name: str) -> dict[str, Any]:
    return _json({"$ref": f"#/components/schemas/{name}"})


@dataclass(frozen=True, slots=True)
class _Contents:
    """The bodies of an endpoint.

    Attributes:
        reply: The response with status 200.
        body: Name of the schema of the request body; None for none.
        statuses: Error statuses besides those of all endpoints.
        required: Whether the request must have a body.
        binary: Whether bodies may carry binary tensors behind the JSON.
        events: Statuses of which the error may be a server-sent event.
    """

    reply: Mapping[str, Any]
    body: str | None = None
    statuses: tuple[int, ...] = ()
    required: bool = True
    binary: bool = False
    events: tuple[int, ...] = ()


_EMPTY = {"description": "Yes, or done."}
_CONTENTS: Mapping[Endpoint, _Contents] = {
    table.HOME_PAGE: _Contents({"description": "Links to all of this.", "content": {"text/html": {}}}),
    table.OPENAPI: _Contents(_json({"type": "object"})),
    table.DOCS_PAGE: _Contents({"description": "Markdown.", "content": {"text/plain": {}}}, statuses=(404,)),
    table.SERVER_METADATA: _Contents(_named("ServerMetadata")),
    table.SERVER_LIVE: _Contents(_EMPTY),
    table.SERVER_READY: _Contents(_EMPTY),
    table.ALL_STATISTICS: _Contents(_named("Statistics")),
    table.MODEL_METADATA: _Contents(_named("ModelMetadata")),
    table.MODEL_READY: _Contents(_EMPTY),
    table.MODEL_CONFIG: _Contents(_named("ModelConfig")),
    table.MODEL_STATISTICS: _Contents(_named("Statistics")),
    table.INFER: _Contents(
        {
            "description": "The response; with binary outputs behind its JSON if any are asked for.",
            "content": {**_named("InferResponse")["content"], **_BINARY},
        },
        "InferRequest",
        _INFER_STATUSES,
        binary=True,
    ),
    table.GENERATE: _Contents(_named("GenerateResponse"), "GenerateRequest", _INFER_STATUSES),
    # The first response decides the status, also if the body is an event.
    table.GENERATE_STREAM: _Contents(
        {"description": "The responses as server-sent events.", "content": {"text/event-stream": {}}},
        "GenerateRequest",
        _INFER_STATUSES,
        events=(400, 404, 429, 500, 501, 503),
    ),
    table.TRACE_SETTINGS: _Contents(_named("TraceSettings")),
    table.UPDATE_TRACE_SETTINGS: _Contents(
        _named("TraceSettings"), "TraceChanges", (500, 501), required=False
    ),
    table.LOG_SETTINGS: _Contents(_named("LogSettings")),
    table.UPDATE_LOG_SETTINGS: _Contents(_named("LogSettings"), "LogChanges", (500, 501), required=False),
    table.REPOSITORY_INDEX: _Contents(_named("Index"), "IndexRequest", (500,), required=False),
    table.LOAD_MODEL: _Contents(_EMPTY, "LoadRequest", (429, 500, 501), required=False),
    table.UNLOAD_MODEL: _Contents(_EMPTY, "UnloadRequest", (429, 500, 501), required=False),
    table.SYSTEM_REGIONS: _Contents(_named("SystemRegions")),
    table.REGISTER_SYSTEM: _Contents(_EMPTY, "SystemRegistration", (500, 501)),
    table.UNREGISTER_SYSTEM: _Contents(_EMPTY, statuses=(501,)),
    table.CUDA_REGIONS: _Contents(_named("CudaRegions")),
    table.REGISTER_CUDA: _Contents(_EMPTY, "CudaRegistration", (500, 501)),
    table.UNREGISTER_CUDA: _Contents(_EMPTY, statuses=(501,)),
}


def document(version: str) -> dict[str, Any]:
    """Returns the document; `version` is the server's."""
    paths: dict[str, dict[str, Any]] = {}
    for path, endpoint in _paths():
        paths.setdefault(path, {})[endpoint.http_method.lower()] = _operation(endpoint)
    for path, item in paths.items():
        names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        if names:
            item["parameters"] = [
                {"name": name, "in": "path", "required": True, "description": text, "schema": schema}
                for name in names
                for text, schema in (_PARAMETERS[name],)
            ]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "conch",
            "version": version,
            "description": "Triton's HTTP protocol: KServe v2 with Triton's extensions.",
        },
        "paths": paths,
        "components": {"schemas": SCHEMAS},
    }


def _paths() -> Iterator[tuple[str, Endpoint]]:
    """Yields all paths; first those without an optional part, for each run of templates that share it."""
    templates = [(template, endpoint) for endpoint in ENDPOINTS for template in endpoint.paths]
    for _, run in groupby(templates, key=lambda entry: entry[0].partition("]")[0]):
        expanded = [[(path, endpoint) for path in path_variants(template)] for template, endpoint in run]
        for variants in zip(*expanded, strict=True):
            yield from variants


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    contents = _CONTENTS[endpoint]
    errors: dict[str, dict[str, Any]] = {
        str(status): {"description": _MEANINGS[status], "content": dict(_named("Error")["content"])}
        for status in sorted({*_ALWAYS, *contents.statuses})
    }
    for status in contents.events:
        errors[str(status)]["content"]["text/event-stream"] = {}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "tags": [endpoint.access],
        "responses": {"200": contents.reply, **errors},
    }
    if contents.body is not None:
        content = {**_named(contents.body)["content"], **(_BINARY if contents.binary else {})}
        operation["requestBody"] = {"required": contents.required, "content": content}
    return operation
