"""Requests to HTTP routes other than infer: what is refused, with status and text, and what is taken.

A body is sent as it is if it is bytes, else as JSON.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tests.support.contract_server import CASTER
from tests.support.servers import write_model

NOT_STRING = "attempt to access JSON non-string as string"
NOT_BOOLEAN = "attempt to access JSON non-boolean as boolean"
NOT_UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"
NOT_OBJECT = "attempt to get members for non-object"
EMPTY = "failed to parse the request JSON buffer: The document is empty. at 0"
INVALID = "failed to parse the request JSON buffer: Invalid value. at 0"
_REPOSITORY = "'repository_name' specification is not supported"
_NO_KEY = "Shared memory register request has no 'key' field"
_HANDLE = "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"
_MEMBER = "attempt to access non-existing object member '{}'"

Refused = list[tuple[Any, int, str]]
_BY_PATH: dict[str, Refused] = {
    "/v2/repository/index": [(b"x", 500, INVALID)],
    "/v2/repository/models/m/load": [
        (b"x", 500, INVALID),
        ({"parameters": 1}, 500, NOT_OBJECT),
        ({"parameters": None}, 500, NOT_OBJECT),
        ({"parameters": {"config": 1}}, 500, NOT_STRING),
        ({"parameters": {"foo": 1}}, 500, NOT_STRING),
        ({"parameters": {"foo": "x"}}, 500, "unexpected error on creating Triton parameter"),
    ],
    "/v2/repository/here/models/m/load": [(b"", 501, _REPOSITORY)],
    "/v2/repository/here/models/m/unload": [(b"", 501, _REPOSITORY)],
    "/v2/systemsharedmemory/register": [
        (
            {"key": "k", "byte_size": 8},
            400,
            "'region name' is necessary to register system shared memory region",
        )
    ],
    "/v2/systemsharedmemory/region/r/register": [
        (b"", 500, EMPTY),
        (b"x", 500, INVALID),
        ({}, 400, _NO_KEY),
        ([], 400, _NO_KEY),
        ({"key": 1}, 500, NOT_STRING),
        ({"key": "k"}, 400, "Shared memory register request has no 'byte_size' field"),
        *(({"key": "k", "byte_size": size}, 500, NOT_UNSIGNED) for size in (-1, 1.5, True, "a", 2**64)),
        *(({"key": "k", "byte_size": 1, "offset": offset}, 500, NOT_UNSIGNED) for offset in ("x", -1)),
        ({"key": "conch-none", "byte_size": 8}, 500, "Unable to open shared memory region: 'conch-none'"),
    ],
    "/v2/cudasharedmemory/region/r/register": [
        (b"", 500, EMPTY),
        (b"x", 500, INVALID),
        ({}, 400, "Shared memory register request has no 'raw_handle' field"),
        ({"raw_handle": 1}, 500, _MEMBER.format("b64")),
        ({"raw_handle": {}}, 500, _MEMBER.format("b64")),
        ({"raw_handle": {"b64": 1}}, 500, NOT_STRING),
        ({"raw_handle": {"b64": "!"}}, 500, _MEMBER.format("byte_size")),
        ({"raw_handle": {"b64": "!"}, "byte_size": 1}, 500, _MEMBER.format("device_id")),
        ({"raw_handle": {"b64": "!"}, "byte_size": 1, "device_id": -1}, 500, NOT_UNSIGNED),
        ({"raw_handle": {"b64": "!"}, "byte_size": 1, "device_id": 0}, 400, _HANDLE),
        ({"raw_handle": {"b64": "YWJj"}, "byte_size": 1, "device_id": 0}, 400, _HANDLE),
    ],
    "/v2/logging": [
        (b"x", 500, INVALID),
        ({"log_info": 1}, 500, NOT_BOOLEAN),
        ({"log_verbose_level": -1}, 500, NOT_UNSIGNED),
        ({"log_verbose_level": "1"}, 500, NOT_UNSIGNED),
        ({"log_format": 1}, 500, NOT_STRING),
        ({"log_format": "x"}, 503, "invalid argument for --log_format, got: x"),
        ({"log_file": "x"}, 501, "log file location can not be updated through network protocol"),
    ],
    "/v2/trace/setting": [
        (b"x", 500, INVALID),
        ({"trace_level": "OFF"}, 500, "attempt to access JSON non-array as array"),
        ({"trace_level": [1]}, 500, NOT_STRING),
        ({"trace_rate": 5}, 500, NOT_STRING),
        ({"trace_rate": "x"}, 400, "Unable to parse 'trace_rate', got: x"),
        ({"trace_file": "x"}, 501, "trace file location can not be updated through network protocol"),
        (
            {"trace_level": ["TIMESTAMPS"]},
            400,
            "Attempting to set invalid trace setting :trace file name is not given",
        ),
    ],
}
REFUSED = [(path, *case) for path, cases in _BY_PATH.items() for case in cases]
"""Posts to control routes of a server that has no model `none`: path, body, status and text."""

_UNLOAD = "/v2/repository/models/m/unload"
OWN_REFUSED: list[tuple[str, Any, int, str]] = [
    (_UNLOAD, {"parameters": {"unload_dependents": 1}}, 500, NOT_BOOLEAN),
    (_UNLOAD, {"parameters": 1}, 500, NOT_OBJECT),
    ("/v2/models/none/trace/setting", {}, 404, "Request for unknown model : none"),
]
"""The same, where Triton 2.51 answers otherwise."""

_TYPES = ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32",
          "FP64", "BYTES")  # fmt: skip


def write_generate(repository: Path) -> None:
    """Writes the model `generate`, which echoes its optional inputs: one of each type, `PAIR` and `ROWS`."""
    inputs = {
        **{kind: (kind.replace("BYTES", "STRING"), "-1") for kind in _TYPES},
        "PAIR": ("INT32", "2"),
        "ROWS": ("INT32", "-1, 2"),
    }
    config = 'backend: "python"\n' + "".join(
        f'input {{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims} ] optional: true }}\n'
        f'output {{ name: "O{name}" data_type: TYPE_{kind} dims: [ {dims} ] }}\n'
        for name, (kind, dims) in inputs.items()
    )
    write_model(repository, "generate", config, {"model.py": CASTER})


GENERATE: list[tuple[Any, tuple[int, ...], list[Any]]] = [
    ({"INT32": 7}, (1,), [7]),
    ({"INT32": [1, 2, 3]}, (3,), [1, 2, 3]),
    ({"INT32": []}, (0,), []),
    ({"INT32": [[1], [2]]}, (2,), [1, 2]),
    ({"PAIR": [1, 2]}, (2,), [1, 2]),
    ({"ROWS": [1, 2, 3, 4]}, (2, 2), [[1, 2], [3, 4]]),
    ({"UINT8": 300}, (1,), [44]),
    ({"INT8": -200}, (1,), [56]),
    ({"INT32": 99999999999}, (1,), [1215752191]),
    ({"UINT64": 2**64 - 1}, (1,), [2**64 - 1]),
    ({"INT64": -(2**63)}, (1,), [-(2**63)]),
    ({"FP32": 1}, (1,), [1.0]),
    ({"FP32": [1e300, -1.5]}, (2,), [math.inf, -1.5]),
    (b'{"FP64": [NaN, -Infinity]}', (2,), [math.nan, -math.inf]),
    ({"BOOL": [True, False]}, (2,), [True, False]),
    ({"BYTES": "\0ä😀"}, (1,), ["\0ä😀".encode()]),
    ({"BYTES": ["a", ""]}, (2,), [b"a", b""]),
]
"""Posts to generate: body, and the shape and values of the tensor."""
NO_PARAMETER = " has invalid type. It should be either 'int', 'bool', or 'string'."
GENERATE_REFUSED: Refused = [
    (b"", 500, "failed to parse the request JSON buffer: The document is empty. at 0"),
    (b"x", 500, "failed to parse the request JSON buffer: Invalid value. at 0"),
    (b'{"a":1}x', 500,
     "The document root must not be followed by other values. at 7"),
    (b'{"BYTES":"\\ud83d"}', 500, "The surrogate pair in string is invalid."),
    (b'{"FP64":1e400}', 500, "Number too big to be stored in double."),
    (b'{"FP64":[NaN],"BYTES":"\\ud83d"}', 500, "failed to parse the request JSON buffer"),
    (b"[]", 500, "attempt to get members for non-object"),
    ({"id": 5}, 500, "Unable to parse 'id': attempt to access JSON non-string as string"),
    ({"INT32": 1.0}, 500,
     "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
    ({"INT32": True}, 500, "non-signed-integer as signed-integer"),
    ({"INT32": None}, 500, "non-signed-integer as signed-integer"),
    ({"INT32": {}}, 500, "non-signed-integer as signed-integer"),
    ({"INT64": 2**63}, 500, "non-signed-integer as signed-integer"),
    ({"UINT8": -1}, 500, "non-unsigned-integer as unsigned-integer"),
    ({"BOOL": 1}, 500, "Unable to parse 'data': attempt to access JSON non-boolean as boolean"),
    ({"FP32": "1"}, 500, "Unable to parse 'data': attempt to access JSON non-number as double"),
    ({"BYTES": 1}, 500, "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
    ({"BYTES": {}}, 500, "Unable to parse JSON bytes array"),
    ({"FP16": 1}, 400,
     "receiving FP16 data via JSON is not supported. Please use the binary data format for input FP16"),
    ({"INT32": [[1, 2], [3]]}, 500,
     "Unable to parse 'data': Shape does not match true shape of 'data' field"),
    ({"INT32": [[], []]}, 500, "Failed to parse 'data' field: shape does not match true shape"),
    ({"PAIR": [1, 2, 3]}, 400, "The schema can not convert input 'PAIR' to tensor with proper shape"),
    ({"PAIR": []}, 400, "The schema can not convert input 'PAIR' to tensor with proper shape"),
    ({"ROWS": [1, 2, 3]}, 400, "The schema can not convert input 'ROWS' to tensor with proper shape"),
    (b'{"INT32":1,"INT32":2}', 400, "input 'INT32' already exists in request"),
    (b'{"id":"q","INT32":1,"INT32":2}', 400, "[request id: q] input 'INT32' already exists in request"),
    ({"INT32": 1, "parameters": {"INT32": 1}}, 400,
     "Converting keyword: 'parameters': input 'INT32' already exists"),
    ({"a": [1]}, 400, "parameter 'a'" + NO_PARAMETER),
    ({"a": None}, 400, "parameter 'a'" + NO_PARAMETER),
    ({"parameters": {"a": {}}}, 400, "Converting keyword: 'parameters': parameter 'a'" + NO_PARAMETER),
    ({"parameters": []}, 500,
     "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object"),
    (b'{"a":' + b"[" * 900 + b"]" * 900 + b"}", 400, "parameter 'a'" + NO_PARAMETER),
    (b'{"INT32":' + b"[" * 120 + b"]" * 120 + b"}", 400,
     "JSON nesting depth exceeds maximum allowed limit (100)"),
    (b'{"a":' + b"[" * 250000 + b"]" * 250000 + b"}", 400,
     "JSON nesting depth exceeds maximum allowed limit (100)"),
    (b'{"a":' * 2000 + b"1" + b"}" * 2000, 400, "JSON nesting depth exceeds maximum allowed limit (100)"),
    (b'{"a":1,"a":' + b"9" * 5000 + b"}", 500, "failed to parse the request JSON buffer"),
]  # fmt: skip
"""Posts to generate: body, status and a part of the text."""
