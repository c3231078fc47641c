"""Chats on the console: who may, what is streamed, what is counted, and how they end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.support.console import Page
from tests.support.llm_models import running, write_native, write_told, write_words
from tests.support.metrics import get, samples
from tests.support.servers import LocalServer, eventually, free_port, serving

POLICY = """
[[principal]]
name = "all"
key_file = "all"
infer = ["*"]
read = ["*"]

[[principal]]
name = "words"
key_file = "words"
infer = ["words"]
read = ["*"]
"""
ROUTE = "/v1/chat/completions"


class Place(NamedTuple):
    """A server with models that chat, and a policy by which one principal may use `words` only."""

    server: LocalServer
    models: Path

    def page(self, name: str) -> Page:
        """The page of a principal."""
        page = Page(self.server.console_url)
        assert page.post("/api/session", {"token": f"the-key-of-{name}-1"}).status_code == 200
        return page

    def counted(self, model: str, status: int) -> float:
        """Requests of chats."""
        labels = frozenset({"route": ROUTE, "model": model, "status": str(status)}.items())
        status, _, text = get(self.server.metrics_url, authorization="Bearer the-key-of-all-1")
        assert status == 200, text
        return samples(text.decode()).get(("conch_llm_requests_total", labels), 0.0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("chat")
    models = directory / "models"
    write_words(models, served_model_name="gpt")
    write_told(models)
    write_native(models)
    write_words(models, "bare")
    for template in (models / "bare").rglob("chat_template.jinja"):
        template.unlink()
    for name in ("all", "words"):
        (directory / name).write_text(f"the-key-of-{name}-1")
    (directory / "access.toml").write_text(POLICY)
    flags = [
        f"--console-port={free_port()}",
        "--console-allow-infer",
        f"--access-policy={directory / 'access.toml'}",
    ]
    with serving(models, flags=flags) as server:
        yield Place(server, models)


def body(text: str, model: str = "words", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


def test_an_answer_is_streamed_and_counted_once(place: Place) -> None:
    with place.page("words") as page:
        models = page.get("/api/chat").json()["models"]
        assert {(each["id"], each["model"]) for each in models} == {
            ("words", "words"),
            ("gpt", "words"),
            ("told", "told"),
            ("native", "native"),
        }
        before = place.counted("words", 200)
        asked = body("a b c", "gpt", stream=True, stream_options={"include_usage": True})
        with page.client.stream("POST", "/api/models/words/chat", json=asked) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            assert "content-security-policy" in response.headers
            events = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        chunks = [json.loads(event) for event in events]
        text = "".join(each["delta"].get("content", "") for chunk in chunks for each in chunk["choices"])
        assert text.split() == ["a", "b", "c"]
        assert chunks[-1]["usage"]["completion_tokens"] == 3
        assert place.counted("words", 200) == before + 1


@pytest.mark.parametrize(
    ("model", "given", "status", "text"),
    [
        ("told", "told", 403, "'words' may not"),
        ("words", "told", 400, "`told` is no name of the model `words`"),
        ("words", "unknown", 400, "`unknown` is no name of the model `words`"),
        ("gpt", "gpt", 403, "'words' may not"),
    ],
)
def test_no_other_model_is_reached(place: Place, model: str, given: str, status: int, text: str) -> None:
    with place.page("words") as page:
        refused = page.post(f"/api/models/{model}/chat", body("[]", given))
    assert refused.status_code == status
    assert text in refused.text


def test_the_live_page_has_the_figures_of_a_model_that_takes_text(place: Place) -> None:
    with place.page("all") as page, page.live("?model=words") as events:
        details = (content["text"] for name, content in events if name == "detail")
        before = next(details)
        assert {"running", "waiting", "prompt", "first_s"} <= before.keys()
        asked = body("hello you", stream=True)
        assert page.post("/api/models/words/chat", asked).status_code == 200
        after = next(each for each in details if each["prompt"] > before["prompt"])
        grown = {name: after[name] - before[name] for name in ("prompt", "generated", "first")}
        assert grown == {"prompt": 2, "generated": 2, "first": 1} and after["context"] == 4
        with page.live("?model=bare") as others:
            assert next(content for name, content in others if name == "detail")["text"]["context"] == 0


def test_leaving_cancels_the_answer(place: Place) -> None:
    with place.page("all") as page:
        asked = body("endless", stream=True)
        with page.client.stream("POST", "/api/models/words/chat", json=asked) as response:
            assert any("tick" in line for line in response.iter_lines())
            assert running(place.models) == 1
    eventually(lambda: running(place.models) == 0, "the model ends the answer")


def test_failures_are_in_openais_shape(place: Place) -> None:
    with place.page("all") as page:
        failed = page.post("/api/models/words/chat", body("fail"))
        assert "the engine is on fire" in failed.json()["error"]["message"]
        wrong = page.post("/api/models/words/chat", body("a", temperature="hot"))
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "temperature"


def test_without_openais_routes_there_is_no_chat(place: Place) -> None:
    flags = [f"--console-port={free_port()}", "--console-allow-infer", "--allow-openai=false"]
    with serving(place.models, flags=flags) as server, Page(server.console_url) as page:
        assert page.get("/api/chat").json() == {"models": []}
        refused = page.post("/api/models/words/chat", body("a"))
        assert refused.status_code == 501 and "no routes of OpenAI" in refused.json()["error"]


def test_a_model_that_takes_bodies_answers_by_itself(place: Place) -> None:
    pieces = ['data: {"choices": []}\n\n', "data: [DONE]\n\n"]
    asked = body("a", "native", type="text/event-stream", pieces=pieces)
    with place.page("all") as page:
        answer = page.post("/api/models/native/chat", asked)
    assert answer.text.removeprefix(":\n\n") == "".join(pieces)
