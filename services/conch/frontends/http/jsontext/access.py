"""Values of a parsed JSON text by their types; what does not fit is told as Triton tells it."""

from __future__ import annotations

from typing import Any

from conch.core.errors import InternalError
from conch.frontends.http.jsontext.bulk import WINDOW, BulkArray, flattened
from conch.frontends.http.turns import give_way


class JsonAccessError(InternalError):
    """A value is missing or of the wrong type; a client's fault with the status that Triton gives it."""


def member(value: Any, name: str) -> Any:
    """A member of an object.

    Raises:
        JsonAccessError: There is no such member, or the value is no object.
    """
    if not isinstance(value, dict) or name not in value:
        raise JsonAccessError(f"attempt to access non-existing object member '{name}'")
    return value[name]


def text(value: Any) -> str:
    """A string; bytes in it that were no UTF-8 are replaced."""
    if not isinstance(value, str):
        raise JsonAccessError("attempt to access JSON non-string as string")
    if value.isascii():
        return value
    if len(value) <= WINDOW:
        return _readable(value)
    parts = []
    for start in range(0, len(value), WINDOW):
        parts.append(_readable(value[start : start + WINDOW]))
        give_way()
    return "".join(parts)


def _readable(value: str) -> str:
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def boolean(value: Any) -> bool:
    """A boolean."""
    if not isinstance(value, bool):
        raise JsonAccessError("attempt to access JSON non-boolean as boolean")
    return value


def unsigned(value: Any) -> int:
    """An integer from 0 on."""
    if type(value) is not int or value < 0:
        raise JsonAccessError("attempt to access JSON non-unsigned-integer as unsigned-integer")
    return value


def array(value: Any) -> list[Any] | BulkArray:
    """An array."""
    if not isinstance(value, list | BulkArray):
        raise JsonAccessError("attempt to access JSON non-array as array")
    return value


def elements(value: Any) -> list[Any]:
    """An array that is not to be long."""
    given = array(value)
    return given if isinstance(given, list) else flattened(given)[0]
