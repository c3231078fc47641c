"""Errors in OpenAI's shape: status, type, code and the headers that clients retry by.

The `openai` client tries 408, 409, 429 and 5xx again, unless ``x-should-retry`` says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any, NamedTuple

import orjson

from conch.core.admission import ExitingError
from conch.core.errors import (
    CancelledError,
    ConchError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    QueueFullError,
    QueueLimitError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnknownError,
)
from conch.frontends.http.flow_control import UnreadBodyError
from conch.frontends.http.http_exchange import Reply
from conch.frontends.http.json_body import JSON
from conch_llm.calls.generation import FieldError

_NAMED = re.compile(r"([a-z_]+)[a-z_.\[\]\d]*: ")  # the field that an engine's error begins with
_RETRY_AFTER_MS = 1000  # unless the error knows better
_TOO_LONG = "This model's maximum context length is"


class RequestError(InvalidArgumentError):
    """A request is wrong.

    Args:
        message: The text.
        param: Name of the wrong field; None for none.
        error_code: OpenAI's code; None for none.
    """

    def __init__(self, message: str, param: str | None = None, error_code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.error_code = error_code


class TooLargeError(UnreadBodyError):
    """A body is over the limit."""

    http_status = 413


class UnknownModelError(NotFoundError):
    """There is no model, alias or adapter of this name."""


class UnknownResponseError(NotFoundError):
    """There is no stored response of this id."""


class UnknownPathError(NotFoundError):
    """There is no such route."""


class WrongMethodError(InvalidArgumentError):
    """The route takes another HTTP method."""

    http_status = 405

    def __init__(self, route: str, method: str) -> None:
        super().__init__(f"Method Not Allowed: {route} takes {method}")
        self.method = method


class _Form(NamedTuple):
    status: int
    type: str
    code: str | None


_INVALID = "invalid_request_error"
_SERVER = "server_error"
# The first class that an error is of counts.
_FORMS: tuple[tuple[type[ConchError], _Form], ...] = (
    (TooLargeError, _Form(413, _INVALID, "content_too_large")),
    (WrongMethodError, _Form(405, _INVALID, "method_not_allowed")),
    (UnknownPathError, _Form(404, _INVALID, "unknown_url")),
    (UnknownResponseError, _Form(404, _INVALID, "response_not_found")),
    (UnauthenticatedError, _Form(401, "authentication_error", "invalid_api_key")),
    (PermissionDeniedError, _Form(403, "permission_error", "model_not_allowed")),
    (NotFoundError, _Form(404, "not_found_error", "model_not_found")),
    (QueueLimitError, _Form(429, "rate_limit_error", "queue_full")),
    (ResourceExhaustedError, _Form(429, "rate_limit_error", "rate_limit_exceeded")),
    (QueueFullError, _Form(429, "rate_limit_error", "queue_full")),
    (UnavailableError, _Form(503, _SERVER, "model_unavailable")),
    (DeadlineExceededError, _Form(504, _SERVER, "timeout")),
    # The client is there: the server has cancelled the request, for an unload or its stop.
    (CancelledError, _Form(503, _SERVER, "model_unavailable")),
    (InternalError, _Form(500, _SERVER, None)),
    (UnknownError, _Form(500, _SERVER, None)),
)
_BAD_REQUEST = _Form(400, _INVALID, None)
_PLAIN = _Form(500, _SERVER, None)


def status_of(error: ConchError) -> int:
    """The HTTP status of an error."""
    return _form(error).status


def error_object(error: ConchError, fields: Container[str] = ()) -> dict[str, Any]:
    """The JSON object of an error, in a response or in an event; `fields` are those of the request."""
    form = _form(error)
    code = form.code
    if code is None and error.message.startswith(_TOO_LONG):
        code = "context_length_exceeded"
    param = None
    if isinstance(error, RequestError | FieldError):
        param, code = error.param, error.error_code or code
    elif form is _BAD_REQUEST and (named := _NAMED.match(error.message)) and named[1] in fields:
        param = named[1]
    return {"error": {"message": error.message, "type": form.type, "param": param, "code": code}}


def openai_error(error: ConchError, fields: Container[str] = ()) -> Reply:
    """The response of an error; `fields` are those of the request."""
    form = _form(error)
    headers = [JSON]
    if form.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, WrongMethodError):
        headers.append((b"allow", error.method.encode()))
    if form.status in (429, 503):
        wait_ms = _RETRY_AFTER_MS if error.retry_after_ms is None else error.retry_after_ms
        headers += [
            (b"retry-after", b"%d" % -(-wait_ms // 1000)),
            (b"retry-after-ms", b"%d" % wait_ms),
            (b"x-should-retry", b"true"),
        ]
    elif form.status == 500:
        headers.append((b"x-should-retry", b"false"))  # the model fails again
    closes = isinstance(error, ExitingError | UnreadBodyError)
    return Reply(form.status, headers, orjson.dumps(error_object(error, fields)), closes)


def _form(error: ConchError) -> _Form:
    for kind, form in _FORMS:
        if isinstance(error, kind):
            return form
    return _BAD_REQUEST if error.http_status < 500 or error.http_status == 501 else _PLAIN
