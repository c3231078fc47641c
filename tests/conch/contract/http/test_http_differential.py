"""The same requests to a real Triton's REST port and to ours: status and body must be the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.cases import http_cases as cases
from tests.support.contract_server import CASTER, CASTER_CONFIG, REPEATER, REPEATER_CONFIG
from tests.support.peers import NEEDS_TRITON, agrees, triton_serving
from tests.support.servers import free_port, serving_process, write_model, write_probe

pytestmark = [*NEEDS_TRITON, pytest.mark.slow]

EXPLICIT = ["--model-control-mode=explicit", "--load-model=*"]
GETS = [
    "/v2/",
    "/v2/health",
    "/v2/health/live",
    "/v2/health/ready",
    "/v2/models",
    "/v2/models/stats",
    "/v2/models/probe",
    "/v2/models/versions",
    "/v2/models/versions/versions/1",
    "/v2/models/versions/versions/2",
    "/v2/models/none",
    "/v2/models/none/ready",
    "/v2/models/probe/ready",
    "/v2/models/probe/versions/9/ready",
    "/v2/models/probe/versions/99999999999999999999/ready",
    "/v2/models/probe/versions/0/stats",
    "/v2/models/probe/config",
    "/v2/models/batcher/config",
    "/v2/models/repeater/config",
    "/v2/models/none/config",
    "/v2/models/probe/stats",
    "/v2/models/none/stats",
    "/v2/models/probe/trace/setting",
    "/v2/trace/setting",
    "/v2/models/probe/versions/1/trace/setting",
    "/v2/logging",
    "/v2/repository/index",
    "/v2//health/live",
    "/v2/systemsharedmemory/status",
    "/v2/cudasharedmemory/status",
    "/v2/systemsharedmemory/region/x/status",
    "/v2/cudasharedmemory/region/x/status",
    "/v2/systemsharedmemory/register",
    "/v2/models/probe/infer",
    "/v2/models/probe/generate",
]
INDEX, LOAD = "/v2/repository/index", "/v2/repository/models/probe/load"
STRINGS: list[Any] = ["abc", ["a", "b"], 1, {}, [], "\0a😀"]
VALUES: list[Any] = ["s", 2, True, 1.5, [1], {}, None, 2**64 - 1]
NESTED: list[Any] = [{"a": 1}, {"a": [1]}, 1, {"FP32": 1.25}, {"INT32": 1}]
POSTS: list[tuple[str, list[Any]]] = [
    (INDEX, ["", {}, [], None, {"ready": True}, {"x": 1}]),
    ("/v2/repository/any/index", [""]),
    (LOAD, ["", {}, [], {"parameters": {}}, {"parameters": []}]),
    (LOAD, [{"parameters": {"config": "x"}}, {"parameters": {"file:1/x": "YWJj"}}]),
    ("/v2/repository/models/none/load", [""]),
    ("/v2/repository/models/none/unload", ["", {}, {"parameters": {"unload_dependents": True}}]),
    ("/v2/systemsharedmemory/unregister", ["", "garbage"]),
    ("/v2/cudasharedmemory/region/x/unregister", [""]),
    ("/v2/logging", [{}, [], {"log_file": None}, {"foo": 1}, {"log_format": "ISO8601"}]),
    ("/v2/trace/setting", [{}, {"trace_rate": "7"}, {"trace_rate": None}]),
]
INT = '{"INT32":'
_HEALTH = {"live", "ready"}
"""Bodies of health have these; Triton's are empty, or an error."""
NEWER = ("Failed to parse 'data' field", "JSON nesting depth")
"""Texts that are newer than Triton 2.51."""
GENERATE: list[Any] = [
    *("{}", "null", INT + "1}x", INT + "1"),
    *({"INT32": value} for value in ("a", -99999999999, [1, "a"])),
    *({"BYTES": value} for value in STRINGS),
    *('{"FP32":[NaN,1,Infinity]}', {"BOOL": True}),
    *({"FP32": 0.1}, {"INT32": 1, "id": "q"}, {"INT32": 1, "id": 5}),
    *({"INT32": 1, "x": value} for value in VALUES),
    *({"INT32": 1, "parameters": value} for value in NESTED),
    *(body for body, *_ in cases.GENERATE),
    *(body for body, _, text in cases.GENERATE_REFUSED if not text.startswith(NEWER)),
]
MORE = [
    ("/v2/models/batcher/generate", {"INT32": [1, 2, 3]}),
    ("/v2/models/batcher/generate", {"INT32": []}),
    ("/v2/models/none/generate", "x"),
    ("/v2/models/caster/versions/7/generate", "x"),
    ("/v2/models/repeater/generate", {"IN": 5}),
    ("/v2/models/repeater/generate", {}),
    ("/v2/models/repeater/generate_stream", {"IN": []}),
    ("/v2/models/repeater/generate_stream", {"IN": [1, 2], "id": "z"}),
    ("/v2/models/repeater/generate_stream", {"IN": "x"}),
]


@pytest.fixture
def both(tmp_path: Path) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Clients of Triton and of conch, with the same models."""
    repository = tmp_path
    write_probe(repository)
    write_probe(repository, "versions", "version_policy { all { } }", versions=(1, 3))
    write_model(repository, "repeater", REPEATER_CONFIG, {"model.py": REPEATER})
    write_model(repository, "caster", CASTER_CONFIG, {"model.py": CASTER})
    cases.write_generate(repository)
    batching = "max_batch_size: 4\ndynamic_batching { max_queue_delay_microseconds: 10 }\n"
    write_model(repository, "batcher", batching + CASTER_CONFIG, {"model.py": CASTER})
    port = free_port()
    with (
        serving_process(repository, flags=[*EXPLICIT, "--allow-model-upload"]) as server,
        triton_serving(repository, "--allow-http=true", f"--http-port={port}", *EXPLICIT),
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as theirs,
        httpx.Client(base_url=f"http://{server.http_address}") as ours,
    ):
        yield theirs, ours


def asked(client: httpx.Client, method: str, path: str, body: Any = "") -> tuple[int, Any]:
    """The status, and the body; what it says if it is JSON."""
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    reply = client.request(method, path, content=content)
    text = reply.text
    return reply.status_code, json.loads(text) if text[:1] in ("{", "[") else text


def error_of(answer: tuple[int, Any]) -> Any:
    """An error with its status, or the whole answer, of which 1 and True differ; of health the status."""
    status, body = answer
    if body in ("", {"error": "Model version not ready"}) or (isinstance(body, dict) and _HEALTH & set(body)):
        return status
    return (status, body["error"]) if isinstance(body, dict) and list(body) == ["error"] else repr(answer)


def test_answers_are_those_of_triton(both: tuple[httpx.Client, httpx.Client]) -> None:
    asking: list[tuple[str, str, Any]] = [("GET", path, "") for path in GETS]
    asking += [(method, path, "") for method in ("PUT", "DELETE", "OPTIONS") for path in (*GETS[:8], INDEX)]
    asking += [("POST", path, body) for path, bodies in POSTS for body in bodies]
    asking += [("POST", path, body) for path, body, *_ in cases.REFUSED]
    asking += [("POST", "/v2/models/generate/generate", body) for body in GENERATE]
    asking += [("POST", path, body) for path, body in MORE]
    different = [
        f"{method} {path} {body}\n  {theirs!r:.500}\n  {ours!r:.500}"
        for method, path, body in asking
        for theirs, ours in [[asked(client, method, path, body) for client in both]]
        if not agrees(error_of(ours), error_of(theirs))
    ]
    assert different == [], "\n".join(different)
