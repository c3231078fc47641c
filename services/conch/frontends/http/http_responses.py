"""JSON and error responses shared by all REST routes."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

from conch.core.admission import ExitingError
from conch.core.errors import ConchError
from conch.frontends.http.http_connection import UnreadBodyError

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
