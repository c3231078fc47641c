"""Builds the OpenAPI document of the REST front end from the table of endpoints.

Paths, methods, categories and summaries come from the table; this module adds the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from conch.core.rollouts import ROLLOUT_ACTIONS
from conch.core.version_text import LABEL_PATTERN
from conch.door import operation_table as table
from conch.door.operation_table import ENDPOINTS, Endpoint, path_variants

_PARAMETERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "model": ("Name of the model, not percent-decoded.", {"type": "string", "pattern": "^[^/]+$"}),
    "version": (
        "Number of the version, or a label of the model.",
        {"type": "string", "pattern": f"^([0-9]+|{LABEL_PATTERN})$"},
    ),
    "action": ("What to do.", {"type": "string", "enum": list(ROLLOUT_ACTIONS)}),
    "label": ("The label.", {"type": "string", "pattern": f"^{LABEL_PATTERN}$"}),
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
    409: "A file declares the labels or the rollout of the model, or its state does not allow that.",
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
        required: True if the request must have a body.
        binary: True if bodies may carry binary tensors behind the JSON.
        events: Statuses of which the error may be a server-sent event.
        denies: True if a response with status 400 may have the same fields.
    """

    reply: Mapping[str, Any]
    body: str | None = None
    statuses: tuple[int, ...] = ()
    required: bool = True
    binary: bool = False
    events: tuple[int, ...] = ()
    denies: bool = False


_EMPTY = {"description": "Yes, or done."}
_CONTENTS: Mapping[Endpoint, _Contents] = {
    table.HOME_PAGE: _Contents({"description": "Links to all of this.", "content": {"text/html": {}}}),
    table.OPENAPI: _Contents(_json({"type": "object"})),
    table.DOCS_PAGE: _Contents({"description": "Markdown.", "content": {"text/plain": {}}}, statuses=(404,)),
    table.SERVER_METADATA: _Contents(_named("ServerMetadata")),
    table.SERVER_LIVE: _Contents(_named("Live"), denies=True),
    table.SERVER_READY: _Contents(_named("Ready"), denies=True),
    table.ALL_STATISTICS: _Contents(_named("Statistics")),
    table.MODEL_METADATA: _Contents(_named("ModelMetadata")),
    table.MODEL_READY: _Contents(_named("ModelReady"), denies=True),
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
    table.SET_LABEL: _Contents(_EMPTY, "LabelChange", (409, 500, 501)),
    table.REMOVE_LABEL: _Contents(_EMPTY, statuses=(409, 501)),
    table.GET_ROLLOUT: _Contents(_named("Rollout"), statuses=(500, 501)),
    table.START_ROLLOUT: _Contents(_named("Rollout"), "RolloutStart", (409, 429, 500, 501), required=False),
    table.UPDATE_ROLLOUT: _Contents(_named("Rollout"), "RolloutWeight", (409, 429, 500, 501), required=False),
    table.DELETE_ROLLOUT: _Contents(_named("Rollout"), statuses=(409, 429, 500, 501)),
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
    if contents.denies:
        schemas = [each["content"]["application/json"]["schema"] for each in (contents.reply, errors["400"])]
        errors["400"]["content"] = _json({"anyOf": schemas})["content"]
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "tags": [endpoint.access],
        "responses": {"200": contents.reply, **errors},
    }
    if contents.body is not None:
        content = {**_named(contents.body)["content"], **(_BINARY if contents.binary else {})}
        operation["requestBody"] = {"required": contents.required, "content": content}
    return operation


_Schema = dict[str, Any]

_STRING: _Schema = {"type": "string"}
_BOOLEAN: _Schema = {"type": "boolean"}
_NATURAL: _Schema = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}
_ANY_PARAMETERS: _Schema = {
    "type": "object",
    "additionalProperties": {"type": ["string", "boolean", "number"]},
}


def _object(required: dict[str, _Schema], **optional: _Schema) -> _Schema:
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


def _array(items: _Schema) -> _Schema:
    return {"type": "array", "items": items}


def _ref(name: str) -> _Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _or_null(kind: str, **more: Any) -> _Schema:
    return {"type": [kind, "null"], **more}


_DURATIONS: _Schema = {"type": "object", "additionalProperties": _ref("Duration")}
_TENSOR: _Schema = {"name": _STRING, "datatype": _ref("Datatype"), "shape": _array({"type": "integer"})}

SCHEMAS: dict[str, _Schema] = {
    "Error": _object({"error": _STRING}),
    "Datatype": {
        "enum": [
            "BOOL",
            "UINT8",
            "UINT16",
            "UINT32",
            "UINT64",
            "INT8",
            "INT16",
            "INT32",
            "INT64",
            "FP16",
            "FP32",
            "FP64",
            "BF16",
            "BYTES",
        ],
    },
    "ServerMetadata": _object({"name": _STRING, "version": _STRING, "extensions": _array(_STRING)}),
    "ModelMetadata": _object(
        {
            "name": _STRING,
            "versions": _array(_STRING),
            "platform": _STRING,
            "inputs": _array(_object(_TENSOR)),
            "outputs": _array(_object(_TENSOR)),
        }
    ),
    "ModelConfig": {"type": "object", "description": "Triton's ModelConfig as JSON, fields by proto name."},
    "Duration": _object({"count": _NATURAL, "ns": _NATURAL}),
    "ModelStatistics": _object(
        {
            "name": _STRING,
            "version": _STRING,
            "last_inference": _NATURAL,
            "inference_count": _NATURAL,
            "execution_count": _NATURAL,
            "inference_stats": _DURATIONS,
            "response_stats": {"type": "object", "additionalProperties": _DURATIONS},
            "batch_stats": _array(
                _object(
                    {
                        "batch_size": _NATURAL,
                        "compute_input": _ref("Duration"),
                        "compute_infer": _ref("Duration"),
                        "compute_output": _ref("Duration"),
                    }
                )
            ),
            "memory_usage": _array({"type": "object"}),
        }
    ),
    "Statistics": _object({"model_stats": _array(_ref("ModelStatistics"))}),
    "InferRequest": _object(
        {
            "inputs": _array(
                _object(
                    {**_TENSOR, "shape": _array(_NATURAL)},
                    data={"type": "array"},
                    parameters=_ANY_PARAMETERS,
                )
            )
        },
        id=_STRING,
        parameters=_ANY_PARAMETERS,
        outputs=_array(_object({"name": _STRING}, parameters=_ANY_PARAMETERS)),
    ),
    "InferResponse": _object(
        {
            "model_name": _STRING,
            "model_version": _STRING,
            "outputs": _array(_object(_TENSOR, data={"type": "array"}, parameters=_ANY_PARAMETERS)),
        },
        id=_STRING,
        parameters=_ANY_PARAMETERS,
    ),
    "GenerateRequest": {
        "type": "object",
        "description": "Inputs by name; everything else is a parameter, also among those of `parameters`.",
        "properties": {"id": _STRING, "parameters": {"type": "object"}},
    },
    "GenerateResponse": _object({"model_name": _STRING, "model_version": _STRING}, id=_STRING),
    "Live": _object({"live": _BOOLEAN}),
    "Ready": _object({"ready": _BOOLEAN}),
    "ModelReady": _object({"name": _STRING, "ready": _BOOLEAN}),
    "IndexRequest": _object({}, ready=_BOOLEAN),
    "Index": _array(
        _object(
            {"name": _STRING},
            version=_STRING,
            state={"enum": ["UNKNOWN", "READY", "UNAVAILABLE", "LOADING", "UNLOADING"]},
            reason=_STRING,
            labels=_array(_STRING),
            traffic={"type": "number", "minimum": 0, "maximum": 100},
        )
    ),
    "LabelChange": _object({"version": {"type": ["integer", "string"], "minimum": 1, "pattern": "^[0-9]+$"}}),
    "RolloutStart": _object(
        {},
        rollout={"type": "object", "description": "The table rollout of rollout.toml."},
        labels={"type": "object", "additionalProperties": _NATURAL},
        again=_BOOLEAN,
    ),
    "RolloutWeight": _object({}, weight={"type": "number", "minimum": 0, "maximum": 100}),
    "Rollout": {
        "type": "object",
        "required": ["model", "source", "id", "state", "weight"],
        "properties": {
            "model": _STRING,
            "source": {"enum": ["file", "api"]},
            "id": _NATURAL,
            "state": _STRING,
            "weight": {"type": "number", "minimum": 0, "maximum": 100},
            "sides": _array({"type": "object"}),
            "history": _array({"type": "object"}),
        },
    },
    "LoadRequest": _object(
        {},
        parameters={
            "type": "object",
            "properties": {"config": {**_STRING, "description": "A model config as JSON."}},
            "patternProperties": {"^file:": {**_STRING, "contentEncoding": "base64"}},
            "additionalProperties": False,
        },
    ),
    "UnloadRequest": _object({}, parameters=_object({}, unload_dependents=_BOOLEAN)),
    "SystemRegistration": _object({"key": _STRING, "byte_size": _NATURAL}, offset=_NATURAL),
    "SystemRegions": _array(
        _object({"name": _STRING, "key": _STRING, "offset": _NATURAL, "byte_size": _NATURAL})
    ),
    "CudaRegistration": _object(
        {
            "raw_handle": _object({"b64": {**_STRING, "contentEncoding": "base64"}}),
            "device_id": _NATURAL,
            "byte_size": _NATURAL,
        }
    ),
    "CudaRegions": _array(_object({"name": _STRING, "device_id": _NATURAL, "byte_size": _NATURAL})),
    "LogSettings": _object(
        {
            "log_file": _STRING,
            "log_info": _BOOLEAN,
            "log_warning": _BOOLEAN,
            "log_error": _BOOLEAN,
            "log_verbose_level": _NATURAL,
            "log_format": {"enum": ["default", "ISO8601"]},
        }
    ),
    "LogChanges": _object(
        {},
        log_info=_or_null("boolean"),
        log_warning=_or_null("boolean"),
        log_error=_or_null("boolean"),
        log_verbose_level=_or_null("integer", minimum=0, maximum=2**32 - 1),
        log_format={"enum": ["default", "ISO8601", None]},
    ),
    "TraceSettings": _object(
        {
            "trace_level": _array(_STRING),
            "trace_rate": _STRING,
            "trace_count": _STRING,
            "trace_mode": _STRING,
        },
        log_frequency=_STRING,
        trace_file=_STRING,
        url=_STRING,
        resource={"anyOf": [_STRING, _array(_STRING)]},
        bsp_max_queue_size=_STRING,
        bsp_schedule_delay=_STRING,
        bsp_max_export_batch_size=_STRING,
    ),
    "TraceChanges": _object(
        {},
        trace_level=_or_null("array", items=_STRING),
        trace_rate=_or_null("string"),
        trace_count=_or_null("string"),
        log_frequency=_or_null("string"),
    ),
}
"""Schemas by name."""
