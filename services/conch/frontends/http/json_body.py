"""Request bodies of JSON: read within a limit, parsed off the loop, and what a member may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from starlette.requests import Request

from conch.core.errors import InternalError, InvalidArgumentError
from conch.frontends.http.http_connection import CONNECTION, Connection, TooManyChunksError, UnreadBodyError
from conch.frontends.http.http_pools import Pools, parse_on
from conch.frontends.http.jsontext.json_loader import load

MOST_BYTES: Final = 1 << 26
"""The largest body of JSON there may be, if nobody says otherwise."""
SETTINGS_BYTES: Final = 8 << 10
"""The largest body of a route that takes settings, or the name of something."""

T = TypeVar("T")


async def read_body(request: Request, most_bytes: int) -> bytes:
    """The whole body.

    Raises:
        InvalidArgumentError: It is larger than it may be, or in too many pieces; no more has been kept of it.
    """
    declared = request.headers.get("content-length", "")
    if "transfer-encoding" in request.headers:
        declared = ""  # chunks say it
    if declared.isdecimal() and int(declared) > most_bytes:
        raise InvalidArgumentError(_too_large(int(declared), most_bytes))
    connection: Connection | None = request.scope.get(CONNECTION)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        if connection is not None and connection.too_many_chunks:
            raise TooManyChunksError
        size += len(part)
        if size > most_bytes:
            raise UnreadBodyError(_too_large(size, most_bytes))
        parts.append(part)
    return b"".join(parts)


def _too_large(size: int, most_bytes: int) -> str:
    text = f"request JSON size of {size} bytes exceeds the maximum allowed input size of {most_bytes} bytes. "
    if most_bytes == SETTINGS_BYTES:
        return text + "This path takes no more."
    return text + "Use --http-max-input-size to increase the limit."


def client_of(request: Request) -> str:
    """The address of the client of a request."""
    client = request.client
    return "" if client is None else f"{client.host}:{client.port}"


async def parsed(request: Request, pools: Pools, work: Callable[..., T], *arguments: object) -> T:
    """Has a body parsed off the loop, as long as its client is there.

    Args:
        request: The request.
        pools: Has the threads.
        work: Parses.
        arguments: What it takes.

    Raises:
        ConchError: The body is wrong, the client is gone, or the server stops.
    """
    connection: Connection | None = request.scope.get(CONNECTION)

    def gone() -> bool:
        return connection is not None and connection.lost

    return await parse_on(pools.parsing, client_of(request), gone, work, *arguments)


async def read_settings(request: Request, pools: Pools, most_bytes: int, required: bool = False) -> Any:
    """The JSON of a body of few kilobytes; None where there is no body, unless it is required.

    Raises:
        ConchError: It is too large, or no JSON.
    """
    body = await read_body(request, min(most_bytes, SETTINGS_BYTES))
    return await parsed(request, pools, load, body) if body or required else None


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
