"""Each field of OpenAI's routes, sent to each engine: has its effect or is refused, as docs/llm.md says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from tests.support.genai_models import genai_library, random_model
from tests.support.llama_models import llama_model
from tests.support.server_fixtures import server_fixture
from tests.support.servers import WAIT_S, AnyServer

from conch_llm.frontend.request_fields import CHAT_FIELDS, COMPLETION_FIELDS

genai_library()
pytestmark = pytest.mark.process

PAGE = Path(__file__).parents[3] / "docs" / "llm.md"
ENGINES = ("llama_cpp", "openvino_genai")
WITHOUT_EFFECT = {"model", "user"}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}<tool_call>{% endif %}"
    "{{ reasoning_effort }}{{ extra }}{% for d in documents or () %}{{ d.text }}{% endfor %}<|im_start|>"
)
CALL = '<tool_call>{"name": "go", "arguments": {}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "go", "parameters": {"type": "object", "properties": {}}}}
HOT = {"temperature": 2, "seed": 1}


class Sent(NamedTuple):
    """A field's request beside the plain one, and its effect: takes the answer and the plain answer."""

    body: Mapping[str, Any]
    effect: Callable[[Any, Any], bool] = lambda found, plain: True
    chat: bool = True


def text(answer: Any) -> str:
    choice = answer["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def other(found: Any, plain: Any) -> bool:
    return text(found) != text(plain)


def same(found: Any, plain: Any) -> bool:
    return text(found) == text(plain)


def longer_prompt(found: Any, plain: Any) -> bool:
    return bool(found["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"])


def has_tops(count: int) -> Callable[[Any, Any], bool]:
    def check(found: Any, plain: Any) -> bool:
        entries = found["choices"][0]["logprobs"]["content"]
        return bool(entries) and all(len(each["top_logprobs"]) == count for each in entries)

    return check


def calls(count: int) -> Callable[[Any, Any], bool]:
    return lambda found, plain: len(found["choices"][0]["message"].get("tool_calls") or ()) == count


def said(wanted: str) -> Callable[[Any, Any], bool]:
    return lambda found, plain: text(found) == wanted


def choice_of(written: str, **more: Any) -> dict[str, Any]:
    return {"structured_outputs": {"choice": [written]}, "max_tokens": 200, "ignore_eos": False, **more}


SENT: Mapping[str, Sent] = {
    "messages": Sent({"messages": [{"role": "user", "content": "longer than hello"}]}, longer_prompt),
    "prompt": Sent({"prompt": ["a", "b"]}, lambda found, plain: len(found["choices"]) == 2, chat=False),
    "max_tokens": Sent({"max_tokens": 3}, lambda found, plain: found["usage"]["completion_tokens"] == 3),
    "max_completion_tokens": Sent(
        {"max_completion_tokens": 3}, lambda found, plain: found["usage"]["completion_tokens"] == 3
    ),
    "stream": Sent({"stream": True}, lambda found, plain: found["events"] > 1 and same(found, plain)),
    "stream_options": Sent(
        {"stream": True, "stream_options": {"include_usage": True}},
        lambda found, plain: found["usage"]["completion_tokens"] == 8,
    ),
    "n": Sent({"n": 2}, lambda found, plain: len(found["choices"]) == 2),
    "best_of": Sent({"n": 2, "best_of": 2}, lambda found, plain: len(found["choices"]) == 2, chat=False),
    "seed": Sent({"seed": 3, "temperature": 1}),
    "temperature": Sent(HOT, other),
    "top_p": Sent({**HOT, "top_p": 1e-6}, same),
    "top_k": Sent({**HOT, "top_k": 1}, same),
    "min_p": Sent({**HOT, "min_p": 0.99}, same),
    "presence_penalty": Sent({"presence_penalty": 2}, other),
    "frequency_penalty": Sent({"frequency_penalty": 2}, other),
    "repetition_penalty": Sent({"repetition_penalty": 5}, other),
    "stop": Sent({"stop": ["D"]}, lambda found, plain: text(found) == text(plain).partition("D")[0]),
    "include_stop_str_in_output": Sent(
        {"stop": ["D"], "include_stop_str_in_output": True}, lambda found, plain: text(found).endswith("D")
    ),
    "ignore_eos": Sent({}, lambda found, plain: found["usage"]["completion_tokens"] == 8),
    "min_tokens": Sent({"min_tokens": 8}),
    "stop_token_ids": Sent(
        {"ignore_eos": False, "stop_token_ids": list(range(3, 266))},
        lambda found, plain: found["choices"][0]["finish_reason"] == "stop",
    ),
    "skip_special_tokens (false)": Sent({"skip_special_tokens": False}),
    "logit_bias": Sent({"logit_bias": {"71": 100}}, said("D" * 8)),
    "bad_words": Sent({"bad_words": ["a"]}),
    "allowed_token_ids": Sent({"allowed_token_ids": [5]}),
    "logprobs": Sent({"logprobs": True}, has_tops(0)),
    "top_logprobs (1)": Sent({"logprobs": True, "top_logprobs": 1}, has_tops(1)),
    "top_logprobs (2 to 20)": Sent({"logprobs": True, "top_logprobs": 2}, has_tops(2)),
    "prompt_logprobs": Sent({"prompt_logprobs": 1}),
    "logprobs with echo": Sent({"logprobs": 0, "echo": True}, chat=False),
    "echo (completions)": Sent(
        {"echo": True}, lambda found, plain: text(found) == "hello" + text(plain), chat=False
    ),
    "echo (chats)": Sent({"echo": True}),
    "suffix": Sent({"suffix": "a"}, chat=False),
    "response_format": Sent(
        {
            "max_tokens": 60,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"enum": ["yes"]}},
            },
        },
        said('"yes"'),
    ),
    "structured_outputs": Sent(choice_of("yes"), said("yes")),
    "tools": Sent(choice_of(f"{CALL}{CALL}", tools=[TOOL]), calls(2)),
    "parallel_tool_calls": Sent(
        choice_of(f"{CALL}{CALL}", tools=[TOOL], parallel_tool_calls=False), calls(1)
    ),
    "tool_choice": Sent({"tools": [TOOL], "tool_choice": "required", "max_tokens": 200}, calls(1)),
    "reasoning_effort": Sent({"reasoning_effort": "high"}, longer_prompt),
    "chat_template_kwargs": Sent({"chat_template_kwargs": {"extra": "a b c"}}, longer_prompt),
    "documents": Sent({"documents": [{"text": "a b c"}]}, longer_prompt),
    "include_reasoning": Sent(
        choice_of("<think>so</think>yes", include_reasoning=False),
        lambda found, plain: text(found) == "yes" and '"so"' not in json.dumps(found["choices"]),
    ),
    "priority": Sent({"priority": 1}),
    "chat_template": Sent({"chat_template": "{{ messages }}"}),
    "continue_final_message": Sent({"continue_final_message": True}),
    "tool_strict_level": Sent({"tool_strict_level": 1}),
    "cache_salt": Sent({"cache_salt": "a"}),
}


def documented() -> dict[str, dict[str, bool]]:
    """By field and engine, whether the page says that the field has its effect."""
    section = PAGE.read_text().partition("## Fields by engine")[2].partition("\n## ")[0]
    found: dict[str, dict[str, bool]] = {}
    for row in re.findall(r"^\| (`.*) \| (yes|no) \| (yes|no) \|$", section, re.MULTILINE):
        for name in re.split(r", (?=`)", row[0].partition(":")[0]):
            plain = name.replace("`", "").replace(" (text, tokens, lists of both)", "").replace(" (as n)", "")
            found[plain] = dict(zip(ENGINES, (each == "yes" for each in row[1:]), strict=True))
    return found


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fields")
    parsers = {"CONCH_REASONING_PARSER": "think"}  # that of calls follows from the template
    for directory in (
        llama_model(root, "llama_cpp", **parsers),
        random_model(root, "openvino_genai", **parsers),
    ):
        (directory / "1" / "chat_template.jinja").write_text(TEMPLATE)
    return root


server = server_fixture()


@pytest.fixture
def client(server: AnyServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server.http_address}/v1", timeout=WAIT_S) as made:
        yield made


def answer(client: httpx.Client, engine: str, sent: Sent) -> httpx.Response:
    body: dict[str, Any] = {"model": engine, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    if sent.chat:
        body["messages"] = [{"role": "user", "content": "hello"}]
        return client.post("/chat/completions", json={**body, **sent.body})
    return client.post("/completions", json={**body, "prompt": "hello", **sent.body})


def content(response: httpx.Response) -> Any:
    """The answer; of a stream with the number of its events."""
    if response.headers["content-type"].startswith("application/json"):
        return response.json()
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    pieces = [choice["delta"].get("content") or "" for each in events for choice in each["choices"]]
    whole = [{"message": {"content": "".join(pieces)}}]
    return {"choices": whole, "events": len(events), "usage": events[-1].get("usage")}


def test_each_field_of_the_routes_is_documented_and_sent() -> None:
    names = {re.sub(r" .*", "", each) for each in SENT}
    assert (CHAT_FIELDS.keys() | COMPLETION_FIELDS.keys()) - names == WITHOUT_EFFECT
    assert documented().keys() == SENT.keys()


@pytest.mark.parametrize("backend", ENGINES)
def test_a_field_has_its_effect_or_is_refused(client: httpx.Client, backend: str) -> None:
    plain = {chat: content(answer(client, backend, Sent({}, chat=chat))) for chat in (True, False)}
    wrong: dict[str, str] = {}
    for name, works in documented().items():
        sent = SENT[name]
        response = answer(client, backend, sent)
        if works[backend]:
            fine = response.status_code == 200 and sent.effect(content(response), plain[sent.chat])
        else:
            refused = response.json().get("error", {}).get("message", "")
            fine = response.status_code == 400 and re.sub(r" .*", "", name) in refused
        if not fine:
            wrong[name] = f"{response.status_code} {response.text[:300]}"
    assert not wrong, json.dumps(wrong, indent=1)
