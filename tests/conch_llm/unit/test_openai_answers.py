"""Answers: exact bytes of streams, and that a stream adds up to the whole answer however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch_llm.deltas import Delta
from conch_llm.frontend.openai_answers import (
    CHAT_ANSWER,
    COMPLETION_ANSWER,
    AnswerHead,
    AnswerKind,
    StreamedAnswer,
    WholeAnswer,
    joined,
)
from conch_llm.language.tool_calls import tool_call_parser

TOKEN: dict[str, Any] = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}


def head(kind: AnswerKind, choices: int = 1, named: bool = False) -> AnswerHead:
    return AnswerHead(kind, "1", 1700000000, "org/m", choices, named)


def test_a_chat_streams_these_bytes() -> None:
    answer = StreamedAnswer(head(CHAT_ANSWER), include_usage=True)
    deltas = [
        Delta('Hé\n"', tokens=1),
        Delta(tool_calls=[{"index": 0, "id": "call_1", "type": "function", "function": {"name": "f"}}]),
        Delta(" \U0001f600", finish_reason="stop", stop_reason="END", prompt_tokens=3, tokens=2),
    ]
    for delta in deltas:
        answer.usage.add(delta)
    start = (
        'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"org/m",'
        '"choices":['
    )
    end = '],"usage":null}\n\n'
    call = '{"index":0,"id":"call_1","type":"function","function":{"name":"f"}}'
    assert (answer.events(deltas) + answer.end()).decode() == (
        f'{start}{{"index":0,"delta":{{"role":"assistant","content":""}},"finish_reason":null}}{end}'
        f'{start}{{"index":0,"delta":{{"content":"Hé\\n\\""}},"finish_reason":null}}{end}'
        f'{start}{{"index":0,"delta":{{"tool_calls":[{call}]}},"finish_reason":null}}{end}'
        f'{start}{{"index":0,"delta":{{"content":" \U0001f600"}},"finish_reason":"stop","stop_reason":"END"}}'
        f"{end}"
        f'{start}],"usage":{{"prompt_tokens":3,"completion_tokens":3,"total_tokens":6}}}}\n\n'
        "data: [DONE]\n\n"
    )


def test_a_completion_streams_these_bytes() -> None:
    answer = StreamedAnswer(head(COMPLETION_ANSWER))
    start = 'data: {"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"org/m","choices":['
    assert (answer.events([Delta("a")]) + answer.end()).decode() == (
        f'{start}{{"index":0,"text":"a","logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{start}{{"index":0,"text":"","logprobs":null,"finish_reason":"stop"}}]}}\n\n'
        "data: [DONE]\n\n"
    )


def test_a_chunk_has_one_entry_for_each_call() -> None:
    """Some clients take the last entry of a chunk as a call's name and arguments."""
    parser = tool_call_parser("hermes")
    written = "".join(
        f'<tool_call>{{"name": "{name}", "arguments": {{"a": 1}}}}</tool_call>' for name in ("f", "g")
    )
    text, calls = parser.feed(written)
    assert not text
    streamed = StreamedAnswer(head(CHAT_ANSWER)).events([Delta(tool_calls=calls)]).decode()
    found = json.loads(streamed.split("data: ")[-1])["choices"][0]["delta"]["tool_calls"]
    assert [list(each) for each in found] == [["index", "id", "type", "function"]] * 2
    functions = [(each["index"], each["function"]) for each in found]
    assert functions == [(index, {"name": name, "arguments": '{"a": 1}'}) for index, name in enumerate("fg")]


def test_log_probabilities_of_several_deltas_may_lack_alternatives() -> None:
    answer = WholeAnswer(head(COMPLETION_ANSWER))
    part = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": None, "text_offset": [0]}
    answer.add([Delta("a", logprobs=part), Delta("a", logprobs=part), Delta("", finish_reason="stop")])
    (choice,) = json.loads(answer.body())["choices"]
    assert choice["logprobs"]["tokens"] == ["a", "a"] and choice["logprobs"]["top_logprobs"] is None


def test_a_text_chunk_is_small() -> None:
    answer = StreamedAnswer(AnswerHead(CHAT_ANSWER, "f" * 32, 1700000000, "m", 1))
    answer.events([Delta("a")])
    assert len(answer.events([Delta(" word")])) < 200


def test_the_whole_answers_have_these_members() -> None:
    chat = WholeAnswer(head(CHAT_ANSWER))
    chat.add(
        [
            Delta(reasoning="so", prompt_tokens=4, cached_tokens=2, tokens=1),
            Delta("a", logprobs=[TOKEN], tokens=1),
            Delta("b", logprobs=[TOKEN], tokens=1, finish_reason="length"),
        ]
    )
    assert json.loads(chat.body()) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "org/m",
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ab", "reasoning": "so"},
                "logprobs": {"content": [TOKEN, TOKEN]},
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 3,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    text = WholeAnswer(head(COMPLETION_ANSWER))
    lists: dict[str, list[Any]] = {
        "tokens": ["a"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"a": -0.5}],
        "text_offset": [0],
    }
    text.add([Delta("a", logprobs=lists), Delta("a", logprobs=lists)])
    (choice,) = json.loads(text.body())["choices"]
    assert choice == {
        "index": 0,
        "text": "aa",
        "logprobs": {name: 2 * values for name, values in lists.items()},
        "finish_reason": "stop",
    }


def test_usage_that_is_not_counted_is_null_and_has_no_chunk() -> None:
    whole, stream = WholeAnswer(head(CHAT_ANSWER)), StreamedAnswer(head(CHAT_ANSWER), include_usage=True)
    whole.add([Delta("a", finish_reason="stop")])
    assert json.loads(whole.body())["usage"] is None
    assert b'"choices":[]' not in stream.events([Delta("a", finish_reason="stop")]) + stream.end()


@pytest.mark.parametrize(("named", "reason"), [(False, "tool_calls"), (True, "stop")])
def test_a_call_ends_with_a_reason_that_the_model_need_not_tell(named: bool, reason: str) -> None:
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    whole = WholeAnswer(head(CHAT_ANSWER, named=named))
    whole.add([Delta(tool_calls=[call])])
    (choice,) = json.loads(whole.body())["choices"]
    assert choice["finish_reason"] == reason
    assert choice["message"]["content"] is None
    stream = StreamedAnswer(head(CHAT_ANSWER, named=named))
    events = _parsed(stream.events([Delta(tool_calls=[call])]) + stream.end())
    assert events[-1]["choices"][0]["finish_reason"] == reason


TEXTS = st.text(st.characters(), max_size=5)  # lone surrogates included
DELTAS = st.lists(
    st.builds(
        Delta,
        text=TEXTS,
        index=st.integers(0, 2),
        reasoning=st.sampled_from(["", "", "why"]),
        tool_calls=st.sampled_from(
            [(), (), ({"index": 0, "id": "c"},), ({"index": 0, "function": {"arguments": "{"}},)]
        ),
        tokens=st.integers(0, 2),
        logprobs=st.sampled_from([None, None, [TOKEN]]),
    ),
    max_size=12,
)


@given(DELTAS, st.booleans(), st.booleans(), st.integers(1, 4))
def test_a_stream_adds_up_to_the_whole(deltas: list[Delta], continuous: bool, slow: bool, step: int) -> None:
    whole = WholeAnswer(head(CHAT_ANSWER, 3))
    whole.add(deltas)
    stream = StreamedAnswer(head(CHAT_ANSWER, 3), continuous, continuous)
    sent = b""
    for start in range(0, len(deltas), step):
        part = deltas[start : start + step]
        sent += stream.events(joined(part) if slow else part)
    sent += stream.end()
    found: list[dict[str, Any]] = [
        {"content": "", "reasoning": "", "arguments": "", "logprobs": [], "ends": []} for _ in range(3)
    ]
    for event in _parsed(sent):
        for choice in event["choices"]:
            mine, delta = found[choice["index"]], choice["delta"]
            mine["content"] += delta.get("content", "")
            mine["reasoning"] += delta.get("reasoning", "")
            mine["logprobs"] += (choice.get("logprobs") or {"content": []})["content"]
            for call in delta.get("tool_calls", ()):
                mine["arguments"] += call.get("function", {}).get("arguments", "")
            if choice["finish_reason"] is not None:
                mine["ends"].append(choice["finish_reason"])
    for choice, mine in zip(json.loads(whole.body())["choices"], found, strict=True):
        message = choice["message"]
        assert mine["content"] == (message["content"] or "")
        assert mine["reasoning"] == message.get("reasoning", "")
        assert mine["logprobs"] == (choice["logprobs"] or {"content": []})["content"]
        assert mine["ends"] == [choice["finish_reason"]]
        calls = message.get("tool_calls", [{"function": {"arguments": ""}}])
        assert mine["arguments"] == calls[0]["function"]["arguments"]


def _parsed(sent: bytes) -> list[dict[str, Any]]:
    events = sent.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(each.removeprefix("data: ")) for each in events[:-2]]
