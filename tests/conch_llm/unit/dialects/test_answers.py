"""Answers of the Responses API and the Messages API: their events say what the whole answers say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.errors import InternalError
from conch_llm.deltas import Delta
from conch_llm.frontend.answer_maker import Encoder
from conch_llm.frontend.dialects.messages_answer import MessageHead, StreamedMessage, WholeMessage
from conch_llm.frontend.dialects.responses_answer import ResponseHead, StreamedResponse, WholeResponse

RESPONSE = ResponseHead("r", 1, "m", False, {})
MESSAGE = MessageHead("m", "m", ["END"])
TOKEN = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}


def begun_call(index: int) -> dict[str, Any]:
    return {"index": index, "id": f"call_{index}", "function": {"name": "add", "arguments": ""}}


@st.composite
def answers(draw: st.DrawFn) -> list[Delta]:
    """Deltas of an answer: parts in any order, each in pieces, with tokens and an end, or without one."""
    deltas, calls = [Delta(prompt_tokens=5, cached_tokens=2)], 0
    for kind in draw(st.lists(st.sampled_from(["reasoning", "text", "call", "both"]), max_size=6)):
        pieces = draw(st.lists(st.text(max_size=3), min_size=1, max_size=3))
        if kind == "call":
            deltas.append(Delta(tool_calls=[begun_call(calls)], tokens=1))
            deltas += [
                Delta(tool_calls=[{"index": calls, "function": {"arguments": piece}}], tokens=1)
                for piece in ('{"a":', *map(json.dumps, pieces[:1]), "}")
            ]
            calls += 1
        elif kind == "reasoning":
            deltas += [Delta(reasoning=piece, tokens=1) for piece in pieces]
        else:
            thought = "so" if kind == "both" else ""
            deltas += [Delta(piece, reasoning=thought, tokens=1, logprobs=[TOKEN]) for piece in pieces]
    ends = [
        None,
        ("stop", None),
        ("stop", "END"),
        ("length", None),
        ("tool_calls", None),
        ("content_filter", None),
    ]
    end = draw(st.sampled_from(ends))
    return deltas if end is None else [*deltas, Delta(finish_reason=end[0], stop_reason=end[1])]


def events_of(answer: Encoder, deltas: Sequence[Delta], cut: int) -> Iterator[dict[str, Any]]:
    for delta in deltas:
        answer.usage.add(delta)
    sent = answer.events(deltas[:cut]) + answer.events(deltas[cut:]) + answer.end()
    for event in sent.decode().split("\n\n")[:-1]:
        name, _, data = event.partition("\ndata: ")
        found = json.loads(data)
        assert name == f"event: {found['type']}"
        yield found


@given(answers(), st.integers(0, 9))
def test_events_of_a_response_make_the_whole_response(deltas: list[Delta], cut: int) -> None:
    finished: list[Any] = []
    whole = WholeResponse(RESPONSE, finished.append)
    whole.add(deltas)
    wanted = json.loads(whole.body())
    events = list(events_of(StreamedResponse(RESPONSE, finished.append), deltas, cut))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{wanted['status']}"
    assert events[-1]["response"] == wanted == finished[0] == finished[1]
    texts: dict[int, str] = {}
    items: list[Any] = []
    for event in events[2:-1]:
        kind, index = event["type"], event["output_index"]
        if kind == "response.output_item.added":
            assert index == len(items) and event["item"]["status"] == "in_progress"
            texts[index] = ""
        assert index == len(items), "only the last item is open"
        if kind.endswith(".delta"):
            texts[index] += event["delta"]
        elif "text" in event or "arguments" in event:
            assert texts[index] == event.get("text", event.get("arguments"))
        elif kind == "response.output_item.done":
            items.append(event["item"])
        if "content_index" in event:
            assert event["content_index"] == 0
        if "item_id" in event:
            assert event["item_id"] == wanted["output"][index]["id"]
    assert items == wanted["output"]


@given(answers(), st.integers(0, 9))
def test_events_of_a_message_make_the_whole_message(deltas: list[Delta], cut: int) -> None:
    whole = WholeMessage(MESSAGE)
    whole.add(deltas)
    wanted = json.loads(whole.body())
    first, *events, last, stop = events_of(StreamedMessage(MESSAGE), deltas, cut)
    assert (first["type"], last["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    content: list[Any] = []
    texts: dict[int, str] = {}
    for event in events:
        index = event["index"]
        if event["type"] == "content_block_start":
            assert index == len(content)
            texts[index] = ""
            block = event["content_block"]
        elif event["type"] == "content_block_delta":
            ((_, piece),) = ((name, each) for name, each in event["delta"].items() if name != "type")
            texts[index] += piece
        elif block["type"] == "tool_use":
            content.append({**block, "input": json.loads(texts[index])})
        else:
            content.append({**block, block["type"]: texts[index]})
    assert {**first["message"], **last["delta"], "usage": last["usage"], "content": content} == wanted


@pytest.mark.parametrize(
    ("delta", "status", "reason", "stop"),
    [
        (Delta("a"), "completed", "end_turn", None),
        (Delta("a", finish_reason="stop", stop_reason="END"), "completed", "stop_sequence", "END"),
        (Delta("a", finish_reason="stop", stop_reason="x"), "completed", "end_turn", None),
        (Delta("a", finish_reason="length"), "incomplete", "max_tokens", None),
        (Delta("a", finish_reason="content_filter"), "incomplete", "refusal", None),
        (Delta(tool_calls=[begun_call(0)], finish_reason="stop"), "completed", "tool_use", None),
    ],
)
def test_ends(delta: Delta, status: str, reason: str, stop: str | None) -> None:
    response, message = WholeResponse(RESPONSE, lambda found: None), WholeMessage(MESSAGE)
    response.add([delta])
    message.add([delta])
    found = json.loads(response.body())
    assert (found["status"], found["output"][-1]["status"]) == (status, status)
    assert (found["incomplete_details"] is None) == (status == "completed")
    ended = json.loads(message.body())
    assert (ended["stop_reason"], ended["stop_sequence"]) == (reason, stop)


def test_an_answer_of_nothing_has_an_empty_text() -> None:
    response, message = WholeResponse(RESPONSE, lambda found: None), WholeMessage(MESSAGE)
    (item,) = json.loads(response.body())["output"]
    assert item["content"][0]["text"] == ""
    assert json.loads(message.body())["content"] == [{"type": "text", "text": ""}]


def test_tokens_of_reasoning_and_of_the_cache_are_counted_apart() -> None:
    deltas = [
        Delta(prompt_tokens=5, cached_tokens=2, reasoning="a", tokens=1),
        Delta(tokens=1),
        Delta("b", tokens=4),
    ]
    response, message = WholeResponse(RESPONSE, lambda found: None), WholeMessage(MESSAGE)
    response.add(deltas)
    message.add(deltas)
    usage = json.loads(response.body())["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (5, 6, 11)
    assert usage["input_tokens_details"]["cached_tokens"] == 2
    assert usage["output_tokens_details"] == {"reasoning_tokens": 2}
    usage = json.loads(message.body())["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (3, 2, 6)


def test_log_probabilities_of_text_that_is_held_back_come_with_the_next_text() -> None:
    deltas = [Delta(logprobs=[TOKEN]), Delta(logprobs=[TOKEN]), Delta("ab", logprobs=[TOKEN])]
    answer = StreamedResponse(RESPONSE, lambda found: None)
    events = list(events_of(answer, [*deltas, Delta(logprobs=[TOKEN], finish_reason="stop")], 9))
    counts = [len(event["logprobs"]) for event in events if event["type"] == "response.output_text.delta"]
    assert counts == [3, 1]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == [TOKEN] * 4


def test_thinking_that_is_not_wanted_is_left_out_and_broken_arguments_are_shown() -> None:
    call = {**begun_call(0), "function": {"name": "add", "arguments": '{"a": '}}
    message = WholeMessage(MessageHead("m", "m", hides_thinking=True))
    message.add([Delta(reasoning="hm"), Delta(tool_calls=[call], finish_reason="length")])
    (block,) = json.loads(message.body())["content"]
    assert block["input"] == {"INVALID_JSON": '{"a": '}


def test_a_call_that_grows_behind_another_is_an_error_of_the_model() -> None:
    answer = StreamedResponse(replace(RESPONSE, stored=True), lambda found: None)
    late = {"index": 0, "function": {"arguments": "{}"}}
    with pytest.raises(InternalError, match="tool call that has ended"):
        answer.events([Delta(tool_calls=[begun_call(0), begun_call(1), late])])
    (failed,) = answer.failure(InternalError("the model fails")).decode().split("\n\n")[-2:-1]
    response = json.loads(failed.partition("data: ")[2])["response"]
    assert (response["error"]["message"], response["store"]) == ("the model fails", False)
