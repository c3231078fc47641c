"""JSON texts to values: by a fast parser where that comes to the same, else by one that does as Triton."""

from __future__ import annotations

from typing import Any, Final

import orjson

from conch.core.tensor import Buffer
from conch.frontends.http.jsontext.literals import put_back, without_literals
from conch.frontends.http.jsontext.scan import Pairs, scan

QUICK_BYTES = 64 * 1024
"""Up to this size the fast parser takes less than a millisecond."""
_SHORT_BYTES = 1024
"""Up to this size the other one takes no longer."""
_QUICK_MEMBERS = 1024
_UNKNOWN: Final = object()
"""Stands for the value of a text that the fast parser can't tell."""


class SlowTextError(Exception):
    """Parsing a text would take long."""


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
    """Parses a text on a thread that must not compute for long.

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
