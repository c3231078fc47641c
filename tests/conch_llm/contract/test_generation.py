"""Chats and completions with OpenAI's client, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from tests.support.servers import WAIT_S, LocalServer

TOKEN = {"token": "hi", "logprob": -0.5, "bytes": [104, 105], "top_logprobs": []}
CALL: list[dict[str, Any]] = [
    {"index": 0, "id": "call_1", "type": "function", "function": {"name": "add", "arguments": ""}},
    {"index": 0, "function": {"arguments": '{"a": '}},
    {"index": 0, "function": {"arguments": "1}"}},
]
SUM: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def told(*steps: list[dict[str, Any]]) -> Any:
    """Messages for the model whose requests name its deltas."""
    return [{"role": "user", "content": json.dumps(steps)}]


def says(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_completes(client: openai.OpenAI) -> None:
    found = client.completions.create(model="words", prompt="one two three")
    assert found.choices[0].text == "one two three "
    assert (found.object, found.model, found.choices[0].finish_reason) == ("text_completion", "words", "stop")


@pytest.mark.parametrize(
    ("limits", "words"),
    [({}, 16), ({"max_tokens": 2}, 2)],
)
def test_a_completion_has_16_tokens_or_as_many_as_asked(
    client: openai.OpenAI, limits: dict[str, int], words: int
) -> None:
    found = client.completions.create(model="words", prompt="w " * 20 + "w", **limits)
    assert len(found.choices[0].text.split()) == words


@pytest.mark.parametrize(
    ("limits", "words"),
    [({}, 21), ({"max_tokens": 2}, 2), ({"max_tokens": 2, "max_completion_tokens": 3}, 3)],
)
def test_a_chat_has_no_limit_and_the_newer_field_counts(
    client: openai.OpenAI, limits: dict[str, int], words: int
) -> None:
    found = client.chat.completions.create(
        model="words",
        messages=says("w " * 20 + "w"),
        **limits,
    )
    assert len(found.choices[0].message.content.split()) == words


def test_several_prompts_and_choices_have_their_indices(client: openai.OpenAI) -> None:
    found = client.completions.create(model="words", prompt=["a", "b"], n=2)
    assert [(each.index, each.text) for each in found.choices] == [(0, "a "), (1, "a "), (2, "b "), (3, "b ")]
    texts = {index: "" for index in range(4)}
    ends = []
    for chunk in client.completions.create(model="words", prompt=["a c", "b d"], n=2, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.finish_reason is not None:
            ends.append(choice.index)
    assert texts == {0: "a c ", 1: "a c ", 2: "b d ", 3: "b d "}
    assert sorted(ends) == [0, 1, 2, 3]


@pytest.mark.parametrize("model", ["words", "told"])
def test_an_echo_without_tokens_is_the_prompt(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "prompt": ["a", "b"], "n": 2, "echo": True, "max_tokens": 0}
    ends = [(0, "a", "length"), (1, "a", "length"), (2, "b", "length"), (3, "b", "length")]
    found = client.completions.create(**asked)
    assert [(each.index, each.text, each.finish_reason) for each in found.choices] == ends
    counted = None if found.usage is None else (found.usage.prompt_tokens, found.usage.completion_tokens)
    assert counted == {"words": (2, 0), "told": None}[model]  # the prompts' tokens, by a tokenizer.json
    streamed = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    assert [(each.index, each.text, each.finish_reason) for each in streamed] == ends
    for refused, named in (({"prompt": [1, 2]}, "prompts of text"), ({"logprobs": 1}, "`logprobs`")):
        with pytest.raises(openai.BadRequestError, match=named):
            client.completions.create(**{**asked, **refused})


def test_tokens_that_the_model_has_not_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="3 is no token of model 'words'") as caught:
        client.completions.create(model="words", prompt=[[1], [2, 3]])
    assert caught.value.param == "prompt"


def test_a_chat_has_the_prompt_of_its_template(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model="gpt", messages=says("hello you"))
    assert found.choices[0].message.content == "hello you "
    assert found.model == "gpt"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_an_answer(client: openai.OpenAI, stream: bool) -> None:
    found = client.completions.create(
        model="words", prompt="one two three four", stop=["o th", "x"], stream=stream
    )
    if isinstance(found, openai.Stream):
        chunks = [chunk.choices[0] for chunk in found]
        text, reason = "".join(each.text for each in chunks), chunks[-1].finish_reason
    else:
        text, reason = found.choices[0].text, found.choices[0].finish_reason
    assert (text, reason) == ("one tw", "stop")


def test_reasoning_logprobs_and_usage_of_a_model_that_takes_the_body(client: openai.OpenAI) -> None:
    messages = told(
        [{"reasoning": "greet", "prompt_tokens": 7, "cached_tokens": 4, "tokens": 1}],
        [{"text": "hi", "logprobs": [TOKEN], "tokens": 1, "finish_reason": "length"}],
    )
    found = client.chat.completions.create(model="told", messages=messages)
    (choice,) = found.choices
    assert (choice.message.content, choice.message.reasoning) == ("hi", "greet")
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert choice.logprobs.content[0].token == "hi"
    assert choice.finish_reason == "length"
    assert found.usage is not None and found.usage.prompt_tokens_details is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (7, 2, 9)
    assert found.usage.prompt_tokens_details.cached_tokens == 4


def test_tool_calls_whole_and_streamed(client: openai.OpenAI) -> None:
    messages = told(*([{"tool_calls": [call]}] for call in CALL), [{"finish_reason": "tool_calls"}])
    found = client.chat.completions.create(model="told", messages=messages)
    (choice,) = found.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.id, call.function.name, call.function.arguments) == ("call_1", "add", '{"a": 1}')
    with client.chat.completions.stream(model="told", messages=messages) as stream:
        (streamed,) = stream.get_final_completion().choices
    assert streamed.message.tool_calls is not None
    assert streamed.message.tool_calls[0].function.arguments == '{"a": 1}'


def test_usage_comes_last_if_asked_for_and_with_each_chunk_if_asked_for(client: openai.OpenAI) -> None:
    messages = told(
        [{"text": "a", "prompt_tokens": 3, "tokens": 1}],
        [{"text": "b", "tokens": 2, "finish_reason": "stop"}],
    )

    def chunks(**options: bool) -> list[Any]:
        return list(
            client.chat.completions.create(
                model="told",
                messages=messages,
                stream=True,
                stream_options=options or openai.omit,
            )
        )

    assert all(chunk.usage is None and chunk.choices for chunk in chunks())
    *before, last = chunks(include_usage=True)
    assert all(chunk.usage is None for chunk in before)
    assert last.choices == [] and last.usage.total_tokens == 6
    totals = [each.usage.total_tokens for each in chunks(include_usage=True, continuous_usage_stats=True)]
    assert totals == sorted(totals) and totals[-1] == 6 and totals[0] >= 3


def test_the_async_client_streams_side_by_side(server: LocalServer) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            model="words", messages=says(f"answer {number}"), stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        url = f"http://{server.http_address}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=WAIT_S) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(12)))

    assert asyncio.run(ask_all()) == [f"answer {number} " for number in range(12)]


def test_a_failure_in_mid_stream_is_an_event_that_the_client_raises(client: openai.OpenAI) -> None:
    texts = []
    with pytest.raises(openai.APIError, match="the engine is on fire"):
        for chunk in client.completions.create(model="words", prompt="break", stream=True):
            texts.append(chunk.choices[0].text)
    assert "".join(texts) == "one two "


def test_a_failure_before_the_first_token_is_a_status(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="the engine is on fire") as caught:
        client.completions.create(model="words", prompt="fail", stream=True)
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_a_text_model_calls_tools_by_its_parser(client: openai.OpenAI) -> None:
    messages = says('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    found = client.chat.completions.create(model="words", messages=messages, tools=[SUM])
    (choice,) = found.choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
    call = choice.message.tool_calls[0]
    assert call.type == "function" and call.function.name == "add"
    assert json.loads(call.function.arguments) == {"a": 1}


def test_a_forced_call_needs_a_model_that_takes_schemas(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model="words",
            messages=says("a"),
            tools=[SUM],
            tool_choice="required",
        )


def test_reasoning_is_split_from_the_answer(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model="thinks", messages=says("<think>why not</think>yes"))
    message = found.choices[0].message
    assert (message.content, message.reasoning) == ("yes ", "why not")
