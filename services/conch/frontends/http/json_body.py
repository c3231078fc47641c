"""JSON bodies: reads requests within a limit, parses them off the event loop, and makes replies and errors.

Used by: `generate_route`, `api_routes`, `operation_json`, `http_routing`, `infer_response`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from conch.core.admission import ExitingError
from conch.core.errors import ConchError, InternalError, InvalidArgumentError
from conch.frontends.http.flow_control import TooManyChunksError, UnreadBodyError
from conch.frontends.http.http_connection import CONNECTION, Connection
from conch.frontends.http.http_pools import Pools, parse_on
from conch.frontends.http.jsontext.json_loader import load

JSON = "application/json"


def json_reply(content: Any, status: int = 200) -> Response:
    """Returns a JSON response."""
    return Response(orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS), status, media_type=JSON)


def empty_reply(status: int = 200) -> Response:
    """Returns a response without a body."""
    return Response(b"", status)


def error_body(text: str) -> bytes:
    """Returns the JSON body of an error."""
    return orjson.dumps({"error": text})


def text_error(text: str, status: int) -> Response:
    """Returns an error response from text and status."""
    return Response(error_body(text), status, media_type=JSON)


def error_reply(error: ConchError) -> Response:
    """Returns an error response, with Retry-After if known."""
    headers = {}
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(-(-error.retry_after_ms // 1000))
    if isinstance(error, ExitingError | UnreadBodyError):
        headers["connection"] = "close"
    return Response(error_body(error.message), error.http_status, headers, JSON)


MOST_BYTES: Final = 1 << 26
"""Default limit of a JSON body."""
SETTINGS_BYTES: Final = 8 << 10
"""Limit of a body that holds settings or a name."""

T = TypeVar("T")


async def read_body(request: Request, most_bytes: int) -> bytes:
    """Returns the whole body.

    Raises:
        InvalidArgumentError: The body is over the limit or has too many chunks; the rest is not read.
    """
    declared = request.headers.get("content-length", "")
    if "transfer-encoding" in request.headers:
        declared = ""  # the chunked coding overrides it
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
    """Returns host and port of the client, or an empty string."""
    client = request.client
    return "" if client is None else f"{client.host}:{client.port}"


async def parsed(request: Request, pools: Pools, work: Callable[..., T], *arguments: object) -> T:
    """Runs a parser on the parsing pool; aborts when the client disconnects.

    Raises:
        ConchError: The body is malformed, the client disconnected, or the server stops.
    """
    connection: Connection | None = request.scope.get(CONNECTION)

    def gone() -> bool:
        return connection is not None and connection.lost

    return await parse_on(pools.parsing, client_of(request), gone, work, *arguments)


async def read_settings(request: Request, pools: Pools, most_bytes: int, required: bool = False) -> Any:
    """Parses a small JSON body; returns None for an empty one unless it is required.

    Raises:
        ConchError: The body is too large or no JSON.
    """
    body = await read_body(request, min(most_bytes, SETTINGS_BYTES))
    return await parsed(request, pools, load, body) if body or required else None


def member(value: Any, name: str) -> Any:
    """Returns a member of an object; None if it is missing or null, or the value is no object."""
    return value.get(name) if isinstance(value, dict) else None


def members(value: Any) -> dict[str, Any]:
    """Returns all members of an object. Raises InternalError: the value is no object."""
    if not isinstance(value, dict):
        raise InternalError("attempt to get members for non-object")
    return value
