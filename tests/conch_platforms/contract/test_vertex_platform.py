"""Vertex AI's calls: health and predictions on two routes, redirected predictions, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.metrics import get
from tests.support.platforms import (
    NO_PORTS,
    SIMPLE_JSON,
    check_binary,
    check_json,
    post,
    simple_binary,
)
from tests.support.servers import copy_example, free_port, serving, started

from conch.core.errors import InvalidArgumentError

MIME = "application/vnd.vertex-ai-triton.binary+json;json-header-size="
REDIRECT = "X_Vertex_Ai_Triton_Redirect"
ROUTES = ("--vertex-ai-predict-route=/predict", "--vertex-ai-health-route=/health")


@contextmanager
def vertex_ai(*repositories: Path, flags: Sequence[str] = ()) -> Iterator[str]:
    """A server with Vertex AI's routes; gives their URL."""
    port = free_port()
    with serving(*repositories, flags=["--allow-vertex-ai", f"--vertex-ai-port={port}", *ROUTES, *flags]):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An endpoint with one model, whose statistics are restricted."""
    repository = tmp_path_factory.mktemp("models")
    copy_example(repository, "simple")
    flags = ["--model-control-mode=explicit", "--load-model=*", "--http-restricted-api=statistics:key=secret"]
    with vertex_ai(repository, flags=flags) as url:
        yield url


def test_predictions(endpoint: str) -> None:
    assert get(f"{endpoint}/health")[0] == 200
    check_json(post(f"{endpoint}/predict", SIMPLE_JSON)[2])
    head, binary = simple_binary()
    for more in ({}, {REDIRECT: "v2/models/simple/versions/1/infer"}):
        status, headers, body = post(f"{endpoint}/predict", binary, Content_Type=f"{MIME}{head}", **more)
        assert status == 200
        check_binary(headers["content-type"], MIME, body)
        check_binary(headers["inference-header-content-length"], "", body)


@pytest.mark.parametrize(
    ("target", "status", "text"),
    [
        ("v2", 200, '"name":"triton"'),
        ("v2/health/live", 200, ""),
        ("v2/health/ready", 200, ""),
        ("v2/models/simple", 200, '"name":"simple"'),
        ("v2/models/simple/versions/1", 200, '"name":"simple"'),
        ("v2/models/simple/ready", 200, ""),
        ("v2/models/simple/config", 200, '"name":"simple"'),
        ("v2/models/none", 404, "unknown model"),
        ("v2/repository/index", 200, '"name":"simple"'),
        ("v2/systemsharedmemory/status", 200, "[]"),
        ("v2/cudasharedmemory/status", 200, "[]"),
        ("metrics", 200, "nv_inference_request_success"),
        # Access rules hold behind redirections.
        ("v2/models/stats", 403, "This API is restricted, expecting header 'key'"),
        ("v2/models/simple/stats", 403, "This API is restricted, expecting header 'key'"),
        # What changes the server is refused.
        ("v2/repository/models/simple/unload", 403, "changes the server"),
        ("v2/repository/models/simple/load", 403, "changes the server"),
        ("v2/systemsharedmemory/region/x/register", 403, "changes the server"),
        ("v2/systemsharedmemory/unregister", 403, "changes the server"),
        ("v2/cudasharedmemory/region/x/register", 403, "changes the server"),
        ("v2/cudasharedmemory/region/x/unregister", 403, "changes the server"),
        # Other paths are none.
        ("v2/trace/setting", 400, ""),
        ("v2/logging", 400, ""),
        ("v2/models/simple/trace/setting", 400, ""),
        ("", 400, ""),
        ("/v2", 400, ""),
        ("openapi.json", 400, ""),
        ("v2/health/live/../../repository/models/simple/unload", 400, ""),
        ("http://127.0.0.1/v2", 400, ""),
    ],
)
def test_redirections(endpoint: str, target: str, status: int, text: str) -> None:
    found = post(f"{endpoint}/predict", b"", **{REDIRECT: target})
    assert (found[0], text in found[2].decode()) == (status, True), found
    assert post(f"{endpoint}/predict", SIMPLE_JSON)[0] == 200, "the server is as it was"


def test_what_is_not_part_of_the_contract(endpoint: str) -> None:
    for path in ("/v2/models/simple", "/v2/models/simple/infer", "/", "/predict/", "/health/x"):
        assert get(f"{endpoint}{path}")[::2] == (400, b""), path
    assert get(f"{endpoint}/predict")[0] == 405
    assert get(f"{endpoint}/predict", X_Vertex_Ai_Triton_Redirect="v2")[0] == 405


@pytest.mark.parametrize(
    ("size", "text"),
    [
        ("-1", r"inference header size should be in range \(0, \d+\), got: -1"),
        ("NaN", "Unable to parse inference header size, got: NaN"),
        ("4294967296", "Unable to parse inference header size, value is out of range, got: 4294967296"),
        ("1000000", r"inference header size should be in range \(0, \d+\), got: 1000000"),
    ],
)
def test_malformed_sizes(endpoint: str, size: str, text: str) -> None:
    status, _, body = post(f"{endpoint}/predict", simple_binary()[1], Content_Type=f"{MIME}{size}")
    assert status == 400 and re.fullmatch(text, json.loads(body)["error"]), body


def test_default_models(tmp_path: Path) -> None:
    for name in ("one", "two"):
        copy_example(tmp_path, "simple", name)
    for flags, text in (
        ([], "Expect the model repository contains only a single model if default model is not specified"),
        (["--vertex-ai-default-model=x"], "Expect the default model 'x' is loaded"),
    ):
        with pytest.raises(InvalidArgumentError) as refused, vertex_ai(tmp_path, flags=flags):
            pass
        assert refused.value.message == text
    with vertex_ai(tmp_path, flags=["--vertex-ai-default-model=two"]) as url:
        assert json.loads(post(f"{url}/predict", SIMPLE_JSON)[2])["model_name"] == "two"


@pytest.mark.process
def test_the_container(tmp_path: Path) -> None:
    copy_example(tmp_path, "simple")
    port = free_port()
    environment: dict[str, str | None] = {
        **NO_PORTS,
        "AIP_MODE": "PREDICTION",
        "AIP_HTTP_PORT": str(port),
        "AIP_PREDICT_ROUTE": "/v1/endpoints/7:predict",
        "AIP_HEALTH_ROUTE": "/v1/endpoints/7",
        "AIP_STORAGE_URI": str(tmp_path),
    }
    with started("--allow-metrics=false", environment=environment) as server:
        server.wait_ready()
        url = f"http://127.0.0.1:{port}/v1/endpoints/7"
        assert get(url)[0] == 200
        check_json(post(f"{url}:predict", SIMPLE_JSON)[2])
        rows = [row.split("|")[1].strip() for row in server.output.splitlines() if "://" in row]
        assert rows == ["Vertex AI"]
        assert server.stop() == 0
    without = {key: value for key, value in environment.items() if key != "AIP_PREDICT_ROUTE"}
    with started(environment=without) as server:
        assert server.wait() == 1
        assert "API_PREDICT_ROUTE is not defined for Vertex AI endpoint" in server.errors
