"""The body of a generate request: an object whose members come in order, and may come twice."""

from __future__ import annotations

import json
from typing import Any

from conch.core.errors import InternalError, InvalidArgumentError
from conch.frontends.http.bodies import members
from conch.frontends.http.infer.elements import MOST_DEPTH
from conch.frontends.http.jsontext.bulk import BulkArray
from conch.frontends.http.jsontext.load import load


class Pairs(list[tuple[str, Any]]):
    """The members of an object in the order of the document, all of them; no array is one."""


_PAIRS = json.JSONDecoder(object_pairs_hook=Pairs)


def parse_document(body: bytes) -> Pairs:
    """The members of a body; long arrays may come as `BulkArray`.

    Raises:
        InternalError: It is no JSON, or no object.
        InvalidArgumentError: It is nested too deeply.
    """
    value = members(load(body))
    try:
        # Of members of one name the parser keeps one; the colons of the others are left over.
        if body.count(b":") <= _colons(value):
            return _ordered(value)
        pairs: Pairs = _PAIRS.decode(body.decode(errors="surrogateescape"))
        return pairs
    except RecursionError:
        raise InvalidArgumentError(
            f"JSON nesting depth exceeds maximum allowed limit ({MOST_DEPTH})"
        ) from None
    except ValueError as error:  # what the other parser is less patient with
        raise InternalError(f"failed to parse the request JSON buffer: {error}") from None


def _ordered(value: dict[str, Any]) -> Pairs:
    return Pairs((key, _ordered(each) if isinstance(each, dict) else each) for key, each in value.items())


def _colons(value: Any) -> int:
    """How many colons there are in a value's JSON; those in arrays count where they hold strings first."""
    if isinstance(value, str):
        return value.count(":")
    if isinstance(value, dict):
        return sum(1 + key.count(":") + _colons(each) for key, each in value.items())
    if isinstance(value, BulkArray):
        return sum(map(_colons, value.pieces))
    if isinstance(value, list) and value and isinstance(value[0], str | dict | list | BulkArray):
        return sum(map(_colons, value))
    return 0
