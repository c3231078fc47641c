"""Exceptions of models: the classes models use, and the text in which their tracebacks reach users."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from conch.backends.python.arguments import text_of, whole_of
from conch.backends.python.limits import memory_hint
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

_OURS = str(Path(__file__).parent)
_NOT_THE_MODELS = (_OURS, "<frozen importlib")


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
        """The text, as clients get it."""
        return self._message

    def code(self) -> int:
        """One of the codes of this class."""
        return self._code

    def __str__(self) -> str:
        return self._message


class TritonModelException(Exception):
    """Raised by models, and by this API where it is used wrongly."""

    def message(self) -> str:
        """The text."""
        return str(self)


class CallsEnded(BaseException):
    """Ends an execution that waits for another model when nobody waits for it any more.

    Not an `Exception`: a model that catches all of these must not go on for ever.
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
    """A model's error as the core has it, its message unchanged."""
    if isinstance(error, TritonError):
        return _ERRORS.get(error.code(), InternalError)(error.message())
    return InternalError(message_of(error))


_CODES = {error.code: code for code, error in _ERRORS.items()} | {
    "RESOURCE_EXHAUSTED": TritonError.UNAVAILABLE,
    "DEADLINE_EXCEEDED": TritonError.CANCELLED,
    "OUT_OF_RANGE": TritonError.INVALID_ARG,
}


def as_triton_error(error: ConchError) -> TritonError:
    """An error of the core as a model gets it, its message unchanged."""
    return TritonError(error.message, _CODES.get(error.code, TritonError.INTERNAL))


def describe(error: BaseException) -> str:
    """An exception with its place in the model: type, text and frames, the innermost first.

    Only frames of the model and of what it called are shown; those of the server would mislead.
    """
    text = f"{type(error).__name__}: {message_of(error)}{memory_hint(error)}"
    frames = _frames(error)
    return f"{text}\n\nAt:\n{frames}" if frames else text


def failure_text(instance: str, error: BaseException) -> str:
    """What clients are told where `execute` of an instance has failed."""
    ours = isinstance(error, TritonModelException) and is_ours(error)
    what = message_of(error) if ours else describe(error)
    return f"Failed to process the request(s) for model '{instance}', message: {what}"


def in_model(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """An exception as logs take it, with the frames of the model and of what it called."""
    own = [trace for trace in _traces(error) if not _filename(trace).startswith(_NOT_THE_MODELS)]
    shown: TracebackType | None = None
    for trace in reversed(own):
        shown = TracebackType(shown, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
    return type(error), error, shown


def is_ours(error: BaseException) -> bool:
    """Whether an exception was raised by the server's checks and not within the model."""
    return all(_filename(trace).startswith(_OURS) for trace in _traces(error))


def _frames(error: BaseException) -> str:
    lines = [
        f"  {_filename(trace)}({trace.tb_lineno}): {trace.tb_frame.f_code.co_name}\n"
        for trace in _traces(error)
        if not _filename(trace).startswith(_NOT_THE_MODELS)
    ]
    return "".join(reversed(lines))


def _filename(trace: TracebackType) -> str:
    return trace.tb_frame.f_code.co_filename


def _traces(error: BaseException) -> Iterator[TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next
