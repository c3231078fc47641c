"""Answers that end early: clients that leave or do not read, bodies over the limit, the server's stop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from tests.support.llm_models import running, write_native, write_words
from tests.support.metrics import scrape
from tests.support.raw_http import head, raw_http, request
from tests.support.servers import LocalServer, client_of, eventually, serving

COMPLETIONS = "/v1/completions"
MOST = 4096
SMALL_BUFFER = 4096


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's repository."""
    directory = tmp_path_factory.mktemp("models")
    write_words(directory)
    write_native(directory)
    return directory


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[LocalServer]:
    """A server with a small limit of bodies."""
    with serving(models, flags=[f"--http-max-input-size={MOST}"]) as running:
        with client_of(running) as client:
            assert client.is_server_ready()
        yield running


def body(prompt: str, stream: bool = True) -> bytes:
    return json.dumps({"model": "words", "prompt": prompt, "stream": stream}).encode()


def cancelled(server: LocalServer, reason: str, model: str = "words") -> float:
    labels = frozenset({("model", model), ("reason", reason)})
    return scrape(server.metrics_url).get(("conch_llm_cancelled_total", labels), 0.0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels(server: LocalServer, models: Path, stream: bool) -> None:
    before = cancelled(server, "disconnect")
    with raw_http(server.http_address) as connection:
        connection.send(request("POST", COMPLETIONS, body("endless", stream)))
        eventually(lambda: running(models) == 1, "the model answers")
        if stream:
            assert connection.socket.recv(100)
    eventually(lambda: running(models) == 0, "the model is cancelled")
    eventually(lambda: cancelled(server, "disconnect") == before + 1, "it is counted")


def test_a_model_waits_for_a_client_that_does_not_read(
    server: LocalServer, models: Path, client: openai.OpenAI
) -> None:
    before = cancelled(server, "disconnect")
    with raw_http(server.http_address, receive_buffer=SMALL_BUFFER) as connection:
        connection.send(request("POST", COMPLETIONS, body("flood")))
        eventually(lambda: running(models) == 1, "the model answers")
        for _ in range(3):
            assert client.completions.create(model="words", prompt="a").choices[0].text == "a "
        assert running(models) == 1
    eventually(lambda: running(models) == 0, "the model is cancelled")
    eventually(lambda: cancelled(server, "disconnect") == before + 1, "it is counted")


def test_bodies_up_to_the_limit_are_taken(http: httpx.Client) -> None:
    frame = len(body("", False))
    assert http.post(COMPLETIONS, content=body("a" * (MOST - frame), False)).status_code == 200
    for content in (body("a" * (MOST - frame), False) + b" ", iter([body("a" * MOST)])):
        refused = http.post(COMPLETIONS, content=content)
        assert refused.status_code == 413
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "content_too_large")
        assert "Use --http-max-input-size" in error["message"]


def test_a_broken_length_is_refused(server: LocalServer) -> None:
    with raw_http(server.http_address) as connection:
        connection.send(head("POST", COMPLETIONS, "Content-Length: many"))
        response = connection.response()
        assert response is not None and response.status == 400


def test_an_encoding_is_refused(http: httpx.Client) -> None:
    refused = http.post(COMPLETIONS, content=body("a"), headers={"Content-Encoding": "gzip"})
    assert refused.status_code == 400
    assert "content-encoding" in refused.json()["error"]["message"]
