"""The one tree of errors, each class with its Triton code, gRPC status and HTTP status.

Codes and mappings follow Triton's error model (eight codes, each with one gRPC and one HTTP status), with
some codes of our own.
The message of a `ConchError` is always safe to show to a client; anything else that is raised reaches
clients only through `as_conch_error`, and its traceback only the log.
"""

from __future__ import annotations

from typing import ClassVar

NO_MESSAGE = "<MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>"
"""What is shown of an exception that can't say what it is; Triton's text."""

_MOST_DETAILS = 4096
"""In bytes, percent-encoded as they are sent."""
_PERCENT = ord("%")


class ConchError(Exception):
    """An error with a message for the client.

    Attributes:
        code: Triton's name of the code, such as ``INVALID_ARG``.
        label: The code as it reads inside Triton's messages, such as ``Invalid argument``.
        grpc_status: Numeric gRPC status code.
        http_status: HTTP status code.
        retry_after_ms: When another try makes sense, in milliseconds from now; None if unknown.
    """

    code: ClassVar[str] = "INTERNAL"
    label: ClassVar[str] = "Internal"
    grpc_status: ClassVar[int] = 13
    http_status: ClassVar[int] = 500
    retry_after_ms: int | None = None

    def __init__(self, message: str) -> None:
        # Text from file names may hold what no protocol can carry.
        message = message.encode(errors="backslashreplace").decode()
        super().__init__(message)
        self.message = message


class InternalError(ConchError):
    """Something failed that the client could not have prevented."""


class UnknownError(ConchError):
    """A failure whose kind is not known."""

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
    """A request, config or flag that is wrong as it stands."""

    code = "INVALID_ARG"
    label = "Invalid argument"
    grpc_status = 3
    http_status = 400


class UnavailableError(ConchError):
    """Something that exists but can't answer now; a later try may succeed."""

    code = "UNAVAILABLE"
    label = "Unavailable"
    grpc_status = 14
    http_status = 503


class ResourceExhaustedError(ConchError):
    """Too much waits already; a later try may succeed. Not one of Triton's codes."""

    code = "RESOURCE_EXHAUSTED"
    label = "Resource exhausted"
    grpc_status = 8
    http_status = 429


class UnsupportedError(ConchError):
    """A feature this server, or this model, does not have."""

    code = "UNSUPPORTED"
    label = "Unsupported"
    grpc_status = 12
    http_status = 501


class AlreadyExistsError(ConchError):
    """A name that is taken."""

    code = "ALREADY_EXISTS"
    label = "Already exists"
    grpc_status = 6
    http_status = 400


class CancelledError(ConchError):
    """The client took the request back."""

    code = "CANCELLED"
    label = "Cancelled"
    grpc_status = 1
    http_status = 400


class DeadlineExceededError(ConchError):
    """The client no longer waits for the response. Not one of Triton's codes."""

    code = "DEADLINE_EXCEEDED"
    label = "Deadline exceeded"
    grpc_status = 4
    http_status = 504


class OutOfRangeError(ConchError):
    """A position that is no longer, or not yet, there. Not one of Triton's codes."""

    code = "OUT_OF_RANGE"
    label = "Out of range"
    grpc_status = 11
    http_status = 400


class UnauthenticatedError(ConchError):
    """A caller who does not say who it is, or says it wrongly. Not one of Triton's codes."""

    code = "UNAUTHENTICATED"
    label = "Unauthenticated"
    grpc_status = 16
    http_status = 401


class PermissionDeniedError(ConchError):
    """Something that this caller may not do. Not one of Triton's codes."""

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
        OutOfRangeError,
        UnauthenticatedError,
        PermissionDeniedError,
    )
}


def message_of(error: object) -> str:
    """Text of an exception of any kind; its ``__str__`` may fail as well."""
    try:
        return str(error)
    except BaseException:
        return NO_MESSAGE


def as_conch_error(error: BaseException) -> ConchError:
    """The error as a client may see it: itself if it is ours, else an internal error with its message."""
    if isinstance(error, ConchError):
        return error
    return InternalError(message_of(error) or type(error).__name__)


def without_traceback(error: ConchError) -> ConchError:
    """The error, so that keeping it does not keep the frames, and the requests, it came through."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def error_text(error: ConchError) -> str:
    """An error as Triton prints it for operators: ``Unavailable - text``."""
    return f"{error.label} - {error.message}"


def status_details(details: str) -> bytes:
    """An error text as gRPC status details, cut to 4 KiB: clients refuse larger trailers."""
    encoded = details.encode(errors="replace")
    left = _MOST_DETAILS
    if 3 * len(encoded) > left:
        for position, byte in enumerate(encoded):
            left -= 1 if 0x20 <= byte < 0x7F and byte != _PERCENT else 3  # as %XX
            if left < 0:
                return encoded[:position].decode(errors="ignore").encode() + " …".encode()
    return encoded
