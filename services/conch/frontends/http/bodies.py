"""Request bodies of JSON: read within a limit, parsed, and what a member may be that need not be there."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from conch.core.errors import InternalError, InvalidArgumentError
from conch.frontends.http.jsontext.load import load

MOST_BYTES = 1 << 26
"""The largest body of JSON there may be, if nobody says otherwise."""


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
    return load(body) if body else None


def member(value: Any, name: str) -> Any:
    """A member of an object; None where there is none, it is null, or the value is no object."""
    return value.get(name) if isinstance(value, dict) else None


def members(value: Any) -> dict[str, Any]:
    """All members of an object.

    Raises:
        InternalError: It is none.
    """
    if not isinstance(value, dict):
        raise InternalError("attempt to get members for non-object")
    return value
