"""Routes, names of models, errors and limits over plain HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.support.llm_models import write_words
from tests.support.raw_http import raw_http, request
from tests.support.servers import LocalServer, serving

import conch

COMPLETIONS = "/v1/completions"
ASKED = {"model": "words", "prompt": "a b"}


def check_error(
    response: httpx.Response, status: int, kind: str, code: str | None, param: str | None = None
) -> str:
    """Checks the whole shape of an error; returns its text."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (found,) = response.json().values()
    message = found.pop("message")
    assert found == {"type": kind, "param": param, "code": code}
    assert isinstance(message, str) and message
    return message


def test_models_are_listed_with_aliases_and_adapters(http: httpx.Client, client: openai.OpenAI) -> None:
    listed = {model.id: model for model in client.models.list()}
    names = {"words", "org/words", "gpt", "smollm", "pirate", "thinks", "calls", "sees", "told", "native"}
    names.add("vectors")
    assert listed.keys() == names
    assert {each["id"] for each in http.get("/v1/models?all=1").json()["data"]} == {*listed, "plain"}
    entry = http.get("/v1/models/pirate").json()
    assert isinstance(entry.pop("created"), int)
    assert entry == {
        "id": "pirate",
        "object": "model",
        "owned_by": "conch",
        "root": "pirate",
        "parent": "words",
        "max_model_len": None,
        "capabilities": ["chat", "completion"],
    }


def test_a_model_without_a_chat_template_does_not_claim_to_chat(http: httpx.Client, tmp_path: Path) -> None:
    assert "chat" in http.get("/v1/models/told").json()["capabilities"]
    write_words(tmp_path)
    (template,) = tmp_path.rglob("chat_template.jinja")
    template.unlink()
    with serving(tmp_path) as server:
        (entry,) = httpx.get(f"http://{server.http_address}/v1/models").json()["data"]
        assert entry["capabilities"] == ["completion"]


@pytest.mark.parametrize(
    "path", ["/v1/models/org/words", "/v1/models/org%2Fwords", "/openai/v1/models/words"]
)
def test_a_model_is_found_by_any_name(http: httpx.Client, path: str) -> None:
    assert http.get(path).json()["root"] == "words"


def test_an_unknown_model_has_a_hint(http: httpx.Client, client: openai.OpenAI) -> None:
    text = check_error(http.get("/v1/models/wrds"), 404, "not_found_error", "model_not_found")
    assert text.startswith("The model `wrds` does not exist; did you mean `words`")
    with pytest.raises(openai.NotFoundError, match="The model `far away` does not exist"):
        client.completions.create(model="far away", prompt="a")


def test_kserve_and_openai_paths_answer_alike(http: httpx.Client) -> None:
    for path in (COMPLETIONS, f"/openai{COMPLETIONS}"):
        assert http.post(path, json=ASKED).json()["choices"][0]["text"] == "a b "


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/files", 404),
        ("POST", "/openai/v1/batches", 404),
        ("POST", "/v1/completions/more", 404),
        ("GET", COMPLETIONS, 405),
        ("DELETE", "/v1/models/words", 405),
    ],
)
def test_routes_are_a_fixed_list(http: httpx.Client, method: str, path: str, status: int) -> None:
    code = "unknown_url" if status == 404 else "method_not_allowed"
    response = http.request(method, path)
    check_error(response, status, "invalid_request_error", code)
    assert ("allow" in response.headers) == (status == 405)


def test_other_unknown_paths_stay_those_of_rest(http: httpx.Client) -> None:
    for path in ("/v3", "/v1", "/openai", "/scale_elastic_ep"):
        response = http.get(path)
        assert (response.status_code, response.json()) == (404, {"error": "Not Found"})


def test_health_and_version(http: httpx.Client) -> None:
    for path, content in (("/health", b""), ("/ping", b""), ("/health/live", b'{"live":true}')):
        response = http.get(path)
        assert (response.status_code, response.content) == (200, content), path
    assert http.get("/version").json() == {"version": conch.__version__}


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{", "json_invalid", None),
        (b"[]", "json_invalid", None),
        (b"", "json_invalid", None),
        (b"[" * 5000, "json_invalid", None),
        (b'{"prompt": "a"}', None, "model"),
        (b'{"model": "words"}', None, "prompt"),
        (b'{"model": 7}', None, "model"),
        (b'{"model": "words", "prompt": "a", "temperature": "hot"}', None, "temperature"),
        (b'{"model": "plain", "prompt": "a"}', None, "model"),
        (b'{"model": "words", "prompt": "a", "suffix": "b"}', None, "suffix"),
    ],
)
def test_a_bad_body_is_a_400(http: httpx.Client, body: bytes, code: str | None, param: str | None) -> None:
    check_error(http.post(COMPLETIONS, content=body), 400, "invalid_request_error", code, param)


@pytest.mark.parametrize("path", ["/v1/score", "/rerank", "/v1/embeddings"])
def test_a_route_that_the_model_does_not_answer(http: httpx.Client, path: str) -> None:
    body: dict[str, Any] = {
        "model": "words",
        "input": "a",
        "text_1": "a",
        "text_2": ["b"],
        "query": "a",
        "documents": ["b"],
    }
    text = check_error(http.post(path, json=body), 400, "invalid_request_error", None, "model")
    assert "`words`" in text


def test_parts_that_are_no_text_and_templates_are_refused(http: httpx.Client) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:"}}
    body: dict[str, Any] = {"model": "words", "messages": [{"role": "user", "content": [part]}]}
    text = check_error(
        http.post("/v1/chat/completions", json=body),
        400,
        "invalid_request_error",
        None,
        "messages[0].content",
    )
    assert text == "only text message is supported, but got image_url"
    body = {"model": "words", "messages": [{"role": "user", "content": "a"}], "chat_template": "{{ 1 }}"}
    check_error(
        http.post("/v1/chat/completions", json=body), 400, "invalid_request_error", None, "chat_template"
    )


def test_auto_tools_need_a_parser(http: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    body = {"model": "thinks", "messages": [{"role": "user", "content": "a"}], "tools": [tool]}
    text = check_error(
        http.post("/v1/chat/completions", json=body), 400, "invalid_request_error", None, "tool_choice"
    )
    assert text.startswith('"auto" tool choice requires --tool-call-parser')


def test_the_request_id_is_the_clients_or_a_new_one(http: httpx.Client) -> None:
    response = http.post(COMPLETIONS, json=ASKED, headers={"X-Request-Id": "mine-7"})
    assert response.headers["x-request-id"] == "mine-7"
    assert response.json()["id"] == "cmpl-mine-7"
    for given in ("", "with space", "x" * 129):
        made = http.post(COMPLETIONS, json=ASKED, headers={"X-Request-Id": given}).headers["x-request-id"]
        assert len(made) == 32 and made != given


def test_a_stream_has_these_bytes(server: LocalServer) -> None:
    body = json.dumps({"model": "told", "prompt": '[[{"text": "hé"}]]', "stream": True}).encode()
    with raw_http(server.http_address) as connection:
        connection.send(request("POST", COMPLETIONS, body, "X-Request-Id: 1"))
        response = connection.response()
    assert response is not None and response.status == 200
    headers = {name.lower(): value for name, value in response.headers.items()}
    assert headers == {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
        "x-request-id": "1",
        "transfer-encoding": "chunked",
    }
    created = json.loads(response.body.partition(b"\n")[0].removeprefix(b"data: "))["created"]
    start = f'data: {{"id":"cmpl-1","object":"text_completion","created":{created},"model":"told","choices":['
    assert response.body.decode() == (
        f'{start}{{"index":0,"text":"hé","logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{start}{{"index":0,"text":"","logprobs":null,"finish_reason":"stop"}}]}}\n\n'
        "data: [DONE]\n\n"
    )


def test_loading_needs_explicit_mode_and_an_unloaded_model(http: httpx.Client) -> None:
    text = check_error(http.post("/v1/models/told/load"), 400, "invalid_request_error", None, "model")
    assert text == "Model 'told' is already loaded"
    assert http.post("/v1/models/told/unload").json() == {"status": "success", "model": "told"}
    check_error(http.get("/v1/models/told"), 404, "not_found_error", "model_not_found")
    assert http.post("/v1/models/told/load").json()["id"] == "told"
    assert http.post("/v1/models/nothing/load").status_code in (400, 404, 500)
    crossing = http.post("/v1/models/told/unload", headers={"Origin": "https://elsewhere.example"})
    check_error(crossing, 403, "permission_error", "model_not_allowed")


def test_tokens_of_a_model_with_a_tokenizer(http: httpx.Client) -> None:
    asked: dict[str, Any] = {"model": "words", "prompt": "hello you", "return_token_strs": True}
    found = http.post("/tokenize", json=asked).json()
    assert found == {"count": 2, "max_model_len": None, "tokens": [1, 2], "token_strs": ["hello", "you"]}
    assert http.post("/detokenize", json={"model": "words", "tokens": [2, 1]}).json() == {
        "prompt": "you hello"
    }
    chat = {"model": "words", "messages": [{"role": "user", "content": "you"}]}
    assert http.post("/tokenize", json=chat).json()["tokens"] == [2]
    refused = http.post("/detokenize", json={"model": "words", "tokens": [9]})
    check_error(refused, 400, "invalid_request_error", None, "tokens")


@pytest.mark.parametrize(
    "path", ["/v1/responses", "/v1/messages", "/v1/chat/completions", "/tokenize", "/v2/rerank"]
)
def test_a_native_model_answers_by_itself(http: httpx.Client, path: str) -> None:
    whole = {"model": "native", "status": 422, "type": "application/x", "pieces": ["a", "b"]}
    response = http.post(path, json=whole, headers={"X-Request-Id": "1"})
    assert (response.status_code, response.text) == (422, "ab")
    assert (response.headers["content-type"], response.headers["x-request-id"]) == ("application/x", "1")
    streamed = {"model": "native", "type": "text/event-stream", "pieces": ["data: a\n\n", "data: b\n\n"]}
    response = http.post(path, json=streamed)
    assert (response.status_code, response.text) == (200, "data: a\n\ndata: b\n\n")
    assert response.headers["cache-control"] == "no-cache"
