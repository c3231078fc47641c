"""Requests of the Responses API and the Messages API as chats."""

from __future__ import annotations

import re
from typing import Any

import pytest
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming

from conch_llm.calls.generation import FieldError
from conch_llm.frontend.dialects import messages_request as messages
from conch_llm.frontend.dialects import responses_request as responses
from conch_llm.frontend.dialects.field_table import further_fields, renamed
from conch_llm.frontend.openai_errors import RequestError
from conch_llm.frontend.request_fields import chat_fields

HEADERS = {"user_profile_id", "workspace_id"}
"""Arguments of Anthropic's client that are sent as headers."""
PNG = "data:image/png;base64,aGk="
FILE = {"type": "input_image", "file_id": "f"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "of a city", "parameters": SCHEMA, "strict": True}
CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city":"Rome"}'},
}


def response_of(**fields: Any) -> responses.ResponsesRequest:
    return responses.responses_request({"model": "m", "input": "hi", **fields})


def message_of(**fields: Any) -> messages.MessagesRequest:
    body = {"model": "m", "max_tokens": 7, "messages": [{"role": "user", "content": "hi"}]}
    return messages.messages_request({**body, **fields})


@pytest.mark.parametrize(
    ("table", "parameters"),
    [
        (responses.FIELDS, ResponseCreateParamsStreaming),
        (messages.FIELDS, MessageCreateParamsStreaming),
        (messages.COUNT_FIELDS, MessageCountTokensParams),
    ],
)
def test_the_tables_have_every_field_of_the_clients(table: dict[str, Any], parameters: Any) -> None:
    public = {name for base in parameters.__mro__ for name in getattr(base, "__annotations__", ())}
    assert public - HEADERS <= table.keys()
    # Of betas, of former versions, and of chats.
    beyond = {"context_management", "mcp_servers", "temperature", "top_p", *further_fields()}
    assert table.keys() - public <= beyond


def test_a_response_is_asked_for_as_a_chat() -> None:
    asked = response_of(
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "input_text", "text": "Where?"}]},
            {"role": "user", "content": [{"type": "input_image", "image_url": PNG, "detail": "low"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
                {"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [
                {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
            {"type": "function_call", "id": "fc_1", "call_id": "call_1", **CALL["function"]},
            {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        ],
        tools=[{"type": "function", **FUNCTION}],
        tool_choice={"type": "function", "name": "weather"},
        max_output_tokens=9,
        temperature=0.5,
        top_logprobs=2,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}},
        top_k=3,
        stream=True,
    )  # fmt: skip
    assert asked.chat == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief.\n\nBe kind."},
            {"role": "user", "content": "Where?"},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PNG, "detail": "low"}}]},
            {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [CALL]},
            {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "max_completion_tokens": 9,
        "temperature": 0.5,
        "logprobs": True,
        "top_logprobs": 2,
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
        "top_k": 3,
        "stream": True,
    }  # fmt: skip
    assert chat_fields(asked.chat)
    assert [turn["role"] for turn in asked.turns] == ["system", "user", "user", "assistant", "tool"]


def test_a_message_is_asked_for_as_a_chat() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    asked = message_of(
        system=[{"type": "text", "text": "Be brief.", **cached}],
        messages=[
            {"role": "user", "content": [
                {"type": "text", "text": "Where?"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": "no key", "is_error": True,
                 **cached},
                {"type": "text", "text": "Well?"}]},
        ],
        tools=[{"name": "weather", "description": "of a city", "input_schema": SCHEMA, "strict": True}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        stop_sequences=["END"],
        top_k=3,
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        metadata={"user_id": "u"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )  # fmt: skip
    assert asked.chat == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [
                {"type": "text", "text": "Where?"}, {"type": "image_url", "image_url": {"url": PNG}}]},
            {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": [
                {"type": "text", "text": "Error:"}, {"type": "text", "text": "no key"}]},
            {"role": "user", "content": "Well?"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_completion_tokens": 7,
        "stop": ["END"],
        "top_k": 3,
        "chat_template_kwargs": {"enable_thinking": True},
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
        "user": "u",
    }  # fmt: skip
    assert chat_fields(asked.chat)
    assert (asked.stops, asked.hides_thinking) == (["END"], False)


def test_allowed_tools_leave_the_others_out() -> None:
    tools = [{"type": "function", "name": name} for name in ("a", "b")]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "b"}]}
    chat = response_of(tools=tools, tool_choice=choice).chat
    assert ([tool["function"]["name"] for tool in chat["tools"]], chat["tool_choice"]) == (["b"], "required")


@pytest.mark.parametrize(
    ("item", "where"),
    [
        ({"type": "item_reference", "id": "rs_1"}, "input[0].type"),
        ({"type": "reasoning", "summary": [], "encrypted_content": "x"}, "input[0].encrypted_content"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [FILE]}, "input[0].content[0].file_id"),
        ({"role": "robot", "content": "a"}, "input[0].role"),
        ({"role": "user", "content": "a", "odd": 1}, "input[0].odd"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[0].call_id"),
        ("text", "input[0]"),
    ],
)  # fmt: skip
def test_items_that_a_chat_has_no_place_for_are_named(item: Any, where: str) -> None:
    with pytest.raises(RequestError, match=re.escape(f"`{where}`")) as caught:
        response_of(input=[item])
    assert caught.value.param == where


@pytest.mark.parametrize(
    ("block", "where"),
    [
        ({"type": "document", "source": {}}, "messages[0].content[0].type"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "messages[0].content[0].source.type"),
        ({"type": "text", "text": "a", "citations": [1]}, "messages[0].content[0].citations"),
        ({"type": "text"}, "messages[0].content[0].text"),
        ({"type": "tool_result", "content": "a"}, "messages[0].content[0].tool_use_id"),
    ],
)
def test_blocks_that_a_chat_has_no_place_for_are_named(block: Any, where: str) -> None:
    with pytest.raises(RequestError, match=re.escape(f"`{where}`")):
        message_of(messages=[{"role": "user", "content": [block]}])


def test_an_answer_that_is_begun_is_refused() -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I"}]
    with pytest.raises(RequestError, match=r"messages\[1\]"):
        message_of(messages=turns)


def test_errors_about_fields_of_chats_name_those_of_the_api() -> None:
    error = renamed(FieldError("`response_format` can't be used", "response_format"), responses.NAMES)
    assert isinstance(error, RequestError)
    assert (error.message, error.param) == ("`text.format` can't be used", "text.format")
    error = renamed(RequestError("messages[1].content: no", None), responses.NAMES)
    assert isinstance(error, RequestError)
    assert (error.message, error.param) == ("input: no", "input")
    same = RequestError("`temperature` is hot", "temperature")
    assert renamed(same, responses.NAMES) is same
