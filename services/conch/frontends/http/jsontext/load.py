"""JSON texts to values: by a fast parser where that comes to the same, else by one that does as Triton."""

from __future__ import annotations

from typing import Any

import orjson

from conch.core.tensor import Buffer
from conch.frontends.http.jsontext.literals import put_back, without_literals
from conch.frontends.http.jsontext.scan import scan

QUICK_BYTES = 64 * 1024
"""Up to this size parsing takes less than a millisecond."""


def load(text: Buffer) -> Any:
    """Parses a text; long arrays may come as `BulkArray`.

    Raises:
        JsonSyntaxError: It is no JSON.
    """
    if len(text) <= QUICK_BYTES:
        text = bytes(text)
        values: list[float] = []
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            replaced = without_literals(text)
            if replaced is None:
                return scan(text)
            try:
                value = orjson.loads(replaced[0])
            except orjson.JSONDecodeError:
                return scan(text)
            values = replaced[1]
        # The fast parser takes the last of members with the same name. Where it has found as many members
        # as there are colons there are no such.
        try:
            if _members(value) == text.count(b":") and (not values or put_back(value, values)):
                return value
        except RecursionError:
            pass  # nested too deep for counting; the other parser takes any depth
    return scan(text)


def _members(value: Any) -> int:
    """How many members objects have, those in arrays of scalars not looked for."""
    if isinstance(value, dict):
        return len(value) + sum(_members(each) for each in value.values() if isinstance(each, dict | list))
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return sum(_members(each) for each in value)
    return 0
