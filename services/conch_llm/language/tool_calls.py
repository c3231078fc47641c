"""Finds tool calls in the text of a model, piece by piece, and calls that a request forces.

A format is a table: in each state the literals that may follow, with the state after each. White space before
a literal is skipped. Text that does not fit is given back as text. Each character is read once, or twice
where a literal begins and does not go on.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from conch.core.errors import InvalidArgumentError
from conch_llm.language.call_reader import CallReader
from conch_llm.language.markers import MarkerSearch

START: Final = "start"
TEXT: Final = "text"
CALL: Final = "call"
AFTER_CALL: Final = "after_call"
GAP: Final = "gap"

_SHORT_ID = string.ascii_letters + string.digits


def _call_id() -> str:
    return f"call_{uuid4().hex[:24]}"


def _mistral_id() -> str:
    return "".join(secrets.choice(_SHORT_ID) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Syntax of a model's tool calls.

    Attributes:
        states: By state the literals that may follow and the state after each; `CALL` begins at its literal.
        marker: Begins calls in the midst of text; empty if they can only stand at the start.
        make_id: Makes the id of a call.
    """

    states: Mapping[str, Mapping[str, str]]
    marker: str = ""
    make_id: Callable[[], str] = _call_id


_BEFORE = "before"
_LIST = "list"
_OPEN = "open"

HERMES = ToolFormat(
    {
        START: {"<tool_call>": _BEFORE},
        _BEFORE: {"{": CALL},
        AFTER_CALL: {"</tool_call>": GAP, "<tool_call>": _BEFORE},
        GAP: {"<tool_call>": _BEFORE},
    },
    marker="<tool_call>",
)
LLAMA3 = ToolFormat(
    {
        START: {"<|python_tag|>": _BEFORE, "{": CALL},
        _BEFORE: {"{": CALL},
        AFTER_CALL: {";": _BEFORE, "{": CALL, "<|python_tag|>": _BEFORE},
    }
)
MISTRAL = ToolFormat(
    {
        # The marker is a special token, which most detokenizers drop. At the start
        # it is read from its "[" on, like a list without it.
        START: {"[TOOL_CALLS]": _LIST, "[": _OPEN},
        _OPEN: {"{": CALL, "TOOL_CALLS]": _LIST},
        _LIST: {"[": _BEFORE},
        _BEFORE: {"{": CALL},
        AFTER_CALL: {",": _BEFORE, "]": GAP},
        GAP: {"[TOOL_CALLS]": _LIST},
    },
    marker="[TOOL_CALLS]",
    make_id=_mistral_id,
)
FORCED = ToolFormat({START: {"{": CALL}, AFTER_CALL: {}})
"""The whole text is one call."""

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of a schema whose members have names of the user's choice."""
_DATA = ("enum", "const", "default", "examples")
"""Keywords of a schema whose values are no schemas."""
_FORMATS = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL}


_LLAMA3_PARAMETERS = '"parameters": '
"""In the instructions of llama 3's templates; others say ``arguments``."""


def parser_of_template(template: str) -> str:
    """The name of the parser of the calls that a chat template writes; empty for those of no known syntax.

    Args:
        template: The template that requests with tools are rendered by.
    """
    if "tools" not in template:
        return ""
    if "<tool_call>" in template:  # Qwen3-Coder and GLM put XML inside
        return "" if "<function=" in template or "<arg_key>" in template else "hermes"
    if "[TOOL_CALLS]" in template:  # later versions put the name before the JSON
        return "" if "[ARGS]" in template or "[CALL_ID]" in template else "mistral"
    if "<|start_header_id|>" in template and _LLAMA3_PARAMETERS in template:
        return "llama3"
    return ""


def tool_call_parser(name: str, *, parallel: bool = True) -> ToolCallParser:
    """The parser of a name.

    Args:
        name: ``hermes``, ``llama3`` or ``mistral``.
        parallel: The request's ``parallel_tool_calls``; without it calls after the first are dropped.

    Raises:
        InvalidArgumentError: There is no parser of the name.
    """
    if name not in _FORMATS:
        raise InvalidArgumentError(f"unknown tool parser {name!r}; known are {', '.join(sorted(_FORMATS))}")
    return ToolCallParser(_FORMATS[name], parallel=parallel)


def forced_call_parser(tool_choice: str | Mapping[str, Any]) -> ToolCallParser:
    """Reads text that obeys `schema_of_call`. As OpenAI has it, a named choice finishes with ``stop``."""
    return ToolCallParser(FORCED, finish_reason="tool_calls" if isinstance(tool_choice, str) else "stop")


class ToolCallParser:
    """Finds calls in the text of one choice.

    Args:
        tool_format: Syntax of the model's calls.
        parallel: True to read calls after the first, too.
        finish_reason: Reason of an answer with calls, instead of ``stop``.
    """

    def __init__(
        self, tool_format: ToolFormat, *, parallel: bool = True, finish_reason: str = "tool_calls"
    ) -> None:
        self.finish_reason = finish_reason
        self._format = tool_format
        self._parallel = parallel
        self._state: str = START
        self._held: list[str] = []  # given back if no call follows
        self._literal = ""  # the beginning of a literal
        self._search = MarkerSearch([tool_format.marker] if tool_format.marker else [])
        self._reader = CallReader()
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
            if self._state == TEXT:
                position = self._read_text(text, position)
            elif self._state == CALL:
                position = self._read_call(text, position)
            else:
                position = self._read_literal(text, position)
        return self._taken()

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """Ends the text; returns the text that was kept back."""
        self._text.append(self._search.end())
        if self._state == CALL and not self._reader.begun:
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
            if self._state == AFTER_CALL and literal != self._format.marker:
                self._held.clear()
                self._literal = ""
                position += following != CALL
            elif following != CALL:
                self._held.append(literal)
                self._literal = ""
                position += 1
            self._state = following
            return position
        if any(each.startswith(literal) for each in literals):
            self._literal = literal
            return position + 1
        self._give_back()
        return position

    def _give_back(self) -> None:
        """Gives what is held back as text, and goes on in text."""
        self._text += (*self._held, self._literal)
        self._held.clear()
        self._literal = ""
        self._state = TEXT

    def _read_call(self, text: str, position: int) -> int:
        reader = self._reader
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
            self._reader = CallReader()
        return read.position

    def _add(self, head: dict[str, Any], function: dict[str, Any]) -> None:
        if self._parallel or self._calls == 1:
            self._deltas.append({"index": self._calls - 1, **head, "function": function})


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
