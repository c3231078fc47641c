"""The access log over HTTP: every inference request is in it, whatever becomes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.support.servers import (
    NUMBERS_CONFIG,
    AnyServer,
    client_of,
    eventually,
    serving,
    tensor,
    write_model,
)
from tritonclient.utils import InferenceServerException

MOST_BYTES = 1 << 20
BAD_DATA = "Unable to parse 'data'"
BAD_JSON = "failed to parse the request JSON buffer"
MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]) for value in inputs]
"""


class Site:
    """A server with an access log."""

    def __init__(self, server: AnyServer, log: Path, client: httpx.Client) -> None:
        self.server = server
        self.client = client
        self._log = log

    def line(self, ask: Callable[[], httpx.Response]) -> tuple[httpx.Response, dict[str, Any]]:
        """The response to a request and its line, which must be the only one."""
        before = self._log.read_text().count("\n")
        response = ask()
        eventually(lambda: self._log.read_text().count("\n") > before, "the whole line is written")
        (line,) = self._log.read_text().splitlines()[before:]
        return response, json.loads(line)

    def infer(self, body: bytes | Iterator[bytes], model: str = "same", **headers: str) -> httpx.Response:
        """Sends an infer request."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.post(f"/v2/models/{model}/infer", content=body, headers=names)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[AnyServer, Path]]:
    directory = tmp_path_factory.mktemp("access")
    write_model(directory / "models", "same", NUMBERS_CONFIG, {"model.py": MODEL})
    log = directory / "access.log"
    flags = [f"--access-log={log}", f"--http-max-input-size={MOST_BYTES}"]
    with serving(directory / "models", flags=flags) as server:
        with httpx.Client(base_url=f"http://{server.http_address}") as client:
            client.get("/v2/health/ready")
        yield server, log


@pytest.fixture
def site(running: tuple[AnyServer, Path]) -> Iterator[Site]:
    server, log = running
    headers = {"accept-encoding": "identity"}
    with httpx.Client(base_url=f"http://{server.http_address}", headers=headers) as client:
        yield Site(server, log, client)


def body(count: int, **more: Any) -> bytes:
    """An infer request as JSON."""
    tensor = {"name": "IN", "datatype": "FP32", "shape": [count], "data": [0.5] * count}
    return json.dumps({"inputs": [tensor], **more}).encode()


def test_what_was_answered(site: Site) -> None:
    sent = body(4, id="one")
    response, line = site.line(lambda: site.infer(sent))
    assert response.status_code == 200
    expected = {
        "protocol": "http",
        "id": "one",
        "model": "same",
        "version": "1",
        "code": "OK",
        "responses": 1,
    }
    assert {name: line[name] for name in expected} == expected and line["responses"] == 1
    assert (line["bytes_in"], line["bytes_out"]) == (len(sent), len(response.content))
    assert line["client"].startswith("127.0.0.1:")
    assert line["total_us"] >= line["compute_infer_us"]


def test_responses_that_a_worker_makes_have_a_size_too(site: Site) -> None:
    _, line = site.line(lambda: site.infer(body(50_000)))
    assert (line["code"], line["bytes_out"]) == ("OK", 200_000)
    binary = body(50_000, outputs=[{"name": "OUT", "parameters": {"binary_data": True}}])
    response, line = site.line(lambda: site.infer(binary, accept_encoding="gzip"))
    assert response.headers["content-encoding"] == "gzip"
    assert (line["code"], line["bytes_out"]) == ("OK", 200_000)


def chunks() -> Iterator[bytes]:
    for _ in range(70_000):
        yield b" "


@pytest.mark.parametrize(
    ("ask", "status", "text"),
    [
        (lambda site: site.infer(body(1), "nowhere"), 404, "unknown model: 'nowhere' is not found"),
        (lambda site: site.infer(b"{"), 500, BAD_JSON),
        (
            lambda site: site.infer(b"{", content_encoding="gzip"),
            400,
            "the compressed request body ends too early",
        ),
        (lambda site: site.infer(b"{}", content_encoding="br"), 501, "Unsupported compression type"),
        (lambda site: site.infer(body(1, inputs=[])), 400, "expected 1 inputs but got 0"),
        (lambda site: site.infer(b" " * (MOST_BYTES + 1)), 400, "exceeds the maximum allowed input size"),
        pytest.param(lambda site: site.infer(chunks()), 400, "non-empty chunks", marks=pytest.mark.slow),
        (
            lambda site: site.client.post("/v2/models/nowhere/generate", json={}),
            404,
            "unknown model: 'nowhere' is not found",
        ),
        (
            lambda site: site.client.post("/v2/models/same/generate", content=b"{"),
            500,
            BAD_JSON,
        ),
        (
            lambda site: site.client.post("/v2/models/same/generate_stream", json={"IN": "x"}),
            500,
            "Unable to parse 'data'",
        ),
    ],
)
def test_what_was_refused(site: Site, ask: Callable[[Site], httpx.Response], status: int, text: str) -> None:
    response, line = site.line(lambda: ask(site))
    assert (response.status_code, line["responses"]) == (status, 1), response.text
    assert line["model"] == ("nowhere" if "nowhere" in response.text else "same")
    assert text in line["error"] and text in response.json()["error"]


def test_generate(site: Site) -> None:
    for way in ("generate", "generate_stream"):
        response, line = site.line(
            lambda way=way: site.client.post(f"/v2/models/same/{way}", json={"IN": [1, 2]})  # type: ignore[misc]
        )
        assert response.status_code == 200
        assert (line["model"], line["code"], line["responses"]) == ("same", "OK", 1)
        assert line["bytes_out"] > 0


def test_who_lacks_a_secret_is_told_of(tmp_path: Path) -> None:
    """With the model, where the path says it, over either protocol."""
    write_model(tmp_path / "models", "same", NUMBERS_CONFIG, {"model.py": MODEL})
    log = tmp_path / "access.log"
    flags = [
        f"--access-log={log}",
        "--http-restricted-api=inference,metadata:key=secret",
        "--grpc-restricted-protocol=inference,metadata:key=secret",
    ]
    with serving(tmp_path / "models", flags=flags) as server:
        with httpx.Client(base_url=f"http://{server.http_address}") as client:
            site = Site(server, log, client)
            for path in ("infer", "versions/1/infer", "generate", "versions/1/generate_stream"):
                response, line = site.line(lambda path=path: client.post(f"/v2/models/same/{path}"))  # type: ignore[misc]
                assert response.status_code == 403
                assert (line["code"], line["error"]) == ("UNAUTHENTICATED", response.json()["error"])
                version = "1" if "versions" in path else ""
                assert (line["model"], line["version"], line["protocol"]) == ("same", version, "http")
                assert line["client"].startswith("127.0.0.1:")
            assert client.get("/v2/models/same").status_code == 403
        before = len(log.read_text().splitlines())
        with client_of(server) as grpc_client:
            with pytest.raises(InferenceServerException):
                grpc_client.get_server_metadata()
            with pytest.raises(InferenceServerException):
                grpc_client.infer("same", [tensor("IN", np.zeros(1, np.float32))])
        eventually(lambda: len(log.read_text().splitlines()) > before, "the line is written")
        (line,) = [json.loads(text) for text in log.read_text().splitlines()[before:]]
        assert (line["protocol"], line["code"]) == ("grpc", "UNAUTHENTICATED")
        assert "restricted" in line["error"]
