"""The schemas of the OpenAPI document. Used by: `openapi`."""

from __future__ import annotations

from typing import Any

_Schema = dict[str, Any]

_STRING: _Schema = {"type": "string"}
_BOOLEAN: _Schema = {"type": "boolean"}
_NATURAL: _Schema = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}
_PARAMETERS: _Schema = {
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
                    parameters=_PARAMETERS,
                )
            )
        },
        id=_STRING,
        parameters=_PARAMETERS,
        outputs=_array(_object({"name": _STRING}, parameters=_PARAMETERS)),
    ),
    "InferResponse": _object(
        {
            "model_name": _STRING,
            "model_version": _STRING,
            "outputs": _array(_object(_TENSOR, data={"type": "array"}, parameters=_PARAMETERS)),
        },
        id=_STRING,
        parameters=_PARAMETERS,
    ),
    "GenerateRequest": {
        "type": "object",
        "description": "Inputs by name; everything else is a parameter, also among those of `parameters`.",
        "properties": {"id": _STRING, "parameters": {"type": "object"}},
    },
    "GenerateResponse": _object({"model_name": _STRING, "model_version": _STRING}, id=_STRING),
    "IndexRequest": _object({}, ready=_BOOLEAN),
    "Index": _array(
        _object(
            {"name": _STRING},
            version=_STRING,
            state={"enum": ["UNKNOWN", "READY", "UNAVAILABLE", "LOADING", "UNLOADING"]},
            reason=_STRING,
        )
    ),
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
"""By name."""
