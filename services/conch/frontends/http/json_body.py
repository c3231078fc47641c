"""JSON bodies: reads them within a limit, parses them off the event loop, and makes replies and errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import orjson

from conch.core.admission import ExitingError
from conch.core.errors import ConchError, InternalError, InvalidArgumentError, UnauthenticatedError
from conch.frontends.http.flow_control import MOST_CHUNKS, HeldBodyError, TooManyChunksError, UnreadBodyError
from conch.frontends.http.http_exchange import Headers, HttpExchange, Reply
from conch.frontends.http.http_pools import Pools, result_of
from conch.frontends.http.jsontext.json_loader import load
from conch.frontends.yield_gil import in_pieces

T = TypeVar("T")

JSON: Final = (b"content-type", b"application/json")


def json_reply(content: Any, status: int = 200) -> Reply:
    """Returns a JSON response."""
    return Reply(status, [JSON], orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS))


def json_list(items: Sequence[T], convert: Callable[[T], Any]) -> bytes:
    """JSON of a long list, between whose pieces other threads run."""
    pieces = (orjson.dumps(list(map(convert, piece)))[1:-1] for piece in in_pieces(items))
    return b"[%b]" % b",".join(pieces)


def empty_reply(status: int = 200) -> Reply:
    """Returns a response without a body."""
    return Reply(status, [])


def error_body(text: str) -> bytes:
    """Returns the JSON body of an error."""
    return orjson.dumps({"error": text})


def text_error(text: str, status: int) -> Reply:
    """Returns an error response from text and status."""
    return Reply(status, [JSON], error_body(text))


def error_reply(error: ConchError) -> Reply:
    """Returns an error response, with Retry-After if known."""
    headers = [JSON, *retry_after(error.retry_after_ms)]
    if error.http_status == UnauthenticatedError.http_status:
        headers.append((b"www-authenticate", b"Bearer"))
    closes = isinstance(error, ExitingError | HeldBodyError | UnreadBodyError)
    return Reply(error.http_status, headers, error_body(error.message), closes)


def retry_after(milliseconds: int | None) -> Headers:
    """Returns the header that says when another try makes sense; none if that is not known."""
    return [] if milliseconds is None else [(b"retry-after", b"%d" % -(-milliseconds // 1000))]


MOST_BYTES: Final = 1 << 26
"""Default limit of a JSON body."""
SETTINGS_BYTES: Final = 8 << 10
"""Limit of a body that holds settings or a name."""


async def read_body(exchange: HttpExchange, most_bytes: int) -> memoryview:
    """Returns the whole body.

    Raises:
        InvalidArgumentError: The body is over the limit or has too many chunks; the rest is not read.
        ClientDisconnectError: The client disconnected.
    """
    if exchange.length is not None and exchange.length > most_bytes:
        raise InvalidArgumentError(_too_large(exchange.length, most_bytes))
    await exchange.wait_body(most_bytes)
    if exchange.unread:
        if exchange.chunks > MOST_CHUNKS:
            raise TooManyChunksError
        raise UnreadBodyError(_too_large(exchange.size, most_bytes))
    return exchange.take_body()


def _too_large(size: int, most_bytes: int) -> str:
    text = f"request JSON size of {size} bytes exceeds the maximum allowed input size of {most_bytes} bytes. "
    if most_bytes == SETTINGS_BYTES:
        return text + "This path takes no more."
    return text + "Use --http-max-input-size to increase the limit."


async def parsed(exchange: HttpExchange, pools: Pools, work: Callable[..., T], *arguments: object) -> T:
    """Runs a parser on the parsing pool; aborts when the client disconnects.

    Raises:
        ConchError: The body is malformed, the client disconnected, or the server stops.
    """
    client, pool = exchange.client, pools.parsing
    return await result_of(lambda: pool.submit_for(client, lambda: exchange.lost, work, *arguments))


async def read_settings(exchange: HttpExchange, pools: Pools, most_bytes: int, required: bool = False) -> Any:
    """Parses a small JSON body; returns None for an empty one unless it is required.

    Raises:
        ConchError: The body is too large or no JSON.
    """
    body = await read_body(exchange, min(most_bytes, SETTINGS_BYTES))
    return await parsed(exchange, pools, load, body) if body or required else None


def member(value: Any, name: str) -> Any:
    """Returns a member of an object; None if it is missing or null, or the value is no object."""
    return value.get(name) if isinstance(value, dict) else None


def members(value: Any) -> dict[str, Any]:
    """Returns all members of an object. Raises InternalError: the value is no object."""
    if not isinstance(value, dict):
        raise InternalError("attempt to get members for non-object")
    return value
