"""Azure ML's calls to a custom container: the routes of its `inference_config`, on one port."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.metrics import get
from tests.support.platforms import SIMPLE_JSON, accepts_connections, check_json, manifests, post
from tests.support.servers import copy_example, eventually, free_port, serving, started


def test_the_example_deployment() -> None:
    """Its routes are those that conch has by itself there."""
    (deployment,) = manifests("azureml/deployment.yml")
    (endpoint,) = manifests("azureml/endpoint.yml")
    assert deployment["endpoint_name"] == endpoint["name"] == deployment["model"]["name"]
    routes = deployment["environment"]["inference_config"]
    assert {name: route["path"] for name, route in routes.items()} == {
        "liveness_route": "/v2/health/live",
        "readiness_route": "/v2/health/ready",
        "scoring_route": "/score",
    }
    assert {route["port"] for route in routes.values()} == {5001}


def test_routes_by_flags(tmp_path: Path) -> None:
    for name in ("one", "two"):
        copy_example(tmp_path, "simple", name)
    flags = [
        "--azureml-scoring-route=/predict",
        "--azureml-liveness-route=/live",
        "--azureml-readiness-route=/ready",
        "--azureml-default-model=two",
        "--http-restricted-api=inference:key=secret",
    ]
    with serving(tmp_path, flags=flags) as server:
        url = f"http://{server.http_address}"
        assert [get(f"{url}{path}")[0] for path in ("/live", "/ready", "/v2/health/ready")] == [200] * 3
        assert post(f"{url}/predict", SIMPLE_JSON)[0] == 403, "access rules hold for aliases"
        check_json(post(f"{url}/predict", SIMPLE_JSON, key="secret")[2])
        check_json(post(f"{url}/v2/models/one/infer", SIMPLE_JSON, key="secret")[2])
        assert get(f"{url}/predict", key="secret")[0] == 405


@pytest.mark.process
def test_the_container(tmp_path: Path) -> None:
    """Azure ML starts the container, waits for liveness and readiness, and posts to the scoring route."""
    directory = tmp_path / "azureml-models" / "digits" / "1"
    copy_example(directory / "registered", "simple")  # a registered folder is in the model's directory
    port = free_port()
    environment = {"AZUREML_MODEL_DIR": str(directory), "CONCH_HTTP_PORT": str(port)}
    with started("--grpc-port=0", environment=environment) as server:
        eventually(lambda: accepts_connections(port), "it listens")
        url = f"http://127.0.0.1:{port}"
        for path in ("/v2/health/live", "/v2/health/ready", "/"):
            assert get(f"{url}{path}")[0] == 200, path
        check_json(post(f"{url}/score", SIMPLE_JSON)[2])
        status, _, body = post(f"{url}/score", b"{")
        assert status == 500 and b"failed to parse the request JSON buffer" in body, "as in Triton"
        server.wait_ready()
        assert server.stop() == 0
