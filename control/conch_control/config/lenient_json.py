"""Lenient JSON parser with the rules and error texts of protobuf's C++ parser.

Triton uses that parser for config overrides. Accepted besides JSON: unquoted keys, single quotes, trailing
commas, line breaks in strings. Not accepted: comments, NaN, leading zeros.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

_MOST_DEPTH = 100
_SPACE = re.compile(r"[ \t\n\v\f\r]*")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"|\'((?:[^\'\\]|\\.)*)\'', re.DOTALL)
_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_LITERALS = {"true": True, "false": False, "null": None}


class RepeatedKey(list[Any]):
    """The values of a key that occurs several times in an object."""


def parse_lenient(text: str) -> Any:
    """Parses a text. Raises ValueError: it is malformed; the text has the position."""
    reader = _Reader(text)
    value = reader.value(_MOST_DEPTH)
    if reader.next():
        reader.fail("Parsing terminated before end of input.")
    return value


class _Reader:
    """Parser state."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def next(self) -> str:
        """Skips white space and returns the next character; empty at the end."""
        found = _SPACE.match(self._text, self._at)
        assert found is not None, "it matches nothing too"
        self._at = found.end()
        return self._text[self._at : self._at + 1]

    def value(self, depth: int) -> Any:
        first = self.next()
        if not first:
            self.fail("Unexpected end of string. Expected a value.")
        if not depth:
            self.fail("Message too deep.")
        if first == "{":
            return self._object(depth - 1)
        if first == "[":
            return self._array(depth - 1)
        if first in "\"'":
            return self._string()
        if first == "-" or first.isdigit():
            return self._number()
        name = _NAME.match(self._text, self._at)
        if name is None:
            self.fail("Expected a value.")
        if name[0] not in _LITERALS:
            self.fail("Unexpected token.")
        self._at = name.end()
        return _LITERALS[name[0]]

    def fail(self, text: str) -> NoReturn:
        line = self._text.count("\n", 0, self._at) + 1
        column = self._at - self._text.rfind("\n", 0, self._at)
        raise ValueError(f"{text} (line {line}, column {column})")

    def _take(self, character: str) -> bool:
        found = self.next() == character
        self._at += found
        return found

    def _object(self, depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        self._at += 1
        while not self._take("}"):
            key = self._key()
            if not self._take(":"):
                self.fail("Expected : between key:value pair.")
            value = self.value(depth)
            if key not in members:
                members[key] = value
            elif isinstance(members[key], RepeatedKey):
                members[key].append(value)
            else:
                members[key] = RepeatedKey((members[key], value))
            if not self._take(",") and self.next() != "}":
                self.fail("Expected , or } after key:value pair.")
        return members

    def _key(self) -> str:
        if self.next() in ('"', "'"):
            return self._string()
        name = _NAME.match(self._text, self._at)
        if name is None or name[0] in _LITERALS:
            self.fail("Expected an object key or }.")
        self._at = name.end()
        return name[0]

    def _array(self, depth: int) -> list[Any]:
        elements: list[Any] = []
        self._at += 1
        while not self._take("]"):
            if self.next() == ",":
                self.fail("Unexpected token.")
            elements.append(self.value(depth))
            if not self._take(",") and self.next() != "]":
                self.fail("Expected , or ] after array value.")
        return elements

    def _string(self) -> str:
        found = _STRING.match(self._text, self._at)
        if found is None:
            self.fail("Closing quote expected in string.")
        try:
            text = _ESCAPE.sub(_unescaped, found[found.lastindex or 0])
            # Joins escaped surrogate pairs.
            text = text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            self.fail("Invalid surrogate pair.")
        except ValueError as error:
            self.fail(str(error))
        self._at = found.end()
        return text

    def _number(self) -> int | float:
        found = _NUMBER.match(self._text, self._at)
        if found is None:
            self.fail("Unable to parse number.")
        if self._text[found.end() : found.end() + 1].isalnum():
            self.fail("Octal/hex numbers are not valid JSON values.")
        self._at = found.end()
        return int(found[0]) if found[1] is None and found[2] is None else float(found[0])


def _unescaped(found: re.Match[str]) -> str:
    escaped = found[1]
    if len(escaped) > 1:
        return chr(int(escaped[1:], 16))
    if escaped == "u":
        raise ValueError("Illegal hex string.")
    return _ESCAPED.get(escaped, escaped)
