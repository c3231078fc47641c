"""Request bodies of JSON: read within a limit, parsed, and taken apart with Triton's texts for what is wrong.

Most of these texts come with status 500 in Triton, although the client is at fault, and so they do here.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson
from starlette.requests import Request

from conch.core.errors import InternalError, InvalidArgumentError

MOST_BYTES = 1 << 26
"""The largest body of JSON there may be, if nobody says otherwise."""

_NOT_FINITE = re.compile(rb"NaN|Inf")
_MOST_NESTING = 100


async def read_body(request: Request, most_bytes: int) -> bytes:
    """The whole body.

    Raises:
        InvalidArgumentError: It is larger than it may be; not more than that has been kept of it.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most_bytes:
        raise _too_large(int(declared), most_bytes)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most_bytes:
            raise _too_large(size, most_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(size: int, most_bytes: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"request JSON size of {size} bytes exceeds the maximum allowed input size of {most_bytes} bytes. "
        "Use --http-max-input-size to increase the limit."
    )


async def read_json(request: Request, most_bytes: int) -> Any:
    """The body's JSON; None where there is no body.

    Raises:
        ConchError: It is too large, or no JSON.
    """
    body = await read_body(request, most_bytes)
    return parse_json(body) if body else None


def parse_json(body: bytes) -> Any:
    """What a body says, infinities and NaNs among its numbers, if need be.

    Raises:
        InternalError: It is no JSON.
        InvalidArgumentError: It is nested too deeply.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        problem = error
    if "depth limit" in problem.msg or "recursion" in problem.msg.lower():
        raise too_deep()
    if _NOT_FINITE.search(body) is None:
        raise malformed(problem)
    try:
        value = json.loads(body)
        # Half a surrogate pair is no text; this finds it wherever it is.
        json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as error:
        raise malformed(error) from None
    except RecursionError:
        raise too_deep() from None
    except ValueError:
        raise malformed(problem) from None


def malformed(error: json.JSONDecodeError) -> InternalError:
    """The error for a body that is no JSON."""
    text = error.msg.lower()
    if not error.doc.strip():
        reason, place = "The document is empty.", 0
    elif "extra data" in text or "unexpected content after document" in text:
        reason, place = "The document root must not be followed by other values.", error.pos
    elif "infinity" in text:
        reason, place = "Number too big to be stored in double.", error.pos
    elif "surrogate" in text:
        reason, place = "The surrogate pair in string is invalid.", error.pos
    else:
        reason, place = "Invalid value.", error.pos
    return InternalError(f"failed to parse the request JSON buffer: {reason} at {place}")


def too_deep() -> InvalidArgumentError:
    """The error for a body that is nested too deeply."""
    return InvalidArgumentError(f"JSON nesting depth exceeds maximum allowed limit ({_MOST_NESTING})")


def member(value: Any, name: str) -> Any:
    """A member of an object; None where there is none, it is null, or the value is no object."""
    return value.get(name) if isinstance(value, dict) else None


def needed(value: Any, name: str) -> Any:
    """A member that has to be there.

    Raises:
        InternalError: It is not.
    """
    if not isinstance(value, dict) or name not in value:
        raise InternalError(f"attempt to access non-existing object member '{name}'")
    return value[name]


def members(value: Any) -> dict[str, Any]:
    """All members of an object.

    Raises:
        InternalError: It is none.
    """
    if not isinstance(value, dict):
        raise InternalError("attempt to get members for non-object")
    return value


def text(value: Any) -> str:
    """A string.

    Raises:
        InternalError: It is none.
    """
    if not isinstance(value, str):
        raise InternalError("attempt to access JSON non-string as string")
    return value


def boolean(value: Any) -> bool:
    """A boolean.

    Raises:
        InternalError: It is none.
    """
    if not isinstance(value, bool):
        raise InternalError("attempt to access JSON non-boolean as boolean")
    return value


def unsigned(value: Any) -> int:
    """A whole number of 64 bits that is not negative.

    Raises:
        InternalError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
        raise InternalError("attempt to access JSON non-unsigned-integer as unsigned-integer")
    return value


def array(value: Any) -> list[Any]:
    """An array.

    Raises:
        InternalError: It is none.
    """
    if not isinstance(value, list):
        raise InternalError("attempt to access JSON non-array as array")
    return value
