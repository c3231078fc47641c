"""Stops, reasoning and tool calls: the split of a text into deltas changes nothing, and costs little."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.errors import InvalidArgumentError
from conch_llm.deltas import Delta
from conch_llm.language.answer_reader import AnswerReader
from conch_llm.language.reasoning import ReasoningSplitter, begins_reasoning
from conch_llm.language.tool_calls import PARSERS, forced_call_parser, schema_of_call, tool_call_parser

NAMES = ("hermes", "llama3", "mistral")
NAMED = tuple(sorted({*PARSERS}.difference(NAMES)))
"""Formats that have the name before the arguments."""


@dataclass
class Answer:
    """Deltas of a choice put together."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


def read(reader: AnswerReader, pieces: Sequence[str]) -> Answer:
    """Reads pieces as a caller does, and checks the shape of what comes."""
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += reader.read(Delta(text=piece))
        if reader.ended:
            break
    deltas += reader.end()
    assert reader.ended
    assert not reader.read(Delta(text="more"))
    answer = Answer()
    for delta in deltas:
        assert answer.finish_reason is None
        answer.text += delta.text
        answer.reasoning += delta.reasoning
        answer.finish_reason, answer.stop_reason = delta.finish_reason, delta.stop_reason
        for call in delta.tool_calls:
            function = call["function"]
            if "id" in call:
                assert list(call) == ["index", "id", "type", "function"]
                assert call["index"] == len(answer.calls)
                assert function == {"name": function["name"], "arguments": ""}
                answer.calls.append((function["name"], ""))
            else:
                assert list(call) == ["index", "function"]
                assert list(function) == ["arguments"]
                name, arguments = answer.calls[call["index"]]
                answer.calls[call["index"]] = (name, arguments + function["arguments"])
    return answer


def cut(text: str, positions: Sequence[int]) -> list[str]:
    """The pieces between positions, empty ones included."""
    ends = [0, *sorted(position % (len(text) + 1) for position in positions), len(text)]
    return [text[start:end] for start, end in pairwise(ends)]


SPLITS = st.lists(st.integers(0, 1000), max_size=12)
FRAGMENTS = (
    "<tool_call>", "</tool_call>", "<tool_c", "[TOOL_CALLS]", "[TOOL_", "<|python_tag|>", "<|py", "<think>",
    "</think>", "</thi", "{", "}", "[", "]", ",", ";", ":", '"', "\\", " ", "\n", "x", "ab", "aab",
    '"name"', '"arguments"', '"parameters"', '{"name": "f", "arguments": {"a": [1, "}\\""]}}',
    '{"parameters": {}, "name": "g"}', '{"name": "f", "arguments": "{\\"a\\": 1}"}',
    '{"name": "f", "arguments": {', "null", "1",
    "[ARGS]", "[CALL_ID]", "<function=f>", "<function=", "<parameter=a>", "</parameter>", "</function>", ">",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<start_function_call>", "call:f{", "<escape>",
    "<end_function_call>", "<|tool_call>", '<|"|>', "<tool_call|>", "True", "a:",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


def tool_reader(name: str, tools: Sequence[dict[str, Any]] = ()) -> AnswerReader:
    return AnswerReader(tool_parser=tool_call_parser(name, tools=tools))


READERS: dict[str, Callable[[], AnswerReader]] = {
    "stop": lambda: AnswerReader(stop=("aab", "b:", "x\nx")),
    "stop included": lambda: AnswerReader(stop=("aab", "b:", "x\nx"), include_stop=True),
    "reasoning": lambda: AnswerReader(reasoning=ReasoningSplitter()),
    "begun": lambda: AnswerReader(reasoning=ReasoningSplitter(begun=True)),
    "forced": lambda: AnswerReader(tool_parser=forced_call_parser("required")),
    "one": lambda: AnswerReader(tool_parser=tool_call_parser("mistral", parallel=False)),
    **{name: partial(tool_reader, name) for name in PARSERS},
    "all": lambda: AnswerReader(
        tool_parser=tool_call_parser("hermes"), reasoning=ReasoningSplitter(), stop=("aab", "x\n")
    ),
}


@pytest.mark.parametrize("kind", READERS)
@given(text=TEXTS, positions=SPLITS)
def test_the_split_of_a_text_changes_nothing(kind: str, text: str, positions: list[int]) -> None:
    whole = read(READERS[kind](), [text])
    assert read(READERS[kind](), cut(text, positions)) == whole
    assert read(READERS[kind](), list(text)) == whole


@given(text=st.text("ab:x\n"), stop=st.lists(st.text("ab:x", min_size=1, max_size=4), min_size=1))
def test_the_stop_that_ends_first_cuts(text: str, stop: list[str]) -> None:
    answer = read(AnswerReader(stop=stop), list(text))
    included = read(AnswerReader(stop=stop, include_stop=True), [text])
    ends = [(text.index(each) + len(each), -len(each), each) for each in stop if each in text]
    if not ends:
        assert (answer.text, answer.stop_reason) == (text, None)
        assert included == answer
        return
    end, _, first = min(ends)
    assert answer == Answer(text[: end - len(first)], finish_reason="stop", stop_reason=first)
    assert included.text == text[:end]


def test_nothing_is_kept_that_no_stop_can_begin() -> None:
    reader = AnswerReader(stop=["END", "\n\n"])
    read_texts = [
        [each.text for each in reader.read(Delta(text=text))] for text in ("oneE", "N", "x\n", "\nEN")
    ]
    assert read_texts == [["one"], [], ["ENx"], [""]]
    assert reader.ended


CALLS = st.lists(
    st.tuples(
        st.text(min_size=1),
        st.dictionaries(st.text(), st.recursive(st.text() | st.none() | st.integers(), st.lists)),
    ),
    min_size=1,
    max_size=3,
)


def write(name: str, calls: Sequence[tuple[str, Any]], key: str, swap: bool, ascii_only: bool) -> str:
    """Calls as a model of the family writes them."""
    texts = []
    for called, arguments in calls:
        members = [("name", called), (key, arguments)]
        texts.append(json.dumps(dict(members[::-1] if swap else members), ensure_ascii=ascii_only))
    if name == "hermes":
        return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in texts)
    return "[TOOL_CALLS] [" + ", ".join(texts) + "]" if name == "mistral" else "; ".join(texts)


@pytest.mark.parametrize("name", NAMES)
@given(
    calls=CALLS,
    key=st.sampled_from(["arguments", "parameters"]),
    swap=st.booleans(),
    ascii_only=st.booleans(),
    positions=SPLITS,
)
def test_calls_are_read_as_written(
    name: str, calls: list[tuple[str, Any]], key: str, swap: bool, ascii_only: bool, positions: list[int]
) -> None:
    text = write(name, calls, key, swap, ascii_only)
    answer = read(tool_reader(name), cut(text, positions))
    assert [(called, json.loads(arguments)) for called, arguments in answer.calls] == calls
    assert (answer.text, answer.finish_reason) == ("", "tool_calls")
    first = read(AnswerReader(tool_parser=tool_call_parser(name, parallel=False)), [text])
    assert first.calls == answer.calls[:1]


KEYS = st.from_regex("[a-z_]{1,8}", fullmatch=True)
PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"))
VALUES = st.recursive(
    PLAIN | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
NAMED_CALLS = st.lists(
    st.tuples(st.from_regex("[A-Za-z0-9_.-]{1,12}", fullmatch=True), st.dictionaries(KEYS, VALUES)),
    min_size=1,
    max_size=3,
    unique_by=lambda call: call[0],
)
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def quoted(value: Any, quote: str) -> str:
    """A value as Gemma's models write it."""
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{quoted(each, quote)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(quoted(each, quote) for each in value) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def tagged(value: Any) -> str:
    """A value as GLM's models write it."""
    return value if isinstance(value, str) else json.dumps(value)


def write_named(name: str, called: str, arguments: dict[str, Any]) -> str:
    """A call of a format that has the name before the arguments."""
    if name == "mistral_args":
        return f"[TOOL_CALLS]{called}[ARGS]{json.dumps(arguments)}"
    if name == "functiongemma":
        return f"<start_function_call>call:{called}{quoted(arguments, '<escape>')}<end_function_call>"
    if name == "gemma4":
        return f"<|tool_call>call:{called}" + quoted(arguments, '<|"|>') + "<tool_call|>"
    if name == "glm":
        pairs = [
            f"<arg_key>{key}</arg_key>\n<arg_value>{tagged(value)}</arg_value>\n"
            for key, value in arguments.items()
        ]
        return f"\n<tool_call>{called}\n{''.join(pairs)}</tool_call>"
    # Qwen3-Coder's template prints scalars as Python does.
    texts = {
        key: json.dumps(value) if isinstance(value, dict | list) else str(value)
        for key, value in arguments.items()
    }
    pairs = [f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items()]
    return f"\n<tool_call>\n<function={called}>\n{''.join(pairs)}</function>\n</tool_call>"


@pytest.mark.parametrize("name", NAMED)
@given(calls=NAMED_CALLS, positions=SPLITS)
def test_calls_with_the_name_before_are_read_as_written(
    name: str, calls: list[tuple[str, dict[str, Any]]], positions: list[int]
) -> None:
    text = "".join(write_named(name, *call) for call in calls)
    tools = [
        tool(
            called, properties={key: {"type": TYPES.get(type(value), "null")} for key, value in given.items()}
        )
        for called, given in calls
    ]
    answer = read(tool_reader(name, tools), cut(text, positions))
    assert [(called, json.dumps(json.loads(given))) for called, given in answer.calls] == [
        (called, json.dumps(given)) for called, given in calls
    ]
    assert (answer.text, answer.finish_reason) == ("", "tool_calls")


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "\n a\n", " a"),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "boolean"}, "\nFalse\n", False),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "7", "7"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": 1}, "1", 1),
        ({"$ref": "#/$defs/text"}, "[1]", "[1]"),
        ({"$ref": "#/$defs/itself"}, "[1]", [1]),
        ({"$ref": "#/none"}, '{"a": 1}', {"a": 1}),
        ({}, "NaN", "NaN"),
        ({}, '"a"', '"a"'),
        (None, "[" * 100_000, "[" * 100_000),
        ("x", "1", 1),
    ],
)
def test_a_written_value_has_the_type_of_its_schema(schema: Any, text: str, value: Any) -> None:
    definitions = {"text": {"type": "string"}, "itself": {"$ref": "#/$defs/itself"}}
    tools = [tool("f", properties={"a": schema}, **{"$defs": definitions})]
    written = f"<function=f><parameter=a>{text}</parameter></function>"
    (call,) = read(tool_reader("qwen3_coder", tools), [written]).calls
    assert json.loads(call[1]) == {"a": value}


def test_each_value_goes_out_when_it_is_complete() -> None:
    reader = tool_reader("qwen3_coder")
    assert not reader.read(Delta(text="<tool_call>\n<function=f"))
    begun, first, second, end = (
        reader.read(Delta(text=text))
        for text in (">\n<para", "meter=a>\n1\n</parameter>", "<parameter=b>x</parameter>", "</function>")
    )
    assert [each["function"] for each in begun[0].tool_calls] == [
        {"name": "f", "arguments": ""},
        {"arguments": "{"},
    ]
    later = [each["function"]["arguments"] for (delta,) in (first, second, end) for each in delta.tool_calls]
    assert later == ['"a": 1', ', "b": "x"', "}"]


@pytest.mark.parametrize(
    ("name", "text", "rest"),
    [
        ("qwen3_coder", "a <tool_call>b <function=f g>", None),
        ("qwen3_coder", "so <function=f></function> on", "so  on"),
        ("qwen3_coder", "<tool_call>\n<function=", None),
        ("glm", "<tool_call>f g</tool_call>", None),
        ("glm", "a<tool_call>f</tool_call>\n\n<tool_", "a"),
        ("glm", '<tool_call>{"name": 1}', None),
        ("functiongemma", "<start_function_call>f{}", None),
        ("functiongemma", "x<start_function_call>call:f{}", "x"),
        ("gemma4", "<|tool_call>call:f <tool_call|>", None),
        ("mistral_args", '[TOOL_CALLS][{"name": "f", "arguments": {}}]', None),
        ("mistral_args", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}", ""),
        ("mistral_args", "x[TOOL_CALLS]f{} y", "x y"),
        ("mistral_args", "[TOOL_CALLS]f[CALL_ID] [ARGS]", None),
        ("hermes", "Hi.\n<tool_call>{}</tool_call>", None),
        ("hermes", '<tool_call>{"name": "f"}', None),
        ("hermes", '<tool_call>{"name": 1, "arguments": {}}', None),
        ("hermes", "a < b <tool", None),
        ("hermes", 'Hi <tool_call>{"name": "f", "arguments": {}}</tool_call> bye', "Hi  bye"),
        ("hermes", 'x <tool_call>y<tool_call>{"name": "f", "arguments": {}}</tool_', "x <tool_call>y"),
        ("llama3", '{"a": 1}', None),
        ("llama3", '<|python_tag|>search.call(query="x")', None),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {}}', ""),
        ("llama3", 'no {"name": "f", "parameters": {}}', None),
        ("mistral", "[TOOL_CALLS] none", None),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}] so', " so"),
        ("mistral", '[{"name": "f", "arguments": {}}]', ""),
        ("mistral", '[{"name": "f"}, 1]', None),
        ("mistral", "[1, 2]", None),
        ("mistral", "[TOOL", None),
        ("mistral", 'so [{"name": "f", "arguments": {}}]', None),
        ("mistral", " ", None),
    ],
)
def test_text_that_is_no_call_is_text(name: str, text: str, rest: str | None) -> None:
    answer = read(tool_reader(name), list(text))
    assert answer.text == (text if rest is None else rest)
    assert answer.calls == ([] if rest is None else [("f", "{}")])
    assert answer.finish_reason == ("stop" if rest is None else "tool_calls")


def test_arguments_go_out_as_they_come() -> None:
    reader = tool_reader("hermes")
    assert not reader.read(Delta(text='<tool_call>{"name": "f", "arguments": '))
    (first,) = reader.read(Delta(text='{"a'))
    assert [each["function"] for each in first.tool_calls] == [
        {"name": "f", "arguments": ""},
        {"arguments": '{"a'},
    ]
    (second,) = reader.read(Delta(text='": 1'))
    assert second.tool_calls == [{"index": 0, "function": {"arguments": '": 1'}}]
    (last,) = reader.read(Delta(finish_reason="length"))
    assert last == Delta(finish_reason="length")


@pytest.mark.parametrize(("name", "form"), [("hermes", r"call_\w{24}"), ("mistral", "[A-Za-z0-9]{9}")])
def test_ids(name: str, form: str) -> None:
    calls: list[tuple[str, Any]] = [("f", {}), ("f", {})]
    (delta,) = tool_reader(name).read(Delta(text=write(name, calls, "arguments", False, False)))
    ids = [each["id"] for each in delta.tool_calls if "id" in each]
    assert len(set(ids)) == 2
    assert all(re.fullmatch(form, each) for each in ids)


def test_an_unknown_parser_names_the_known() -> None:
    with pytest.raises(InvalidArgumentError, match="known are functiongemma, gemma4, glm, hermes, llama3"):
        tool_call_parser("pythonic")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="stop: "):
        AnswerReader(stop=["a", ""])


@pytest.mark.parametrize(
    ("begun", "text", "reasoning", "answer"),
    [
        (False, "<think>\nwhy\n</think>\n\nso", "why\n", "so"),
        (False, " <think>why", "why", ""),
        (False, "\nso </think>", "", "\nso </think>"),
        (False, "<thi", "", "<thi"),
        (True, "why</think> so<think>", "why", "so<think>"),
        (True, "why</th", "why</th", ""),
    ],
)
def test_reasoning(begun: bool, text: str, reasoning: str, answer: str) -> None:
    found = read(AnswerReader(reasoning=ReasoningSplitter(begun)), list(text))
    assert found == Answer(answer, reasoning, finish_reason="stop")


def test_a_prompt_may_open_the_reasoning() -> None:
    assert begins_reasoning("<|im_start|>assistant\n<think>\n")
    assert not begins_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_counts_and_logprobs_are_kept_while_text_is_held_back() -> None:
    reader = AnswerReader(stop=["###"], index=1)
    logprobs = [{"token": "#"}]
    counts: Any = {"index": 1, "tokens": 1, "logprobs": logprobs, "prompt_tokens": 5, "cached_tokens": 2}
    (held,) = reader.read(Delta(text="#", **counts))
    assert held == Delta(**counts)
    (last,) = reader.read(Delta(index=1, text="a", tokens=1, finish_reason="length"))
    assert last == Delta(index=1, text="#a", tokens=1, finish_reason="length")
    assert not reader.end()


def test_without_options_deltas_pass() -> None:
    delta = Delta(text="a", tokens=1)
    reader = AnswerReader()
    assert reader.read(delta)[0] is delta
    assert reader.end("length") == (Delta(finish_reason="length"),)


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_schema_of_a_forced_call() -> None:
    tools = [tool("f", properties={"a": {"enum": [{"$ref": "#"}]}}), tool("g")]
    assert (
        schema_of_call(tools, "auto") is schema_of_call(tools, "none") is schema_of_call(tools, None) is None
    )
    of_f, of_g = (
        {
            "type": "object",
            "properties": {"name": {"const": each["function"]["name"]}, "arguments": arguments},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for each in tools
        if (arguments := each["function"]["parameters"])
    )
    assert schema_of_call(tools, named("g")) == of_g
    assert schema_of_call(tools, "required") == {"anyOf": [of_f, of_g]}


def at(schema: Any, reference: str) -> Any:
    """The part of a schema that a reference means."""
    assert reference == "#" or reference.startswith("#/")
    for step in reference.split("/")[1:]:
        schema = schema[step]
    return schema


@pytest.mark.parametrize("choice", ["required", named("f")])
def test_references_of_a_tool_mean_parts_of_its_own_schema(choice: Any) -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "$ref": {"type": "null"}}}
    properties = {
        "self": {"$ref": "#"},
        "all": {"items": [{"$ref": "#"}]},
        "twin": {"$ref": "#/properties/self"},
        "default": {"$ref": "#/$defs/node"},
        "other": {"$ref": "https://example.com/x", "default": {"$ref": "#"}},
    }
    first = tool("f", properties=properties, **{"$defs": {"node": node}})
    second = tool("g", properties={"a": {"$ref": "#/$defs/node"}}, **{"$defs": {"node": {"type": "null"}}})
    before = json.dumps([first, second])
    whole = schema_of_call([first, second], choice)
    assert whole is not None and json.dumps([first, second]) == before
    calls = whole.get("anyOf", [whole])
    arguments = at(whole, calls[0]["properties"]["arguments"]["$ref"])
    found = arguments["properties"]
    assert at(whole, found["self"]["$ref"]) is arguments
    assert at(whole, found["all"]["items"][0]["$ref"]) is arguments
    assert at(whole, found["twin"]["$ref"]) is found["self"]
    assert at(whole, found["default"]["$ref"]) is arguments["$defs"]["node"]
    assert found["other"] == properties["other"]
    moved = arguments["$defs"]["node"]["properties"]
    assert moved["$ref"] == {"type": "null"} and at(whole, moved["next"]["$ref"])["properties"] is moved
    if choice == "required":
        arguments = at(whole, calls[1]["properties"]["arguments"]["$ref"])
        assert at(whole, arguments["properties"]["a"]["$ref"]) == {"type": "null"}


def test_a_schema_that_is_nested_deep_is_read() -> None:
    deep: dict[str, Any] = {"$ref": "#"}
    for _ in range(5000):
        deep = {"properties": {"a": deep}}
    assert schema_of_call([tool("f", **deep)], "required") is not None


@pytest.mark.parametrize(
    ("tools", "choice", "text"),
    [
        ([], "required", "tools is empty"),
        ([tool("f")], named("g"), "tools has no function 'g'"),
        ([tool("f")], "any", "tool_choice: give"),
        ([tool("f")], {"type": "function"}, "tool_choice: give"),
        ([{"type": "function"}], "required", r"tools\[0\]\.function: "),
    ],
)
def test_choices_that_can_not_be_forced(tools: list[dict[str, Any]], choice: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        schema_of_call(tools, choice)


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (named("f"), "stop")])
def test_a_forced_call(choice: Any, reason: str) -> None:
    answer = read(
        AnswerReader(tool_parser=forced_call_parser(choice)), ['{"name":"f",', '"arguments":{"a":1}}\n']
    )
    assert answer == Answer("", calls=[("f", '{"a":1}')], finish_reason=reason)


def steps(reader: AnswerReader, pieces: Sequence[str]) -> int:
    """Bytecodes that reading takes."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for piece in pieces:
            reader.read(Delta(text=piece))
        reader.end()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    ("kind", "start", "repeated"),
    [
        ("stop", "", "aa"),
        ("hermes", "", "<tool_call>x<tool_cal"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', '\\"x{'),
        ("hermes", '<tool_call>{"arguments": {"a": [', "[{"),
        ("llama3", " ", " \n"),
        ("mistral", "[TOOL_CALLS] [", " \n"),
        ("mistral_args", "[TOOL_CALLS]", "f"),
        ("mistral_args", "[TOOL_CALLS]f[CALL_ID]", " \n"),
        ("qwen3_coder", "<function=f><parameter=a>", "</param"),
        ("qwen3_coder", "<function=f>", "<parameter=a></parameter>"),
        ("functiongemma", "<start_function_call>call:f{a:<escape>", "<escap"),
        ("functiongemma", "<start_function_call>call:f{a:", "[b"),
        ("reasoning", "", " "),
        ("reasoning", "<think>", "</think"),
    ],
)
def test_the_cost_of_a_text_is_linear(kind: str, start: str, repeated: str) -> None:
    short, long = start + 100 * repeated, start + 400 * repeated
    for pieces in (list, lambda text: [text]):
        assert steps(READERS[kind](), pieces(long)) < 4.2 * steps(READERS[kind](), pieces(short))
