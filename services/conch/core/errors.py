"""Error classes with their Triton code, gRPC status and HTTP status.

Codes and mappings are Triton's, with additions. The message of a `ConchError` is safe for clients. Of other
exceptions the text reaches clients only if a model or its backend raised them, by `as_conch_error`; their
tracebacks go only to the log.
"""

from __future__ import annotations

import logging
import traceback
from types import TracebackType
from typing import ClassVar

MOST_TEXT = 32_768
"""Longest text of an error or of a log record, in characters: models may raise with texts of any size."""

_MARK = 64  # more than `_marked` adds

NO_MESSAGE = "<MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>"
"""Text for an exception whose ``__str__`` fails; Triton's text."""

_MOST_DETAILS = 4096
"""Limit in bytes, percent-encoded."""
_PERCENT = ord("%")


class ConchError(Exception):
    """An error with a message for the client.

    Attributes:
        code: Triton's code, such as ``INVALID_ARG``.
        label: The code as in Triton's messages, such as ``Invalid argument``.
        grpc_status: Numeric gRPC status code.
        http_status: HTTP status code.
        retry_after_ms: Time to wait before a retry, in milliseconds; None if unknown.
    """

    code: ClassVar[str] = "INTERNAL"
    label: ClassVar[str] = "Internal"
    grpc_status: ClassVar[int] = 13
    http_status: ClassVar[int] = 500
    retry_after_ms: int | None = None

    def __init__(self, message: str) -> None:
        # Text from file names may not be valid UTF-8.
        message = shortened(message).encode(errors="backslashreplace").decode()
        super().__init__(message)
        self.message = message


class InternalError(ConchError):
    """A failure in the server or model."""


class UnknownError(ConchError):
    """A failure of unknown kind."""

    code = "UNKNOWN"
    label = "Unknown"
    grpc_status = 2
    http_status = 400


class NotFoundError(ConchError):
    """A model, version or region that does not exist."""

    code = "NOT_FOUND"
    label = "Not found"
    grpc_status = 5
    http_status = 404


class InvalidArgumentError(ConchError):
    """An invalid request, config or flag."""

    code = "INVALID_ARG"
    label = "Invalid argument"
    grpc_status = 3
    http_status = 400


class UnavailableError(ConchError):
    """A model or service is temporarily unavailable; a retry may succeed."""

    code = "UNAVAILABLE"
    label = "Unavailable"
    grpc_status = 14
    http_status = 503


class QueueFullError(UnavailableError):
    """A model's queue has its largest size; Triton's code is that of any unavailable model."""


class QueueTimeoutError(UnavailableError):
    """A request was in a model's queue for too long; Triton's code is that of any unavailable model."""


class ResourceExhaustedError(ConchError):
    """A queue or limit is full; a retry may succeed. Not one of Triton's codes."""

    code = "RESOURCE_EXHAUSTED"
    label = "Resource exhausted"
    grpc_status = 8
    http_status = 429


class UnsupportedError(ConchError):
    """A feature that the server or model does not support."""

    code = "UNSUPPORTED"
    label = "Unsupported"
    grpc_status = 12
    http_status = 501


class AlreadyExistsError(ConchError):
    """A name that is in use."""

    code = "ALREADY_EXISTS"
    label = "Already exists"
    grpc_status = 6
    http_status = 400


class CancelledError(ConchError):
    """The client cancelled the request."""

    code = "CANCELLED"
    label = "Cancelled"
    grpc_status = 1
    http_status = 400


class QueueLimitError(ResourceExhaustedError):
    """A model's queue has the size that the server allows; not one of Triton's limits."""


class ModelMemoryError(ResourceExhaustedError):
    """A model gets no memory: it is too large, or models in use have it. The text begins with `BEGINNING`."""

    BEGINNING: ClassVar[str] = "no memory for model '"


class DeadlineExceededError(ConchError):
    """The request's deadline has passed. Not one of Triton's codes."""

    code = "DEADLINE_EXCEEDED"
    label = "Deadline exceeded"
    grpc_status = 4
    http_status = 504


class FailedPreconditionError(ConchError):
    """A change that the present state forbids. Not one of Triton's codes."""

    code = "FAILED_PRECONDITION"
    label = "Failed precondition"
    grpc_status = 9
    http_status = 409


class OutOfRangeError(ConchError):
    """A position outside the stored range. Not one of Triton's codes."""

    code = "OUT_OF_RANGE"
    label = "Out of range"
    grpc_status = 11
    http_status = 400


class UnauthenticatedError(ConchError):
    """Missing or invalid credentials. Not one of Triton's codes."""

    code = "UNAUTHENTICATED"
    label = "Unauthenticated"
    grpc_status = 16
    http_status = 401


class PermissionDeniedError(ConchError):
    """The client lacks permission. Not one of Triton's codes."""

    code = "PERMISSION_DENIED"
    label = "Permission denied"
    grpc_status = 7
    http_status = 403


ERRORS_BY_CODE: dict[str, type[ConchError]] = {
    error.code: error
    for error in (
        UnknownError,
        InternalError,
        NotFoundError,
        InvalidArgumentError,
        UnavailableError,
        ResourceExhaustedError,
        UnsupportedError,
        AlreadyExistsError,
        CancelledError,
        DeadlineExceededError,
        FailedPreconditionError,
        OutOfRangeError,
        UnauthenticatedError,
        PermissionDeniedError,
    )
}


def shortened(text: str, most: int = MOST_TEXT) -> str:
    """The text, cut after `most` characters; a text that was cut before stays as it is."""
    if len(text) <= most + _MARK:
        return text
    return _marked(text[:most], len(text) - most)


def _marked(text: str, cut: int) -> str:
    return f"{text} ... ({cut} more characters)" if cut else text


def message_of(error: object) -> str:
    """Text of an exception, even if its ``__str__`` fails; cut if it is long."""
    try:
        return shortened(str(error), MOST_TEXT // 2)  # others add names and places
    except BaseException:  # boundary: exception classes of models
        return NO_MESSAGE


def as_conch_error(error: BaseException) -> ConchError:
    """Returns a `ConchError` unchanged; wraps other exceptions in an internal error."""
    if isinstance(error, ConchError):
        return error
    return InternalError(message_of(error) or type(error).__name__)


def without_details(error: BaseException, sentence: str) -> ConchError:
    """Returns a `ConchError` unchanged; hides others, which the caller logs, behind a sentence."""
    return error if isinstance(error, ConchError) else InternalError(sentence)


ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def traceback_text(info: ExceptionInfo) -> str:
    """Formats an exception as `logging` does, cut if it is long."""
    parts: list[str] = []
    kept = cut = 0
    # The whole is never joined: each copy of a huge text keeps the GIL.
    for lines in traceback.TracebackException(*info, compact=True).format():
        part = lines[: MOST_TEXT - kept]
        parts.append(part)
        kept += len(part)
        cut += len(lines) - len(part)
    return _marked("".join(parts).removesuffix("\n"), cut)


def record_message(record: logging.LogRecord) -> str:
    """The message of a log record, cut if it is long."""
    return shortened(record.getMessage())


def record_traceback(record: logging.LogRecord) -> str:
    """The traceback of a log record, cut if it is long; that of a worker's record comes as text."""
    return traceback_text(record.exc_info) if record.exc_info else shortened(record.exc_text or "")


def without_traceback(error: ConchError) -> ConchError:
    """Drops the traceback, so that a stored error does not keep frames and requests alive."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def error_text(error: ConchError) -> str:
    """Formats an error as Triton logs it: ``Unavailable - text``."""
    return f"{error.label} - {error.message}"


def status_details(details: str) -> bytes:
    """Encodes gRPC status details, cut to 4 KiB: clients reject larger trailers."""
    encoded = details.encode(errors="replace")
    left = _MOST_DETAILS
    if 3 * len(encoded) > left:
        for position, byte in enumerate(encoded):
            left -= 1 if 0x20 <= byte < 0x7F and byte != _PERCENT else 3  # as %XX
            if left < 0:
                return encoded[:position].decode(errors="ignore").encode() + " …".encode()
    return encoded
