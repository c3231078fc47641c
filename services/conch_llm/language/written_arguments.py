"""Reads arguments of tool calls that are no JSON, and gives them out as JSON.

Values between tags are texts: the schema of the tool's parameters tells their types. What the schema does not
tell is JSON if it can be read as such, else text. Each value is given out when it is complete.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from conch_llm.language.call_reader import Read
from conch_llm.language.markers import MarkerSearch

BEFORE: Final = "before"
BETWEEN: Final = "between"
KEY: Final = "key"
KEY_END: Final = "key end"
VALUE: Final = "value"
DONE: Final = "done"

_STRUCTURE = "{}[],:"
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
"""Constants as templates write them that print values of Python."""
_TYPES: Mapping[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


class _Arguments(ABC):
    """Arguments of a call whose name is known.

    Args:
        name: The name.
    """

    failed = False

    def __init__(self, name: str) -> None:
        self._name: str | None = name
        self.begun = self.done = False

    def raw(self) -> str:
        """Empty: the call begins at once."""
        return ""

    def feed(self, text: str, start: int) -> Read:
        """Reads to the end of the arguments, or of the text."""
        name, self._name = self._name, None
        written: list[str] = []
        self.begun = True
        position = start
        while position < len(text) and not self.done:
            position = self._read(text, position, written)
        return Read(position, name, "".join(written))

    @abstractmethod
    def _read(self, text: str, position: int, written: list[str]) -> int:
        """Reads a part; adds its JSON to `written`, and returns where the rest begins."""


class TaggedArguments(_Arguments):
    """Keys and values between literals.

    Args:
        parts: By part the literals that end it, and the part after each; the first is `BEFORE`.
        around: Text around each value.
        name: Name of the call.
        parameters: Schema of the parameters.
    """

    def __init__(
        self,
        parts: Mapping[str, Mapping[str, str]],
        around: str,
        name: str,
        parameters: Mapping[str, Any],
    ) -> None:
        super().__init__(name)
        self._parts = parts
        self._around = around
        self._parameters = parameters
        self._taken: list[str] = []
        self._key = ""
        self._separator = ""
        self._begin(BEFORE)

    def _begin(self, part: str) -> None:
        self._part = part
        self._search = MarkerSearch(list(self._parts.get(part, ())))
        self._taken.clear()

    def _read(self, text: str, position: int, written: list[str]) -> int:
        search = self._search
        self._taken.append(search.feed(text, position))
        if not search.found:
            return len(text)
        taken = "".join(self._taken)
        if self._part == BEFORE:
            written.append("{")
        elif self._part == KEY:
            self._key = taken.strip()
        elif self._part == VALUE:
            taken = taken.removeprefix(self._around).removesuffix(self._around)
            value = _typed(taken, self._parameters, self._key)
            written.append(f"{self._separator}{json.dumps(self._key, ensure_ascii=False)}: {value}")
            self._separator = ", "
        self._begin(self._parts[self._part][search.found])
        if self._part == DONE:
            written.append("}")
            self.done = True
        return search.behind


class QuotedArguments(_Arguments):
    """An object like JSON's, with bare keys, and with texts between tokens.

    Args:
        name: Name of the call.
        quote: The token that begins and ends a text.
    """

    def __init__(self, name: str, quote: str) -> None:
        super().__init__(name)
        self._quote = quote
        self._depth = 0
        self._word: list[str] = []
        self._search = MarkerSearch([quote, *_STRUCTURE])
        self._text: MarkerSearch | None = None  # in a text

    def _read(self, text: str, position: int, written: list[str]) -> int:
        if self._text is not None:
            return self._read_text(self._text, text, position, written)
        search = self._search
        self._word.append(search.feed(text, position))
        found = search.found
        if not found:
            return len(text)
        word = "".join(self._word).strip()
        self._word.clear()
        search.reset()
        if word and found == ":":
            written.append(json.dumps(word, ensure_ascii=False))
        elif word:
            written.append(_scalar(word))
        if found == self._quote:
            self._text = MarkerSearch([found])
            found = '"'
        self._depth += (found in "{[") - (found in "}]")
        self.done = self._depth == 0
        written.append(f"{found} " if found in ",:" else found)
        return search.behind

    def _read_text(self, search: MarkerSearch, text: str, position: int, written: list[str]) -> int:
        written.append(json.dumps(search.feed(text, position), ensure_ascii=False)[1:-1])
        if not search.found:
            return len(text)
        written.append('"')
        self._text = None
        return search.behind


def _scalar(word: str) -> str:
    """A bare word as JSON: a number or a constant, else a text."""
    found = _value(word)
    return json.dumps(word, ensure_ascii=False) if found is None else found[0]


def _value(text: str) -> tuple[str, Any] | None:
    """The JSON that a text is, and its value; None if it is none."""
    written = _CONSTANTS.get(text.strip(), text.strip())
    try:
        return written, json.loads(written, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def _typed(text: str, parameters: Mapping[str, Any], key: str) -> str:
    """A value as JSON, of a type that the schema allows if it can be one."""
    allowed = _types(parameters, key)
    found = _value(text)
    if found is not None and not isinstance(found[1], str):
        written, value = found
        if isinstance(value, float) and value.is_integer() and allowed == {"integer"}:
            return str(int(value))
        if not allowed or not allowed.isdisjoint(_TYPES[type(value)]):
            return written
    return json.dumps(text, ensure_ascii=False)


def _types(parameters: Mapping[str, Any], key: str) -> set[str]:
    """Types that a schema names for a parameter; none if it does not tell."""
    properties = parameters.get("properties")
    left = [properties.get(key)] if isinstance(properties, Mapping) else []
    types: set[str] = set()
    followed: set[str] = set()
    for schema in left:  # grows meanwhile
        if not isinstance(schema, Mapping):
            continue
        named = schema.get("type")
        types.update(each for each in (named, *_list(schema, "type")) if isinstance(each, str))
        values = [*_list(schema, "enum"), *([schema["const"]] if "const" in schema else ())]
        types.update(name for value in values for name in _TYPES.get(type(value), ()))
        for keyword in ("anyOf", "oneOf", "allOf"):
            left += _list(schema, keyword)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/") and reference not in followed:
            followed.add(reference)
            left.append(_part(parameters, reference))
    return types


def _list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    found = schema.get(keyword)
    return found if isinstance(found, list) else []


def _part(schema: Any, reference: str) -> Any:
    """The part that a reference means; None without one."""
    for step in reference[2:].split("/"):
        schema = schema.get(step) if isinstance(schema, Mapping) else None
    return schema
