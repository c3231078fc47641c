"""Parses JSON: with orjson where the result is the same, else with the Triton-compatible scanner."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
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


def load(text: Buffer, pairs: bool = False, quick: bool = False) -> Any:
    """Parses a text; long arrays may come as `BulkArray`.

    Args:
        text: The text.
        pairs: Whether objects come as `Pairs`; those in arrays do not always.
        quick: Whether the thread must not compute for long; for the event loop.

    Raises:
        JsonSyntaxError: It is no JSON.
        JsonDepthError: It is nested too deep.
        JsonMembersError: It is long, and has too many objects or members of objects.
        SlowTextError: It would take long, with `quick`; nothing has come of it.
    """
    size = len(text)
    quick = quick and size > _SHORT_BYTES
    if size <= QUICK_BYTES:
        text = bytes(text)
        if quick and text.count(b"{") + text.count(b":") > _QUICK_MEMBERS:
            raise SlowTextError
        try:
            value = orjson.loads(text)
            # orjson takes the last of members with the same name. Where it has found as many members as there
            # are colons there are no such.
            known = _members(value) == text.count(b":")
        except orjson.JSONDecodeError:
            value = _UNKNOWN if quick else _with_literals(text)
            known = value is not _UNKNOWN
        if known:
            return _ordered(value) if pairs else value
    if quick:
        raise SlowTextError
    return scan(text, pairs)


def _with_literals(text: bytes) -> Any:
    """Parses a text with numbers that orjson does not know, such as NaN; `_UNKNOWN` if that fails."""
    replaced = without_literals(text)
    if replaced is not None:
        with suppress(orjson.JSONDecodeError, RecursionError):  # `scan` does not recurse
            value = orjson.loads(replaced[0])
            if _members(value) == text.count(b":") and put_back(value, replaced[1]):
                return value
    return _UNKNOWN


def _members(value: Any) -> int:
    """Counts the members of all objects but those in arrays that begin with a scalar."""
    count = 0
    left = [value]
    for each in left:  # grows meanwhile
        if type(each) is dict:
            count += len(each)
            left += each.values()
        elif type(each) is list and each and type(each[0]) is dict:
            left += each
    return count


def _ordered(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return Pairs((key, _ordered(each)) for key, each in value.items())
