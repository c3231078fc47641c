"""OpenAI's Responses API, with OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from tests.support.llm_models import TINY_PNG, running, write_words
from tests.support.raw_http import raw_http, request
from tests.support.servers import WAIT_S, LocalServer, eventually, serving
from tests.support.text_requests import FURTHER

from conch_llm.frontend.dialects.responses_request import FIELDS

RESPONSES = "/v1/responses"
TOOL: Any = {
    "type": "function",
    "name": "add",
    "description": "adds",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": True,
}
SAID = json.dumps([[{"text": "hi", "tokens": 1, "prompt_tokens": 3}], [{"finish_reason": "stop"}]])
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
JSON = {"type": "json_object"}
LOGPROBS = "message.output_text.logprobs"
TAKEN: dict[str, tuple[list[Any], list[Any]]] = {
    "model": (["told"], [7]),
    "input": ([SAID], [7, []]),
    "instructions": (["Be brief."], [7]),
    "include": ([[], ["reasoning.encrypted_content"], [LOGPROBS]], [["file_search_call.results"]]),
    "previous_response_id": ([], ["resp_1", 7]),
    "reasoning": ([{"effort": "low", "summary": "auto"}], [{"summary": "concise"}, {"mode": "pro"}, "low"]),
    "store": ([False], [True, "yes"]),
    "stream_options": ([{"include_obfuscation": False}], [{"include_obfuscation": True}]),
    "text": ([{"verbosity": "medium"}, {"format": JSON}], [{"verbosity": "low"}, {"format": {}}]),
    "tool_choice": (["auto", "none"], ["all", {"type": "file_search"}, {"type": "function", "name": "b"}]),
    "tools": ([[TOOL], []], [[{"type": "web_search"}], [{**TOOL, "defer_loading": True}], [{}]]),
    "max_output_tokens": ([5], [0]),
    "parallel_tool_calls": ([True, False], ["no"]),
    "stream": ([False, True], ["yes"]),
    "temperature": ([0, 2], [3]),
    "top_logprobs": ([0, 5], [21]),
    "top_p": ([0.5], [2]),
    "user": (["u"], [7]),
    "metadata": ([{"a": "b"}], [{"a": 1}]),
    "prompt_cache_key": (["k"], [7]),
    "safety_identifier": (["s"], [7]),
    "background": ([False], [True]),
    "prompt_cache_retention": (["in_memory"], ["24h"]),
    "service_tier": (["auto", "default"], ["flex"]),
    "truncation": (["disabled"], ["auto"]),
    "access_programs": ([], [{}]),
    "background_options": ([], [{}]),
    "context_management": ([], [[]]),
    "conversation": ([], ["conv_1"]),
    "image": ([], [{}]),
    "max_tool_calls": ([], [3]),
    "moderation": ([], [{}]),
    "prompt": ([], [{"id": "p"}]),
    "prompt_cache_options": ([], [{}]),
    "seed": ([7], ["x"]),
    "stop": (["x", ["x"]], [[""]]),
    **FURTHER,
    "top_k": ([5], [-2]),
    "chat_template_kwargs": ([{"enable_thinking": True}], ["x"]),
}  # fmt: skip
"""By field, values that are taken, and values that are refused."""


def test_each_field_is_honoured_or_refused_by_name(http: httpx.Client) -> None:
    assert TAKEN.keys() == FIELDS.keys()
    for name, (taken, refused) in TAKEN.items():
        for value in [*taken, None]:
            body = {"model": "told", "input": SAID, name: value}
            if value is None and name in ("model", "input"):
                continue
            found = http.post(RESPONSES, json=body)
            assert found.status_code == 200, (name, value, found.text)
        for value in refused:
            found = http.post(RESPONSES, json={"model": "told", "input": SAID, name: value})
            error = found.json()["error"]
            assert (found.status_code, error["type"]) == (400, "invalid_request_error"), (name, value)
            assert error["param"].split(".")[0].split("[")[0] == name, error
    found = http.post(RESPONSES, json={"model": "told", "input": SAID, "odd": 1})
    assert found.json()["error"]["code"] == "unknown_parameter"


def test_answers_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="words", input="hello you", instructions="Be brief.")
    assert (whole.output_text, whole.status, whole.instructions) == ("hello you ", "completed", "Be brief.")
    assert whole.usage is not None and whole.usage.input_tokens == 2
    with client.responses.stream(model="words", input="hello you") as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert streamed.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text


def test_a_cut_answer_is_incomplete(client: openai.OpenAI) -> None:
    steps = json.dumps([[{"text": "on", "finish_reason": "length"}]])
    cut = client.responses.create(model="told", input=steps, max_output_tokens=1)
    assert cut.status == "incomplete" and cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    *_, last = client.responses.create(model="told", input=steps, stream=True)
    assert last.type == "response.incomplete" and last.response.output[0].status == "incomplete"


def test_reasoning_and_logprobs(client: openai.OpenAI) -> None:
    thinks = client.responses.create(model="thinks", input="<think>why not</think>yes")
    thought, said = thinks.output
    assert thought.type == "reasoning" and thought.content is not None and said.type == "message"
    assert (thought.content[0].text, thinks.output_text) == ("why not", "yes ")
    token = {"token": "hi", "logprob": -0.5, "bytes": [104, 105], "top_logprobs": []}
    steps = json.dumps([[{"text": "hi", "logprobs": [token]}]])
    found = client.responses.create(
        model="told", input=steps, include=["message.output_text.logprobs"], top_logprobs=1
    )
    (item,) = found.output
    assert item.type == "message" and item.content[0].type == "output_text"
    assert item.content[0].logprobs is not None and item.content[0].logprobs[0].logprob == -0.5


def test_a_loop_of_tools_by_the_template_alone(client: openai.OpenAI) -> None:
    asked: Any = [
        {"role": "user", "content": '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'}
    ]
    with client.responses.stream(model="calls", input=asked, tools=[TOOL]) as stream:
        assert "response.function_call_arguments.delta" in [event.type for event in stream]
        called = stream.get_final_response()
    (call,) = called.output
    assert call.type == "function_call" and (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
    asked += [
        call.model_dump(exclude={"parsed_arguments"}),
        {"type": "function_call_output", "call_id": call.call_id, "output": "the sum"},
    ]
    assert client.responses.create(model="calls", input=asked, tools=[TOOL]).output_text == "the sum "


def test_structured_output_is_parsed(client: openai.OpenAI) -> None:
    class City(BaseModel):
        city: str

    steps = json.dumps([[{"text": '{"city": "Rome"}'}]])
    assert client.responses.parse(model="told", input=steps, text_format=City).output_parsed == City(
        city="Rome"
    )


def test_a_schema_that_the_model_can_not_hold_is_refused_by_its_field(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    with pytest.raises(openai.BadRequestError, match=r"text\.format") as caught:
        client.responses.create(model="words", input="a", text=form)
    assert caught.value.param == "text.format"


def test_pictures_go_where_the_model_takes_them(client: openai.OpenAI) -> None:
    parts: Any = [
        {"type": "input_text", "text": "what"},
        {"type": "input_image", "image_url": f"data:image/png;base64,{TINY_PNG}", "detail": "auto"},
    ]
    asked: Any = [{"role": "user", "content": parts}]
    assert client.responses.create(model="sees", input=asked).output_text == f"1 picture {TINY_PNG}"
    with pytest.raises(openai.BadRequestError, match="only text message is supported"):
        client.responses.create(model="words", input=asked)


def test_failures_before_and_after_the_first_token(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="the engine is on fire"):
        client.responses.create(model="words", input="fail", stream=True)
    *_, last = client.responses.create(model="words", input="break", stream=True)
    assert last.type == "response.failed" and last.response.error is not None
    assert (last.response.status, last.response.error.message) == ("failed", "the engine is on fire")


def test_a_model_that_does_not_chat_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="`vectors` does not answer /v1/responses"):
        client.responses.create(model="vectors", input="a")


@pytest.mark.parametrize("path", [RESPONSES, "/v1/messages"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels(tmp_path: Path, path: str, stream: bool) -> None:
    write_words(tmp_path)
    message = {"messages": [{"role": "user", "content": "endless"}], "max_tokens": 1 << 20}
    asked = {"model": "words", "stream": stream, **({"input": "endless"} if path == RESPONSES else message)}
    with serving(tmp_path) as server:
        with raw_http(server.http_address) as connection:
            connection.send(request("POST", path, json.dumps(asked).encode()))
            eventually(lambda: running(tmp_path) == 1, "the model answers")
            if stream:
                assert connection.socket.recv(100)
        eventually(lambda: running(tmp_path) == 0, "the model is cancelled")


# Responses that are kept


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A server that keeps responses; its model answers with all messages."""
    models = tmp_path_factory.mktemp("models")
    write_words(models)
    (models / "words" / "1" / "chat_template.jinja").write_text(
        "{% for each in messages %}{{ each.role }}:{{ each.content }} {% endfor %}"
    )
    with serving(models, flags=["--openai-store-bytes=100000"]) as server:
        yield server


@pytest.fixture
def keeper(keeping: LocalServer) -> Iterator[openai.OpenAI]:
    url = f"http://{keeping.http_address}/v1"
    with closing(openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=WAIT_S)) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on(keeper: openai.OpenAI, stream: bool) -> None:
    first = keeper.responses.create(model="words", input="a", instructions="brief")
    assert first.store is True and first.output_text.split() == ["system:brief", "user:a"]
    asked: Any = {"model": "words", "input": "b", "previous_response_id": first.id}
    if stream:
        with keeper.responses.stream(**asked) as events:
            second = events.get_final_response()
    else:
        second = keeper.responses.create(**asked)
    said = ["user:a", "assistant:system:brief", "user:a", "user:b"]
    assert second.output_text.split() == said, "instructions hold for one response"
    assert second.previous_response_id == first.id
    third = keeper.responses.create(model="words", input="c", previous_response_id=second.id)
    assert third.output_text.split()[-1] == "user:c" and len(third.output_text.split()) == 2 * len(said) + 1


def test_what_is_kept_can_be_read_and_dropped(keeper: openai.OpenAI) -> None:
    made = keeper.responses.create(model="words", input="a")
    assert keeper.responses.retrieve(made.id).output_text == made.output_text
    with pytest.raises(openai.BadRequestError, match="`stream` is not supported"):
        keeper.responses.retrieve(made.id, stream=True)
    keeper.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        keeper.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="not found") as caught:
        keeper.responses.create(model="words", input="b", previous_response_id=made.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")


def test_what_is_not_to_be_kept_is_not(keeper: openai.OpenAI) -> None:
    made = keeper.responses.create(model="words", input="a", store=False)
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        keeper.responses.retrieve(made.id)
    large = keeper.responses.create(model="words", input="a" * 60_000)
    assert large.store is False, "it is above --openai-store-bytes"


def test_a_conversation_has_the_limit_of_a_body(tmp_path: Path) -> None:
    write_words(tmp_path)
    flags = ["--openai-store-bytes=100000", "--http-max-input-size=4000"]
    with serving(tmp_path, flags=flags) as server:
        url = f"http://{server.http_address}/v1"
        with closing(openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=WAIT_S)) as made:
            first = made.responses.create(model="words", input="a" * 3000)
            assert first.store is True
            with pytest.raises(openai.APIStatusError, match="exceeds the maximum allowed input size"):
                made.responses.create(model="words", input="b", previous_response_id=first.id)


def test_a_server_that_keeps_nothing_says_so(client: openai.OpenAI) -> None:
    assert client.responses.create(model="words", input="a").store is False
    for field in ({"store": True}, {"previous_response_id": "resp_1"}):
        with pytest.raises(openai.BadRequestError, match="--openai-store-bytes") as caught:
            client.responses.create(model="words", input="a", **field)
        assert caught.value.param in field
