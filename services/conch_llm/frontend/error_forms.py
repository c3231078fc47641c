"""Forms of errors: OpenAI's, and Anthropic's for its Messages API; as responses and as events of a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from typing import Any, ClassVar

from conch.core.errors import ConchError
from conch.frontends.http.http_exchange import Reply
from conch_llm.contract import MESSAGES
from conch_llm.frontend.openai_answers import encoded, error_events
from conch_llm.frontend.openai_errors import error_object, openai_error, status_of

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorForm(ABC):
    """Form of a route's errors.

    Attributes:
        id_headers: Headers of all responses of the route that have the request's id.
    """

    id_headers: ClassVar[tuple[bytes, ...]] = (b"x-request-id",)

    @abstractmethod
    def reply(self, error: ConchError, request_id: str, fields: Container[str] = ()) -> Reply:
        """The response of an error; `fields` are those of the request."""

    @abstractmethod
    def events(self, error: ConchError) -> bytes:
        """The events of an error in mid-stream, up to the stream's end."""


class OpenAiErrors(ErrorForm):
    """Errors in OpenAI's form."""

    def reply(self, error: ConchError, request_id: str, fields: Container[str] = ()) -> Reply:
        """The response of an error."""
        return openai_error(error, fields)

    def events(self, error: ConchError) -> bytes:
        """A chunk with the error, and the end."""
        return error_events(error_object(error))


class AnthropicErrors(ErrorForm):
    """Errors in Anthropic's form; status and headers are those of OpenAI's routes."""

    id_headers = (b"x-request-id", b"request-id")

    def reply(self, error: ConchError, request_id: str, fields: Container[str] = ()) -> Reply:
        """The response of an error."""
        members = {**_anthropic_object(error), "request_id": request_id}
        return openai_error(error)._replace(body=encoded(members))

    def events(self, error: ConchError) -> bytes:
        """The event ``error``."""
        return b"event: error\ndata: " + encoded(_anthropic_object(error)) + b"\n\n"


OPENAI_ERRORS = OpenAiErrors()
ANTHROPIC_ERRORS = AnthropicErrors()


def errors_of(path: str) -> ErrorForm:
    """The form of the errors of a path without ``/openai``."""
    return ANTHROPIC_ERRORS if f"{path}/".startswith(f"{MESSAGES}/") else OPENAI_ERRORS


def _anthropic_object(error: ConchError) -> dict[str, Any]:
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}
