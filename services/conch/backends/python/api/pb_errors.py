"""Error classes of the model API, and their mapping to the core's."""

from __future__ import annotations

from typing import ClassVar

from conch.backends.python.api.pb_types import text_of, whole_of
from conch.core.errors import (
    AlreadyExistsError,
    CancelledError,
    ConchError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    UnknownError,
    UnsupportedError,
    message_of,
)


class TritonError:
    """An error for one request, put into an `InferenceResponse`."""

    UNKNOWN: ClassVar[int] = 0
    INTERNAL: ClassVar[int] = 1
    NOT_FOUND: ClassVar[int] = 2
    INVALID_ARG: ClassVar[int] = 3
    UNAVAILABLE: ClassVar[int] = 4
    UNSUPPORTED: ClassVar[int] = 5
    ALREADY_EXISTS: ClassVar[int] = 6
    CANCELLED: ClassVar[int] = 7

    __slots__ = ("_code", "_message")

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message = text_of(message, "message of a TritonError")
        self._code = whole_of(code, "code of a TritonError")
        if self._code not in _ERRORS:
            raise TypeError(
                f"code of a TritonError must be one of its codes, 0 to {max(_ERRORS)}, not {code}"
            )

    def message(self) -> str:
        """The text that clients receive."""
        return self._message

    def code(self) -> int:
        """One of the codes of this class."""
        return self._code

    def __str__(self) -> str:
        return self._message


class TritonModelException(Exception):
    """Raised by models, and by this API when it is misused."""

    def message(self) -> str:
        """The text."""
        return str(self)


class CallsEndedError(BaseException):
    """Ends an execution that waits for another model after its own requests were abandoned.

    A BaseException, so that a model that catches every `Exception` still ends.
    """


_ERRORS: dict[int, type[ConchError]] = {
    TritonError.UNKNOWN: UnknownError,
    TritonError.INTERNAL: InternalError,
    TritonError.NOT_FOUND: NotFoundError,
    TritonError.INVALID_ARG: InvalidArgumentError,
    TritonError.UNAVAILABLE: UnavailableError,
    TritonError.UNSUPPORTED: UnsupportedError,
    TritonError.ALREADY_EXISTS: AlreadyExistsError,
    TritonError.CANCELLED: CancelledError,
}


def as_core_error(error: object) -> ConchError:
    """A model's error as a core error with the same message."""
    if isinstance(error, TritonError):
        # The constructor checks codes, but a subclass in a model may have its own `code`.
        return _ERRORS.get(error.code(), InternalError)(error.message())
    return InternalError(message_of(error))


_CODES = {error.code: code for code, error in _ERRORS.items()} | {
    "RESOURCE_EXHAUSTED": TritonError.UNAVAILABLE,
    "DEADLINE_EXCEEDED": TritonError.CANCELLED,
    "OUT_OF_RANGE": TritonError.INVALID_ARG,
}


def as_triton_error(error: ConchError) -> TritonError:
    """A core error as a model's error with the same message."""
    return TritonError(error.message, _CODES.get(error.code, TritonError.INTERNAL))
