"""Anthropic's Messages API, with Anthropic's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from tests.support.llm_models import TINY_PNG, write_words
from tests.support.servers import WAIT_S, LocalServer, serving
from tests.support.text_requests import FURTHER

from conch_llm.frontend.dialects.messages_request import COUNT_FIELDS, FIELDS

MESSAGES = "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"
TOOL: Any = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
EDIT = {"type": "clear_thinking_20251015", "keep": "all"}


def said(text: str) -> Any:
    return [{"role": "user", "content": text}]


SAID = said(json.dumps([[{"text": "hi", "tokens": 1, "prompt_tokens": 3}], [{"finish_reason": "stop"}]]))
COUNTED: dict[str, tuple[list[Any], list[Any]]] = {
    "model": ([], [7]),
    "messages": ([], [[], "hi", [{"role": "robot", "content": "a"}]]),
    "cache_control": ([{"type": "ephemeral"}], ["x"]),
    "context_management": ([{"edits": []}, {"edits": [EDIT]}], [{"edits": [{"type": "clear_tool_uses"}]}]),
    "output_config": ([{"effort": "low"}], [{"format": {"type": "xml"}}, "low"]),
    "system": (["Be brief.", [{"type": "text", "text": "Be brief."}]], [7, [{"type": "image"}]]),
    "thinking": ([{"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}], [{"type": "between"}]),
    "tool_choice": ([{"type": "none"}, {"type": "auto"}], [{"type": "all"}, {"type": ["auto"]}, "auto"]),
    "tools": ([[TOOL], [{**TOOL, "type": "custom"}]], [[{"type": "bash_20250124"}], [{"name": "a"}]]),
    "speed": (["standard"], ["fast"]),
    "chat_template_kwargs": ([{"a": 1}], ["x"]),
}  # fmt: skip
TAKEN: dict[str, tuple[list[Any], list[Any]]] = {
    **COUNTED,
    "metadata": ([{"user_id": "u"}], [{"user_id": 7}, {"odd": 1}]),
    "max_tokens": ([5], [0]),
    "stop_sequences": ([["x"]], [[""]]),
    "stream": ([False, True], ["yes"]),
    "temperature": ([0.5], [3]),
    "top_k": ([5], [-2]),
    "top_p": ([0.5], [2]),
    "service_tier": (["auto", "standard_only"], ["fast"]),
    "container": ([], ["c"]),
    "diagnostics": ([], [{}]),
    "inference_geo": ([], ["eu"]),
    "mcp_servers": ([], [[]]),
    "stop": ([], ["x"]),
    "seed": ([7], ["x"]),
    **FURTHER,
}
"""By field, values that are taken, and values that are refused."""


@pytest.fixture
def claude(server: LocalServer) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client, which tries nothing again."""
    url = f"http://{server.http_address}"
    made = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=WAIT_S)
    with closing(made):
        yield made


@pytest.mark.parametrize(
    ("path", "fields", "table"), [(MESSAGES, TAKEN, FIELDS), (COUNT, COUNTED, COUNT_FIELDS)]
)
def test_each_field_is_honoured_or_refused_by_name(
    http: httpx.Client, path: str, fields: Any, table: Any
) -> None:
    assert fields.keys() == table.keys()
    # `told` takes any field, and `words` has a tokenizer.
    asked = {"model": "told", "max_tokens": 9, "messages": SAID}
    if path == COUNT:
        asked = {"model": "words", "messages": said("hello you")}
    for name, (taken, refused) in fields.items():
        for value in taken:
            found = http.post(path, json={**asked, name: value})
            assert found.status_code == 200, (name, value, found.text)
        for value in refused:
            found = http.post(path, json={**asked, name: value})
            error = found.json()["error"]
            assert (found.status_code, error["type"]) == (400, "invalid_request_error"), (name, value)
            assert name in error["message"], error
    for name in (*asked, "odd"):
        bad = {**asked, "odd": 1} if name == "odd" else {**asked, name: None}
        assert f"`{name}`" in http.post(path, json=bad).json()["error"]["message"]


def test_answers_whole_and_streamed(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(model="words", max_tokens=9, messages=said("hello you"))
    assert [(block.type, getattr(block, "text", "")) for block in whole.content] == [("text", "hello you ")]
    assert (whole.role, whole.stop_reason, whole.usage.input_tokens) == ("assistant", "end_turn", 2)
    with claude.messages.stream(model="words", max_tokens=9, messages=said("hello you")) as stream:
        assert "".join(stream.text_stream) == "hello you "
        streamed = stream.get_final_message()
    assert (streamed.stop_reason, streamed.usage.input_tokens) == ("end_turn", 2)
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_stops_and_limits(claude: anthropic.Anthropic) -> None:
    stopped = claude.messages.create(
        model="words", max_tokens=9, messages=said("one two three"), stop_sequences=["x", " th"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " th")
    steps = said(json.dumps([[{"text": "on", "finish_reason": "length"}]]))
    assert claude.messages.create(model="told", max_tokens=1, messages=steps).stop_reason == "max_tokens"


def test_thinking_is_shown_unless_it_is_switched_off(claude: anthropic.Anthropic) -> None:
    turn = said("<think>why not</think>yes")
    thought, text = claude.messages.create(model="thinks", max_tokens=9, messages=turn).content
    assert thought.type == "thinking" and thought.thinking == "why not" and text.type == "text"
    (text,) = claude.messages.create(
        model="thinks", max_tokens=9, messages=turn, thinking={"type": "disabled"}
    ).content
    assert text.type == "text" and text.text == "yes "


def test_a_loop_of_tools_by_the_template_alone(claude: anthropic.Anthropic) -> None:
    turns = said('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    with claude.messages.stream(model="calls", max_tokens=99, messages=turns, tools=[TOOL]) as stream:
        called = stream.get_final_message()
    (call,) = called.content
    assert called.stop_reason == "tool_use" and call.type == "tool_use"
    assert (call.name, call.input) == ("add", {"a": 1})
    turns += [
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "the sum"}]},
    ]
    (text,) = claude.messages.create(model="calls", max_tokens=99, messages=turns, tools=[TOOL]).content
    assert text.type == "text" and text.text == "the sum "


def test_a_schema_holds_or_is_refused_by_its_field(claude: anthropic.Anthropic) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    steps = said(json.dumps([[{"text": '{"city": "Rome"}'}]]))
    assert claude.messages.create(model="told", max_tokens=9, messages=steps, output_config=form).content
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
        claude.messages.create(model="words", max_tokens=9, messages=said("a"), output_config=form)


def test_pictures_go_where_the_model_takes_them(claude: anthropic.Anthropic) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": TINY_PNG}
    turns: Any = [
        {"role": "user", "content": [{"type": "text", "text": "what"}, {"type": "image", "source": source}]}
    ]
    (text,) = claude.messages.create(model="sees", max_tokens=9, messages=turns).content
    assert text.type == "text" and text.text == f"1 picture {TINY_PNG}"
    for model in ("words", "sees"):
        with pytest.raises(anthropic.BadRequestError, match="pictures can't be counted"):
            claude.messages.count_tokens(model=model, messages=turns)


def test_tokens_are_counted_as_the_template_writes_them(claude: anthropic.Anthropic) -> None:
    assert claude.messages.count_tokens(model="words", messages=said("hello you")).input_tokens == 2
    with pytest.raises(anthropic.BadRequestError, match="no tokenizer"):
        claude.messages.count_tokens(model="told", messages=SAID)


def test_errors_have_anthropics_shape(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(model="absent", max_tokens=9, messages=said("a"))
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["error"]["type"] == "not_found_error"
    assert caught.value.request_id == caught.value.body["request_id"]
    with pytest.raises(anthropic.InternalServerError, match="the engine is on fire"):
        claude.messages.create(model="words", max_tokens=9, messages=said("fail"))
    assert http.get(MESSAGES).json()["error"]["type"] == "invalid_request_error"
    assert http.post(MESSAGES, content=b"{").json()["type"] == "error"
    assert http.post(f"{MESSAGES}/batches").json()["error"]["type"] == "not_found_error"


def test_a_failure_in_mid_stream_is_an_event_that_the_client_raises(claude: anthropic.Anthropic) -> None:
    texts = []
    with (
        pytest.raises(anthropic.APIStatusError, match="the engine is on fire"),
        claude.messages.stream(model="words", max_tokens=9, messages=said("break")) as stream,
    ):
        texts.extend(stream.text_stream)
    assert "".join(texts) == "one two "


def test_the_clients_key_counts(tmp_path: Path) -> None:
    write_words(tmp_path)
    with serving(tmp_path, flags=["--openai-api-key=secret"]) as server:
        for key, works in (("secret", True), ("other", False)):
            url = f"http://{server.http_address}"
            with closing(anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)) as client:
                asked: Any = {"model": "words", "max_tokens": 9, "messages": said("a")}
                if works:
                    assert client.messages.create(**asked).content
                    continue
                with pytest.raises(anthropic.AuthenticationError) as caught:
                    client.messages.create(**asked)
                assert isinstance(caught.value.body, dict)
                assert caught.value.body["error"]["type"] == "authentication_error"
