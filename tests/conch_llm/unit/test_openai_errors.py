"""Errors of the server in OpenAI's shape."""

from __future__ import annotations

import json

import pytest

from conch.core import errors
from conch.core.admission import ExitingError
from conch.core.errors import ConchError
from conch_llm.frontend.openai_errors import RequestError, TooLargeError, openai_error

LONG = "This model's maximum context length is 8 tokens. However, your prompt contains 9"


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (errors.InvalidArgumentError("a"), 400, "invalid_request_error", None),
        (errors.InvalidArgumentError(LONG), 400, "invalid_request_error", "context_length_exceeded"),
        (errors.UnsupportedError("a"), 400, "invalid_request_error", None),
        (RequestError("a", "p", "json_invalid"), 400, "invalid_request_error", "json_invalid"),
        (errors.UnauthenticatedError("a"), 401, "authentication_error", "invalid_api_key"),
        (errors.PermissionDeniedError("a"), 403, "permission_error", "model_not_allowed"),
        (errors.NotFoundError("a"), 404, "not_found_error", "model_not_found"),
        (TooLargeError("a"), 413, "invalid_request_error", "content_too_large"),
        (errors.ResourceExhaustedError("a"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (errors.QueueFullError("a"), 429, "rate_limit_error", "queue_full"),
        (errors.QueueLimitError("a"), 429, "rate_limit_error", "queue_full"),
        (errors.InternalError("a"), 500, "server_error", None),
        (errors.UnavailableError("a"), 503, "server_error", "model_unavailable"),
        (ExitingError("a"), 503, "server_error", "model_unavailable"),
        (errors.DeadlineExceededError("a"), 504, "server_error", "timeout"),
    ],
)
def test_each_error_has_its_form(error: ConchError, status: int, kind: str, code: str | None) -> None:
    reply = openai_error(error)
    assert reply.status == status
    assert isinstance(reply.body, bytes)
    param = error.param if isinstance(error, RequestError) else None
    assert json.loads(reply.body) == {
        "error": {"message": error.message, "type": kind, "param": param, "code": code}
    }
    assert reply.closes == (status == 413 or isinstance(error, ExitingError))
    headers = dict(reply.headers)
    assert (b"retry-after" in headers) == (status in (429, 503))
    assert headers.get(b"x-should-retry") == {429: b"true", 503: b"true", 500: b"false"}.get(status)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("stop_token_ids: must be a list of tokens", "stop_token_ids"),
        ("messages[2].tool_calls: is malformed", "messages"),
        ("lora_name: the model has no such adapter", None),
        ("messages must be a list", None),
    ],
)
def test_an_engine_s_error_names_the_field_that_it_begins_with(message: str, param: str | None) -> None:
    reply = openai_error(errors.InvalidArgumentError(message), {"stop_token_ids": 1, "messages": []})
    assert isinstance(reply.body, bytes)
    assert json.loads(reply.body)["error"]["param"] == param


def test_the_time_to_wait_is_rounded_up_to_seconds() -> None:
    error = errors.ResourceExhaustedError("a")
    error.retry_after_ms = 1_001
    headers = dict(openai_error(error).headers)
    assert (headers[b"retry-after"], headers[b"retry-after-ms"]) == (b"2", b"1001")
