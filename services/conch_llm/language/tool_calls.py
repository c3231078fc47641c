"""Finds tool calls in the text of a model, piece by piece, and calls that a request forces.

A format is a table: in each state the literals that may follow, with the state after each. White space before
a literal is skipped. Some formats have the name before the arguments: it ends at white space or a bracket.
Text that does not fit is given back as text. Each character is read once, or twice where a literal begins and
does not go on.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol
from uuid import uuid4

from conch.core.errors import InvalidArgumentError
from conch_llm.language.call_reader import CallReader, Read
from conch_llm.language.markers import MarkerSearch
from conch_llm.language.written_arguments import (
    BEFORE,
    BETWEEN,
    DONE,
    KEY,
    KEY_END,
    VALUE,
    QuotedArguments,
    TaggedArguments,
)

START: Final = "start"
TEXT: Final = "text"
CALL: Final = "call"
AFTER_CALL: Final = "after_call"
GAP: Final = "gap"
NAME: Final = "name"
NAMED: Final = "named"
ID: Final = "id"
IDENTIFIED: Final = "identified"

_RUNS: Final = {NAME: NAMED, ID: IDENTIFIED}
"""States in which a name or an id is read, and the state after each."""
_RUN = re.compile(r"[^\s<>{}\[\]\"]*")
_SHORT_ID = string.ascii_letters + string.digits


def _call_id() -> str:
    return f"call_{uuid4().hex[:24]}"


def _mistral_id() -> str:
    return "".join(secrets.choice(_SHORT_ID) for _ in range(9))


class CallParts(Protocol):
    """Reads one call, from the literal on that begins it."""

    @property
    def begun(self) -> bool:
        """True if the call has begun: the text is no text any more."""

    @property
    def done(self) -> bool:
        """True if the call is complete."""

    @property
    def failed(self) -> bool:
        """True if the text is no call, or stops being one."""

    def raw(self) -> str:
        """The text read so far, if it is no call."""

    def feed(self, text: str, start: int) -> Read:
        """Reads to the end of the call, a character that does not fit, or the end of the text."""


def _json_call(name: str, parameters: Mapping[str, Any]) -> CallParts:
    return CallReader(name)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Syntax of a model's tool calls.

    Attributes:
        states: By state the literals that may follow and the state after each; `CALL` begins at its literal.
        signs: Texts that all chat templates of the format have, and that no format before it has.
        markers: Begin calls in the midst of text; none if they can only stand at the start.
        tokens: Literals that may be special tokens, which detokenizers drop.
        make_id: Makes the id of a call.
        make_reader: Makes the reader of a call, from its name, if that stands before, and from the schema of
            its parameters.
    """

    states: Mapping[str, Mapping[str, str]]
    signs: Sequence[str] = ()
    markers: Sequence[str] = ()
    tokens: Sequence[str] = ()
    make_id: Callable[[], str] = _call_id
    make_reader: Callable[[str, Mapping[str, Any]], CallParts] = _json_call


_LIST = "list"
_OPEN = "open"


def _gemma(start: str, end: str, quote: str) -> ToolFormat:
    """Gemma's calls: ``call:name{key:value}`` between two tokens; a third one begins and ends texts."""
    return ToolFormat(
        {
            START: {start: BEFORE},
            BEFORE: {"call:": NAME},
            NAMED: {"{": CALL},
            AFTER_CALL: {end: GAP, start: BEFORE},
            GAP: {start: BEFORE},
        },
        signs=(start,),
        markers=(start,),
        tokens=(start, end, quote),
        make_reader=lambda name, parameters: QuotedArguments(name, quote),
    )


_FORMATS = {
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "qwen3_coder": ToolFormat(
        {
            START: {"<tool_call>": BEFORE, "<function=": NAME},
            BEFORE: {"<function=": NAME},
            NAMED: {">": CALL},
            AFTER_CALL: {"</tool_call>": GAP, "<tool_call>": BEFORE, "<function=": NAME},
            GAP: {"<tool_call>": BEFORE, "<function=": NAME},
        },
        signs=("<tool_call>", "<function="),
        markers=("<tool_call>", "<function="),
        tokens=("<tool_call>", "</tool_call>"),
        make_reader=partial(
            TaggedArguments,
            {
                BEFORE: {">": BETWEEN},
                BETWEEN: {"<parameter=": KEY, "</function>": DONE},
                KEY: {">": VALUE},
                VALUE: {"</parameter>": BETWEEN},
            },
            "\n",
        ),
    ),
    "glm": ToolFormat(
        {
            START: {"<tool_call>": NAME},
            NAMED: {"<arg_key>": CALL, "</tool_call>": CALL},
            AFTER_CALL: {"<tool_call>": NAME},
        },
        signs=("<tool_call>", "<arg_key>"),
        markers=("<tool_call>",),
        tokens=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        make_reader=partial(
            TaggedArguments,
            {
                BEFORE: {"<arg_key>": KEY, "</tool_call>": DONE},
                KEY: {"</arg_key>": KEY_END},
                KEY_END: {"<arg_value>": VALUE},
                VALUE: {"</arg_value>": BETWEEN},
                BETWEEN: {"<arg_key>": KEY, "</tool_call>": DONE},
            },
            "",
        ),
    ),
    "hermes": ToolFormat(
        {
            START: {"<tool_call>": BEFORE},
            BEFORE: {"{": CALL},
            AFTER_CALL: {"</tool_call>": GAP, "<tool_call>": BEFORE},
            GAP: {"<tool_call>": BEFORE},
        },
        signs=("<tool_call>",),
        markers=("<tool_call>",),
        tokens=("<tool_call>", "</tool_call>"),
    ),
    "mistral_args": ToolFormat(
        {
            START: {"[TOOL_CALLS]": NAME},
            NAMED: {"{": CALL, "[ARGS]": _OPEN, "[CALL_ID]": ID},
            IDENTIFIED: {"[ARGS]": _OPEN},
            _OPEN: {"{": CALL},
            AFTER_CALL: {"[TOOL_CALLS]": NAME},
        },
        signs=("[TOOL_CALLS]", "[ARGS]"),
        markers=("[TOOL_CALLS]",),
        tokens=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        make_id=_mistral_id,
    ),
    "mistral": ToolFormat(
        {
            # Most detokenizers drop the marker. At the start it is read from
            # its "[" on, like a list without it.
            START: {"[TOOL_CALLS]": _LIST, "[": _OPEN},
            _OPEN: {"{": CALL, "TOOL_CALLS]": _LIST},
            _LIST: {"[": BEFORE},
            BEFORE: {"{": CALL},
            AFTER_CALL: {",": BEFORE, "]": GAP},
            GAP: {"[TOOL_CALLS]": _LIST},
        },
        signs=("[TOOL_CALLS]",),
        markers=("[TOOL_CALLS]",),
        tokens=("[TOOL_CALLS]",),
        make_id=_mistral_id,
    ),
    "llama3": ToolFormat(
        {
            START: {"<|python_tag|>": BEFORE, "{": CALL},
            BEFORE: {"{": CALL},
            AFTER_CALL: {";": BEFORE, "{": CALL, "<|python_tag|>": BEFORE},
        },
        # Others of its headers write ``arguments``.
        signs=("<|start_header_id|>", '"parameters": '),
        tokens=("<|python_tag|>",),
    ),
}
"""Formats by name; the first whose signs a template has is its own."""
PARSERS = tuple(sorted(_FORMATS))
"""Names of the formats."""
SPECIAL_TOKENS = tuple(sorted({token for each in _FORMATS.values() for token in each.tokens}))
"""Literals of calls that may be special tokens."""
FORCED = ToolFormat({START: {"{": CALL}, AFTER_CALL: {}})
"""The whole text is one call."""

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of a schema whose members have names of the user's choice."""
_DATA = ("enum", "const", "default", "examples")
"""Keywords of a schema whose values are no schemas."""


def parser_of_template(template: str) -> str:
    """The name of the parser of the calls that a chat template writes; empty for those of no known syntax.

    Args:
        template: The template that requests with tools are rendered by.
    """
    if "tools" not in template:
        return ""
    found = (name for name, each in _FORMATS.items() if all(sign in template for sign in each.signs))
    return next(found, "")


def tool_call_parser(
    name: str, *, parallel: bool = True, tools: Sequence[Mapping[str, Any]] = ()
) -> ToolCallParser:
    """The parser of a name.

    Args:
        name: One of `PARSERS`.
        parallel: The request's ``parallel_tool_calls``; without it calls after the first are dropped.
        tools: The request's tools, whose schemas tell types that the format does not write.

    Raises:
        InvalidArgumentError: There is no parser of the name.
    """
    if name not in _FORMATS:
        raise InvalidArgumentError(f"unknown tool parser {name!r}; known are {', '.join(PARSERS)}")
    return ToolCallParser(_FORMATS[name], parallel=parallel, tools=tools)


def forced_call_parser(tool_choice: str | Mapping[str, Any]) -> ToolCallParser:
    """Reads text that obeys `schema_of_call`. As OpenAI has it, a named choice finishes with ``stop``."""
    return ToolCallParser(FORCED, finish_reason="tool_calls" if isinstance(tool_choice, str) else "stop")


class ToolCallParser:
    """Finds calls in the text of one choice.

    Args:
        tool_format: Syntax of the model's calls.
        parallel: True to read calls after the first, too.
        finish_reason: Reason of an answer with calls, instead of ``stop``.
        tools: The request's tools.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        *,
        parallel: bool = True,
        finish_reason: str = "tool_calls",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.finish_reason = finish_reason
        self._format = tool_format
        self._parallel = parallel
        self._state: str = START
        self._held: list[str] = []  # given back if no call follows
        self._literal = ""  # the beginning of a literal
        self._name: list[str] = []
        self._run = False  # a name or an id has begun
        self._search = MarkerSearch(tool_format.markers)
        self._tools = tools
        self._reader: CallParts | None = None
        self._calls = 0
        self._text: list[str] = []
        self._deltas: list[dict[str, Any]] = []

    @property
    def called(self) -> bool:
        """True if the text has had a call."""
        return self._calls > 0

    def feed(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Takes a piece; returns what it adds to the text, and deltas of calls."""
        position = 0
        while position < len(text):
            if self._reader is not None:
                position = self._read_call(self._reader, text, position)
            elif self._state == TEXT:
                position = self._read_text(text, position)
            elif self._state in _RUNS:
                position = self._read_run(text, position)
            else:
                position = self._read_literal(text, position)
        return self._taken()

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """Ends the text; returns the text that was kept back."""
        self._text.append(self._search.end())
        if self._reader is not None and not self._reader.begun:
            self._held.append(self._reader.raw())
        kept = "".join(self._held) + self._literal
        # A closing literal that is cut, and the space around calls, say nothing.
        if self._state != AFTER_CALL and (kept.strip() or not self._calls):
            self._text.append(kept)
        self._held.clear()
        self._literal = ""
        return self._taken()

    def _taken(self) -> tuple[str, list[dict[str, Any]]]:
        text, deltas = "".join(self._text), self._deltas
        self._text, self._deltas = [], []
        return text, deltas

    def _read_text(self, text: str, position: int) -> int:
        search = self._search
        self._text.append(search.feed(text, position))
        if not search.found:
            return len(text)
        self._held.append(search.found)
        self._state = self._format.states[START][search.found]
        search.reset()
        return search.behind

    def _read_literal(self, text: str, position: int) -> int:
        """Reads a character of a literal, or white space before it."""
        character = text[position]
        if not self._literal and character.isspace():
            self._held.append(character)
            return position + 1
        literal = self._literal + character
        literals = self._format.states[self._state]
        if literal in literals:
            following = literals[literal]
            if self._state == AFTER_CALL and literal not in self._format.markers:
                self._held.clear()
            elif following != CALL:
                self._held.append(literal)
            self._literal = ""
            self._state = following
            if following == CALL:
                name = "".join(self._name)
                self._name.clear()
                self._reader = self._format.make_reader(name, _parameters(self._tools, name))
                self._read_call(self._reader, literal, 0)
            return position + 1
        if any(each.startswith(literal) for each in literals):
            self._literal = literal
            return position + 1
        self._give_back()
        return position

    def _read_run(self, text: str, position: int) -> int:
        """Reads a name or an id up to its end, or white space before it."""
        end = _RUN.match(text, position).end()  # type: ignore[union-attr]
        if end > position:
            self._run = True
            if self._state == NAME:
                self._name.append(text[position:end])
        elif self._run:
            self._run = False
            self._state = _RUNS[self._state]
        elif text[position].isspace():
            end += 1
        else:
            self._give_back()
        self._held.append(text[position:end])
        return end

    def _give_back(self) -> None:
        """Gives what is held back as text, and goes on in text."""
        self._text += (*self._held, self._literal)
        self._held.clear()
        self._name.clear()
        self._literal = ""
        self._state = TEXT

    def _read_call(self, reader: CallParts, text: str, position: int) -> int:
        read = reader.feed(text, position)
        if read.name is not None:
            self._held.clear()
            self._calls += 1
            self._add(
                {"id": self._format.make_id(), "type": "function"}, {"name": read.name, "arguments": ""}
            )
        if read.arguments:
            self._add({}, {"arguments": read.arguments})
        if reader.failed:
            self._held.append(reader.raw())
            self._give_back()
        elif reader.done:
            self._state = AFTER_CALL
        if reader.failed or reader.done:
            self._reader = None
        return read.position

    def _add(self, head: dict[str, Any], function: dict[str, Any]) -> None:
        if self._parallel or self._calls == 1:
            self._deltas.append({"index": self._calls - 1, **head, "function": function})


def _parameters(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """The schema of a tool's parameters; empty without one."""
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and function.get("name") == name:
            found = function.get("parameters")
            return found if isinstance(found, Mapping) else {}
    return {}


def schema_of_call(
    tools: Sequence[Mapping[str, Any]], tool_choice: str | Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """JSON schema of the one call that a choice forces; None for ``auto`` and ``none``.

    Parameters with references are among the schema's definitions: there a reference means the same part.

    Raises:
        InvalidArgumentError: The choice is malformed or names no tool of the request.
    """
    if tool_choice in (None, "auto", "none"):
        return None
    functions = [_function(tool, position) for position, tool in enumerate(tools)]
    if not functions:
        raise InvalidArgumentError("tool_choice: a tool is required, but tools is empty")
    if tool_choice != "required":
        name = _chosen(tool_choice)
        functions = [each for each in functions if each["name"] == name][:1]
        if not functions:
            raise InvalidArgumentError(f"tool_choice: tools has no function {name!r}")
    moved: dict[str, Any] = {}
    schemas = [_call_schema(each, f"arguments_{number}", moved) for number, each in enumerate(functions)]
    whole = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {**whole, "$defs": moved} if moved else whole


def _function(tool: Mapping[str, Any], position: int) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidArgumentError(f"tools[{position}].function: an object with a name is required")
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise InvalidArgumentError(f"tools[{position}].function.parameters: a JSON schema is required")
    return function


def _chosen(tool_choice: str | Mapping[str, Any] | None) -> str:
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InvalidArgumentError(
            'tool_choice: give "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
        )
    return name


def _call_schema(function: Mapping[str, Any], place: str, moved: dict[str, Any]) -> dict[str, Any]:
    parameters = dict(function.get("parameters") or {"type": "object", "properties": {}})
    if _point_to(parameters, f"#/$defs/{place}"):
        parameters.pop("$id", None)  # references would begin there
        moved[place] = parameters
        parameters = {"$ref": f"#/$defs/{place}"}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _point_to(schema: dict[str, Any], place: str) -> bool:
    """Makes references to a schema lead to its new place, in copies of its parts; true if it has any."""
    refers = False
    left: list[tuple[Any, bool]] = [(schema, False)]
    for each, named in left:  # grows meanwhile
        for key, value in each.items() if isinstance(each, dict) else enumerate(each):
            if isinstance(value, dict | list) and (named or key not in _DATA):
                each[key] = value.copy()
                left.append((each[key], key in _NAMED and not named))
            elif key == "$ref" and isinstance(value, str) and value[:2] in ("#", "#/"):
                each[key] = place + value[1:]
                refers = True
    return refers
