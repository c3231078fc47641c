"""Parses JSON: with orjson where the result is the same, else with the Triton-compatible scanner."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import orjson

from conch.core.tensor import Buffer
from conch.frontends.http.jsontext.json_scanner import Pairs, scan

_LITERAL = re.compile(rb"[NI](?:aN|nf(?:inity)?)")
_MINUS = ord("-")
_VALUES = {
    b"NaN": float("nan"),
    b"-NaN": float("nan"),
    b"Inf": float("inf"),
    b"Infinity": float("inf"),
    b"-Infinity": float("-inf"),
}


def without_literals(text: bytes) -> tuple[bytes, list[float]] | None:
    """Puts ``null`` in place of such numbers.

    Args:
        text: A text that may be JSON but for them.

    Returns:
        The text without them, and them in their order; None where that can't be told from what is in strings,
        or there are none.
    """
    if b"\\" in text or b"null" in text:
        return None
    values: list[float] = []
    parts: list[bytes] = []
    for number, part in enumerate(text.split(b'"')):
        inside = number % 2  # of a string
        parts.append(part if inside else _replaced(part, values))
    return (b'"'.join(parts), values) if values else None


def _replaced(part: bytes, values: list[float]) -> bytes:
    """A part of a text outside of strings without such numbers, which are appended to others."""
    pieces: list[bytes] = []
    end = 0
    for start in _starts(part):
        found = _LITERAL.match(part, start)
        if found is None:
            continue
        literal = found.group()
        before = start - 1
        if literal != b"Inf" and before >= 0 and part[before] == _MINUS:
            start, literal = before, b"-" + literal  # noqa: PLW2901
        values.append(_VALUES[literal])
        pieces.append(part[end:start])
        end = found.end()
    pieces.append(part[end:])
    return b"null".join(pieces)


def _starts(part: bytes) -> list[int]:
    """Where letters are that such numbers begin with, found a hundred times as fast as by an expression."""
    starts: list[int] = []
    for letter in (b"N", b"I"):
        position = part.find(letter)
        while position >= 0:
            # The second N of NaN begins nothing.
            starts.append(position)
            position = part.find(letter, position + (3 if part.startswith(b"NaN", position) else 1))
    return sorted(starts)


def put_back(value: Any, values: list[float]) -> bool:
    """Restores the numbers in a parsed text.

    Returns:
        Whether each has found its place. Where an array has numbers beside arrays that is not so, and the
        value is of no use.
    """
    if not isinstance(value, dict | list):
        return False
    left = iter(values)
    try:
        _fill(value, left)
    except StopIteration:
        return False
    return next(left, None) is None


def _fill(value: Any, values: Iterator[float]) -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            if each is None:
                value[key] = next(values)
            elif isinstance(each, dict | list):
                _fill(each, values)
    elif value and isinstance(value[0], dict | list):
        for each in value:
            if isinstance(each, dict | list):
                _fill(each, values)
    else:
        place = -1
        try:
            while True:
                place = value.index(None, place + 1)
                value[place] = next(values)
        except ValueError:
            pass  # that was the last one


QUICK_BYTES = 64 * 1024
"""Up to this size the fast parser takes less than a millisecond."""
_SHORT_BYTES = 1024
"""Up to this size the other one takes no longer."""
_QUICK_MEMBERS = 1024
_UNKNOWN: Final = object()
"""Stands for the value of a text that the fast parser can't tell."""


class SlowTextError(Exception):
    """A text is too slow to parse on the event loop."""


def load(text: Buffer, pairs: bool = False) -> Any:
    """Parses a text; long arrays may come as `BulkArray`.

    Args:
        text: The text.
        pairs: Whether objects come as `Pairs`; those in arrays do not always.

    Raises:
        JsonSyntaxError: It is no JSON.
        JsonDepthError: It is nested too deep.
        JsonMembersError: It is long, and has too many objects or members of objects.
    """
    if len(text) <= QUICK_BYTES:
        text = bytes(text)
        value = _parsed(text)
        if value is not _UNKNOWN:
            return _ordered(value) if pairs else value
    return scan(text, pairs)


def load_quickly(text: Buffer, pairs: bool = False) -> Any:
    """Parses a text if that is fast; for the event loop.

    Args:
        text: The text.
        pairs: Whether objects come as `Pairs`; those in arrays do not always.

    Raises:
        SlowTextError: It would take long; nothing has come of it.
        ConchError: See `load`.
    """
    if len(text) <= _SHORT_BYTES:
        return load(text, pairs)
    if len(text) > QUICK_BYTES:
        raise SlowTextError
    text = bytes(text)
    if text.count(b"{") + text.count(b":") > _QUICK_MEMBERS:
        raise SlowTextError
    value = _parsed(text, literals=False)
    if value is _UNKNOWN:
        raise SlowTextError
    return _ordered(value) if pairs else value


def _parsed(text: bytes, literals: bool = True) -> Any:
    """What the fast parser makes of a text, with literals for numbers that it does not know if so wanted."""
    values: list[float] = []
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        replaced = without_literals(text) if literals else None
        if replaced is None:
            return _UNKNOWN
        try:
            value = orjson.loads(replaced[0])
        except orjson.JSONDecodeError:
            return _UNKNOWN
        values = replaced[1]
    # The fast parser takes the last of members with the same name. Where it has found as many members
    # as there are colons there are no such.
    try:
        if _members(value) == text.count(b":") and (not values or put_back(value, values)):
            return value
    except RecursionError:
        pass  # nested too deep for counting; the other parser does not recurse
    return _UNKNOWN


def _members(value: Any) -> int:
    """How many members objects have, those in arrays of scalars not looked for."""
    if isinstance(value, dict):
        return len(value) + sum(_members(each) for each in value.values() if isinstance(each, dict | list))
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return sum(_members(each) for each in value)
    return 0


def _ordered(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return Pairs((key, _ordered(each)) for key, each in value.items())
