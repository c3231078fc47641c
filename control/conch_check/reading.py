"""Parses a config's text and reports all syntax errors.

protobuf stops at the first error. The text is repaired there (nearest valid name, missing sign, or the field
dropped) and parsed again, until it parses or no repair helps. Messages are protobuf's, positions those of the
original text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor

from conch.protocol.model_config_pb2 import ModelConfig
from conch_check.positions import Positions, Span, parent
from conch_control.config.problems import Problem, unknown_name

_MOST = 100
_POSITION = re.compile(r"^\d+:\d+ : ")
_MISSING_SIGN = re.compile(r'Expected "([,:])"')
_NOT_BLANK = re.compile(r"[^\n]")
_SEPARATOR = re.compile(r"\s*[,;]")
_LONGEST = 60
_NO_TYPE = "TYPE_INVALID"

# Unbalanced brackets: the fields behind them can't be known.
_STRUCTURE = ('Expected "}', 'Expected ">', "Expected identifier")
_NOT_OF_VALUES = (*_STRUCTURE, 'Expected ","', 'Expected ":"', "Message type", "Field ")

_TYPES = {
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_STRING: "a string in quotes",
    FieldDescriptor.CPPTYPE_MESSAGE: "fields in braces",
    FieldDescriptor.CPPTYPE_INT32: "a whole number from -2^31 to 2^31 - 1",
    FieldDescriptor.CPPTYPE_INT64: "a whole number from -2^63 to 2^63 - 1",
    FieldDescriptor.CPPTYPE_UINT32: "a whole number from 0 to 2^32 - 1",
    FieldDescriptor.CPPTYPE_UINT64: "a whole number from 0 to 2^64 - 1",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
}


@dataclass(frozen=True, slots=True)
class Mistake:
    """A syntax error."""

    problem: Problem
    line: int
    column: int


@dataclass(slots=True)
class ParsedConfig:
    """Result of parsing: the config without unreadable fields, or None.

    `dropped` has the paths of fields in the text that the config lacks.
    """

    config: ModelConfig | None
    mistakes: list[Mistake]
    dropped: frozenset[str]
    _repaired: _RepairedText

    def place(self, path: str) -> tuple[int, int]:
        """Line and column of a field's value, or of the nearest enclosing field."""
        span = self._repaired.positions.nearest(path)
        return self._repaired.place(0 if span is None else span.value)

    def source_text(self, path: str) -> str:
        """Source text of a field's value; empty if absent."""
        span = self._repaired.positions.find(path)
        return "" if span is None else self._repaired.text[span.value : span.end]


def read_text(text: str) -> ParsedConfig:
    """Parses a config, valid or not."""
    repaired = _RepairedText(text)
    mistakes: list[Mistake] = []
    dropped: set[str] = set()
    config: ModelConfig | None = None
    for _ in range(_MOST):
        config = ModelConfig()
        try:
            text_format.Parse(repaired.text, config)
            break
        except text_format.ParseError as error:
            config = None
            offset = repaired.positions.offset(error.GetLine() or 1, error.GetColumn() or 1)
            message = _plain(error, repaired.text)
        except ValueError as error:  # a string is not UTF-8
            config = None
            mistakes.append(Mistake(Problem("", str(error)), 1, 1))
            break
        span = repaired.positions.at(offset)
        mistakes.append(Mistake(_problem(message, span, repaired.text), *repaired.place(offset)))
        if not _repair(repaired, message, offset, span, dropped):
            break
    return ParsedConfig(config, mistakes, frozenset(dropped), repaired)


def _plain(error: text_format.ParseError, text: str) -> str:
    """The parser's message without position and source line."""
    message = _POSITION.sub("", str(error))
    lines = text.split("\n")
    line = lines[min((error.GetLine() or 1), len(lines)) - 1]
    return message.removeprefix(f"'{line}': ").removeprefix("'': ")


def _problem(message: str, span: Span | None, text: str) -> Problem:
    path = "" if span is None else span.path
    unknown = unknown_name(message)
    if unknown is not None:
        name, near = unknown
        return Problem(path, message, found=f"'{name}'", nearest=near, expected=_values(span))
    if span is None or span.field is None or message.startswith(_NOT_OF_VALUES):
        return Problem(path, message)
    found = text[span.value : span.end]
    return Problem(path, message, expected=_values(span), found=shorten(found) or "nothing")


def _values(span: Span | None) -> str:
    """Description of a field's valid values."""
    known = None if span is None else span.field
    if known is None:
        return ""
    if known.enum_type is not None:
        return f"one of {', '.join(name for name in known.enum_type.values_by_name if name != _NO_TYPE)}"
    return _TYPES.get(known.cpp_type, "")


def shorten(text: str) -> str:
    """A text as one line of limited length."""
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _repair(repaired: _RepairedText, message: str, offset: int, span: Span | None, dropped: set[str]) -> bool:
    """Removes one error from the text; returns False if impossible."""
    sign = _MISSING_SIGN.match(message)
    if sign is not None and repaired.insert(offset, sign[1]):
        return True
    if span is None or message.startswith(_STRUCTURE):
        return False
    unknown = unknown_name(message)
    if unknown is not None and unknown[1] and repaired.text[offset:].startswith(unknown[0]):
        name, near = unknown
        place = parent(span.path)
        taken = repaired.positions.find(f"{place}.{near}" if place else near)
        # A duplicate name would be the next error.
        if span.name != offset or taken is None or (taken.field is not None and taken.field.is_repeated):
            return repaired.replace(offset, offset + len(name), near)
    whole = repaired.positions.find(parent(span.path)) if span.element else span
    if whole is None or not whole.name <= offset <= whole.end:
        return False
    if "should not have multiple" not in message:
        dropped.add(whole.path)
    return repaired.drop(whole)


class _RepairedText:
    """A text with changes, and the mapping to original offsets."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._before = text
        self._changes: list[tuple[int, int, int]] = []  # start, length now, length before
        self._inserted: set[int] = set()

    @cached_property
    def positions(self) -> Positions:
        """Current positions; computed only for malformed texts."""
        return Positions(self.text)

    @cached_property
    def _original(self) -> Positions:
        return Positions(self._before)

    def place(self, offset: int) -> tuple[int, int]:
        """Original line and column of a current offset."""
        return self._original.place(self.original(offset))

    def original(self, offset: int) -> int:
        """Original offset of a current offset."""
        for start, now, before in reversed(self._changes):
            if offset >= start + now:
                offset += before - now
            elif offset > start:
                offset = start + min(offset - start, before)
        return offset

    def insert(self, offset: int, sign: str) -> bool:
        """Inserts a sign; returns False if it was inserted there before."""
        place = self.original(offset)
        if place in self._inserted:
            return False
        self._inserted.add(place)
        return self.replace(offset, offset, f" {sign} ")

    def replace(self, start: int, end: int, text: str) -> bool:
        """Replaces a range; returns False if nothing changes."""
        if self.text[start:end] == text:
            return False
        self._changes.append((start, len(text), end - start))
        self.text = self.text[:start] + text + self.text[end:]
        vars(self).pop("positions", None)
        return True

    def drop(self, span: Span) -> bool:
        """Blanks out a field and the separator behind it."""
        separator = _SEPARATOR.match(self.text, span.end)
        end = span.end if separator is None else separator.end()
        return self.replace(span.name, end, _NOT_BLANK.sub(" ", self.text[span.name : end]))
