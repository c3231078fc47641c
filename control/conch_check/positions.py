"""Positions of a config's fields in its text.

protobuf's text parser keeps no positions. This one reads names, brackets and lists, but no values, and
accepts any text, also malformed configs.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import cast

from google.protobuf import text_encoding
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.problems import entry_path
from conch_control.config.schema import is_map, part_of_entry

_TOKEN = re.compile(
    r"""
    (?P<skip> (?: \s | \#[^\n]* )+ )
  | (?P<string> "(?: [^"\\\n] | \\. )*"? | '(?: [^'\\\n] | \\. )*'? )
  | (?P<word> [\w.+-]+ )
  | (?P<sign> . )
    """,
    re.VERBOSE,
)
_CLOSING = {"{": "}", "<": ">"}
# The stubs also allow the C runtime's class, which has the same members.
_CONFIG = cast(Descriptor, ModelConfig.DESCRIPTOR)


@dataclass(frozen=True, slots=True)
class Span:
    """Position of a field, or of one element of a repeated field.

    Attributes:
        name: Offset of the field's name; of the value for list elements.
        value: Offset of the value.
        end: Offset behind the value.
        element: True for a list element.
        field: Its descriptor; None for an unknown field.
    """

    path: str
    name: int
    value: int
    end: int
    element: bool = False
    field: FieldDescriptor | None = None


class Positions:
    """Positions of all fields of a text; in `spans` outer ones come first."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.spans = list(_spans(_Reader(text).fields(_CONFIG, None), ""))
        self._by_path = {span.path: span for span in self.spans}
        self._lines = [0, *(match.end() for match in re.finditer("\n", text))]

    def find(self, path: str) -> Span | None:
        """Span of a path."""
        return self._by_path.get(path)

    def nearest(self, path: str) -> Span | None:
        """Span of a path, or of the nearest enclosing field that exists."""
        while path:
            found = self._by_path.get(path)
            if found is not None:
                return found
            path = parent(path)
        return None

    def at(self, offset: int) -> Span | None:
        """Innermost span at an offset."""
        inside = (span for span in self.spans if span.name <= offset < max(span.end, span.name + 1))
        return max(inside, key=lambda span: (span.name, -span.end, len(span.path)), default=None)

    def place(self, offset: int) -> tuple[int, int]:
        """Line and column of an offset, from 1."""
        line = bisect_right(self._lines, offset)
        return line, offset - self._lines[line - 1] + 1

    def offset(self, line: int, column: int) -> int:
        """Offset of a line and column."""
        start = self._lines[min(max(line, 1), len(self._lines)) - 1]
        return min(start + max(column, 1) - 1, len(self.text))


def parent(path: str) -> str:
    """Path of the enclosing field: ``a[0]`` for ``a[0].b``, ``a`` for ``a[0]``, empty at the top."""
    if path.endswith('"]'):  # keys may contain any characters
        match = re.search(r'\["(?:[^"\\]|\\.)*"\]\Z', path)
        return path[: match.start()] if match else ""
    if path.endswith("]"):
        return path[: path.rindex("[")]
    return path[: path.rindex(".")] if "." in path else ""


@dataclass(slots=True)
class _Node:
    """A parsed value.

    Attributes:
        name: Name of its field.
        begin: Offset of the name.
        start: Offset of the value.
        known: Descriptor of the field.
        listed: Start and end of the enclosing list, if any.
        empty: True for an empty list.
        literal: Source text of numbers or of adjacent strings.
    """

    name: str
    begin: int
    start: int
    end: int
    known: FieldDescriptor | None
    listed: tuple[int, int] | None = None
    empty: bool = False
    inner: list[_Node] = field(default_factory=list)
    literal: list[str] = field(default_factory=list)


def _spans(nodes: Iterable[_Node], path: str) -> Iterator[Span]:
    counts: dict[str, int] = {}
    for node in nodes:
        known = node.known
        place = f"{path}.{node.name}" if path else node.name
        number = counts.get(node.name, 0)
        if node.listed is not None or (known is not None and known.is_repeated):
            if number == 0:
                start, end = node.listed or (node.start, node.end)
                yield Span(place, node.begin, start, end, field=known)
            if node.empty:
                continue
            counts[node.name] = number + 1
            if known is not None and is_map(known):
                yield from _entry_spans(node, known, place)
                continue
            place = f"{place}[{number}]"
        listed = node.listed is not None
        yield Span(place, node.start if listed else node.begin, node.start, node.end, listed, known)
        yield from _spans(node.inner, place)


def _entry_spans(node: _Node, known: FieldDescriptor, place: str) -> Iterator[Span]:
    """Spans of a map entry, under its key."""
    parts = {inner.name: inner for inner in node.inner}
    key, value = parts.get("key"), parts.get("value")
    path = entry_path(place, _key(key, known))
    listed = node.listed is not None
    start = node.start if value is None else value.start
    yield Span(path, node.start if listed else node.begin, start, node.end, listed, known)
    for name, part in parts.items():
        yield Span(f"{path}.{name}", part.begin, part.start, part.end, field=part.known)
    if value is not None:
        yield from _spans(value.inner, path)


def _key(node: _Node | None, known: FieldDescriptor) -> str | int:
    text = part_of_entry(known, "key").cpp_type == FieldDescriptor.CPPTYPE_STRING
    literal = [] if node is None else node.literal
    try:
        if text:
            return b"".join(text_encoding.CUnescape(part[1:-1]) for part in literal).decode()
        return int(literal[0], 8 if re.fullmatch("0[0-7]+", literal[0]) else 0) if literal else 0
    except ValueError:
        return "".join(literal)


class _Reader:
    """Parser of one text."""

    def __init__(self, text: str) -> None:
        self._tokens = [match for match in _TOKEN.finditer(text) if match.lastgroup != "skip"]
        self._next = 0
        self._end = len(text)

    def fields(self, schema: Descriptor | None, closing: str | None) -> list[_Node]:
        """Parses fields up to and including a closing bracket, or to the end."""
        nodes: list[_Node] = []
        while (token := self._take()) is not None:
            if token[0] == closing:
                break
            # Other tokens are separators, or mistakes.
            if token.lastgroup == "word":
                known = None if schema is None else schema.fields_by_name.get(token[0])
                nodes += self._field(token, known)
        return nodes

    def _field(self, name: re.Match[str], known: FieldDescriptor | None) -> list[_Node]:
        if self._peek() == ":":
            self._next += 1
        if self._peek() != "[":
            return [self._value(name, known)]
        start = self._start()
        self._next += 1
        nodes: list[_Node] = []
        while (text := self._peek()) is not None and text != "]":
            before = self._next
            if text == ",":
                self._next += 1
                continue
            node = self._value(name, known)
            if self._next == before:  # not the start of a value
                break
            nodes.append(node)
        if self._peek() == "]":
            self._next += 1
        end = self._last_end()
        nodes = nodes or [_Node(name[0], name.start(), start, end, known, empty=True)]
        for node in nodes:
            node.listed = start, end
        return nodes

    def _value(self, name: re.Match[str], known: FieldDescriptor | None) -> _Node:
        node = _Node(name[0], name.start(), self._start(), 0, known)
        text = self._peek()
        if text in _CLOSING:
            self._next += 1
            if known is None or known.message_type is None:
                self._skip(_CLOSING[text])
            else:
                node.inner = self.fields(known.message_type, _CLOSING[text])
        elif self._kind() == "string":
            while self._kind() == "string":  # adjacent strings are concatenated
                node.literal.append(self._tokens[self._next][0])
                self._next += 1
        elif self._kind() == "word":
            node.literal.append(self._tokens[self._next][0])
            self._next += 1
        node.end = max(self._last_end(), node.start)
        return node

    def _skip(self, closing: str) -> None:
        """Skips to the matching closing bracket."""
        expected = [closing]
        while expected and (token := self._take()) is not None:
            if token[0] in _CLOSING:
                expected.append(_CLOSING[token[0]])
            elif token[0] == expected[-1]:
                expected.pop()

    def _peek(self) -> str | None:
        return self._tokens[self._next][0] if self._next < len(self._tokens) else None

    def _kind(self) -> str | None:
        return self._tokens[self._next].lastgroup if self._next < len(self._tokens) else None

    def _take(self) -> re.Match[str] | None:
        if self._next >= len(self._tokens):
            return None
        self._next += 1
        return self._tokens[self._next - 1]

    def _start(self) -> int:
        """Offset of the next token."""
        return self._tokens[self._next].start() if self._next < len(self._tokens) else self._end

    def _last_end(self) -> int:
        """End of the last consumed token."""
        return self._tokens[self._next - 1].end() if self._next else 0
