"""Formats exceptions of models for clients and logs.

Shows only frames of the model and the code it calls; frames of the server would mislead.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from conch.backends.python.api.pb_errors import TritonModelException
from conch.backends.python.runtime.memory_limit import memory_hint
from conch.core.errors import message_of

_SERVER_CODE = str(Path(__file__).parents[1])
_HIDDEN = (_SERVER_CODE, "<frozen importlib")


def describe(error: BaseException) -> str:
    """Type, text and model frames of an exception, innermost frame first."""
    text = f"{type(error).__name__}: {message_of(error)}{memory_hint(error)}"
    frames = _frames(error)
    return f"{text}\n\nAt:\n{frames}" if frames else text


def failure_text(instance: str, error: BaseException) -> str:
    """Text for clients when `execute` fails."""
    ours = isinstance(error, TritonModelException) and raised_by_server(error)
    what = message_of(error) if ours else describe(error)
    return f"Failed to process the request(s) for model '{instance}', message: {what}"


def model_exc_info(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """The ``exc_info`` for logging, limited to frames of the model and the code it calls."""
    own = [trace for trace in _traces(error) if not _filename(trace).startswith(_HIDDEN)]
    shown: TracebackType | None = None
    for trace in reversed(own):
        shown = TracebackType(shown, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
    return type(error), error, shown


def raised_by_server(error: BaseException) -> bool:
    """True if the server's checks raised the exception, not the model."""
    return all(_filename(trace).startswith(_SERVER_CODE) for trace in _traces(error))


def _frames(error: BaseException) -> str:
    lines = [
        f"  {_filename(trace)}({trace.tb_lineno}): {trace.tb_frame.f_code.co_name}\n"
        for trace in _traces(error)
        if not _filename(trace).startswith(_HIDDEN)
    ]
    return "".join(reversed(lines))


def _filename(trace: TracebackType) -> str:
    return trace.tb_frame.f_code.co_filename


def _traces(error: BaseException) -> Iterator[TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next
