"""The table of fields: what each takes, and that an error names the field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conch_llm.frontend import request_fields
from conch_llm.frontend.openai_errors import RequestError
from conch_llm.frontend.request_fields import chat_fields, checked, completion_fields

TABLES = {
    name: value
    for name, value in vars(request_fields).items()
    if name.endswith("_FIELDS") and isinstance(value, dict)
}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize("table", TABLES)
def test_each_field_refuses_a_wrong_type_and_is_named(table: str) -> None:
    for name in TABLES[table]:
        refused = 0
        values: tuple[Any, ...] = ("text", "", 7, -1e300, True, [], {}, [[]], [{}], {"a": 1})
        for value in values:
            try:
                checked({name: value}, TABLES[table])
            except RequestError as error:
                assert error.param is not None and error.param.split(".")[0].split("[")[0] == name
                assert name in error.message
                refused += 1
        assert refused >= 3, name


@pytest.mark.parametrize("table", TABLES)
def test_null_and_unknown_fields_are_as_none(table: str) -> None:
    assert checked({**dict.fromkeys(TABLES[table]), "unknown": object()}, TABLES[table]) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", 2),
        ("top_p", 1.0),
        ("seed", 2**64 - 1),
        ("n", 128),
        ("stop", ["a", "b", "c", "d"]),
        ("presence_penalty", -2),
        ("top_k", -1),
        ("repetition_penalty", 1.5),
        ("max_tokens", 1),
        ("logit_bias", {"7": 1}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}),
    ],
)
def test_takes_the_ends_of_ranges(name: str, value: Any) -> None:
    assert chat_fields({**CHAT, name: value})[name] == value
    assert completion_fields({**COMPLETION, name: value})[name] == value


@pytest.mark.parametrize(
    ("more", "param", "text"),
    [
        ({"temperature": 2.1}, "temperature", "`temperature` must be a number from 0 to 2, got 2.1"),
        ({"temperature": True}, "temperature", "must be a number from 0 to 2, got true"),
        ({"top_p": 1.01}, "top_p", "from 0 to 1"),
        ({"n": 0}, "n", "a whole number from 1 to 128, got 0"),
        ({"n": 1.5}, "n", "a whole number"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"stop": [""]}, "stop", "none of them empty"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "from 0 to 20"),
        ({"top_logprobs": 2}, "top_logprobs", "can only be used when `logprobs` is True"),
        ({"stream_options": {}}, "stream_options", "can only be used when `stream` is True"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or"),
        ({"messages": []}, "messages", "a message at least"),
        ({"messages": None}, "messages", "`messages` is missing"),
        ({"messages": [{"role": "king", "content": ""}]}, "messages[0].role", "one of system"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "a text or a list of parts, got null"),
        ({"tool_choice": "required"}, "tool_choice", "requires `tools`"),
        (
            {"tool_choice": {"function": {"name": "sub"}}, "tools": [TOOL]},
            "tool_choice",
            "Tool 'sub' has not",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "an object, got null"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
    ],
)
def test_refuses_with_the_name_of_the_field(more: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat_fields({**CHAT, **more})
    assert caught.value.param == param
    assert text in caught.value.message


MANY = [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2049}] * 2


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"model": "m" * 1025}, "a name of at most 1024 bytes, got a longer text"),
        ({"model": "é" * 513}, "a name of at most 1024 bytes"),
        ({"stop": ["a"] * 5}, "at most 4 texts, got a list"),
        ({"stop": "a" * 1025}, "longer than 1024 characters"),
        ({"bad_words": ["a"] * 129}, "at most 128 texts"),
        ({"bad_words": ["a" * 1025]}, "at most 1024 characters"),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "at most 1024 tokens"),
        ({"stop_token_ids": [1] * 4097}, "at most 4096 token ids"),
        ({"allowed_token_ids": np.ones(16385, np.int64)}, "at most 16384 token ids, got a list"),
        ({"messages": [{"role": "user", "content": "hi"}] * 4097}, "at most 4096 messages"),
        ({"messages": MANY}, "at most 4096 messages, and as many parts and tool calls in all, got 4098"),
        ({"tools": [TOOL] * 129}, "at most 128 tools"),
        ({"tools": [{**TOOL, "more": ["a" * 1000] * 300}]}, "at most 262144 characters and values"),
        ({"structured_outputs": {"choice": ["a"] * 40_000}}, "at most 65536 characters and values"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a" * 70_000: 1}}}},
            "at most 65536 characters and values",
        ),
        ({"chat_template_kwargs": {"a": [[]] * 40_000}}, "at most 65536 characters and values"),
        ({"chat_template": "a" * 65_537}, "at most 65536 characters"),
        ({"documents": [{"text": "a" * (1 << 21)}] * 3}, "at most 4194304 characters and values"),
        *(
            ({name: "a" * 1025}, "at most 1024 characters")
            for name in ("user", "cache_salt", "reasoning_effort")
        ),
    ],
)
def test_what_is_worked_on_is_bounded(more: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat_fields({**CHAT, **more})
    assert text in caught.value.message
    (name,) = more
    assert caught.value.param is not None and caught.value.param.startswith(name)


@pytest.mark.parametrize(
    ("table", "name", "value"),
    [
        ("COMPLETION_FIELDS", "prompt", "a" * ((1 << 22) + 1)),
        ("EMBEDDING_FIELDS", "input", ["a"] * 2049),
        ("EMBEDDING_FIELDS", "input", ["a" * (1 << 21)] * 3),
        ("EMBEDDING_FIELDS", "user", "a" * 1025),
        ("SCORE_FIELDS", "text_1", "a" * ((1 << 22) + 1)),
        ("SCORE_FIELDS", "text_2", ["a"] * 2049),
        ("RERANK_FIELDS", "query", "a" * ((1 << 22) + 1)),
        ("RERANK_FIELDS", "documents", ["a"] * 2049),
        ("RERANK_FIELDS", "documents", [{"text": "a" * (1 << 21)}] * 3),
        ("TOKENIZE_FIELDS", "prompt", "a" * ((1 << 19) + 1)),
        ("DETOKENIZE_FIELDS", "tokens", [1] * ((1 << 17) + 1)),
    ],
)
def test_vectors_and_tokens_are_bounded(table: str, name: str, value: Any) -> None:
    with pytest.raises(RequestError, match="at most"):
        checked({name: value}, TABLES[table])


def test_prompts_times_choices_are_bounded() -> None:
    assert completion_fields({**COMPLETION, "prompt": ["a"] * 64, "n": 2})["n"] == 2
    with pytest.raises(RequestError, match="ask for 129 answers, and --openai-max-answers allows 128"):
        completion_fields({**COMPLETION, "prompt": ["a"] * 43, "n": 3})


def test_an_array_of_token_ids_is_a_prompt() -> None:
    ids = np.array([1, 2], np.int64)
    assert completion_fields({**COMPLETION, "prompt": ids})["prompt"] == [ids]
    with pytest.raises(RequestError):
        completion_fields({**COMPLETION, "prompt": np.array([1, -1], np.int64)})


def test_a_completion_of_no_tokens_needs_echo() -> None:
    assert completion_fields({**COMPLETION, "max_tokens": 0, "echo": True})["max_tokens"] == 0
    with pytest.raises(RequestError, match="unless `echo` is true, got 0") as caught:
        completion_fields({**COMPLETION, "max_tokens": 0})
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_a_prompt_has_four_forms(prompt: Any, prompts: list[Any]) -> None:
    assert completion_fields({"model": "m", "prompt": prompt})["prompt"] == prompts


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], [1, "a"], 7, [-1], [True]])
def test_a_prompt_of_another_form_is_refused(prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        completion_fields({"model": "m", "prompt": prompt})
    assert caught.value.param is not None and caught.value.param.startswith("prompt")


def test_a_named_tool_is_taken() -> None:
    assert chat_fields({**CHAT, "tools": [TOOL], "tool_choice": NAMED})["tool_choice"] == NAMED
