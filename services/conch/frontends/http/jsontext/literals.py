"""Numbers that JSON has no notation for, ``NaN`` and ``Infinity``, for a parser that does not know them.

They are few where they occur at all, and must not have a whole text parsed by a slow parser.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

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
    """Puts the numbers into a parsed text, where they were.

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
