"""Formats exceptions of models for clients and logs; sets the memory limit that a `MemoryError` names.

Shows only frames of the model and the code it calls; frames of the server would mislead. Owns: the hint of
the process's memory limit, and the places of hidden frames.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from conch.backends.python.api.pb_errors import TritonModelException
from conch.core.errors import message_of

_SERVER_CODE = str(Path(__file__).parents[1])
_hidden: tuple[str, ...] = (_SERVER_CODE, "<frozen importlib")
_MEBIBYTE = 1 << 20
_memory_hints: list[str] = []
"""The suffix of a `MemoryError` where this process has a limit."""


def hide_frames(directory: str) -> None:
    """Hides frames of the code in a directory, which runs models."""
    global _hidden
    if directory not in _hidden:
        _hidden = (*_hidden, directory)


def describe(error: BaseException) -> str:
    """Type, text and model frames of an exception, innermost frame first."""
    text = f"{type(error).__name__}: {message_of(error)}{_memory_hint(error)}"
    frames = _frames(error)
    return f"{text}\n\nAt:\n{frames}" if frames else text


def failure_text(instance: str, error: BaseException) -> str:
    """Text for clients when `execute` fails."""
    misuse = isinstance(error, TritonModelException) and raised_by_server(error)
    what = message_of(error) if misuse else describe(error)
    return f"Failed to process the request(s) for model '{instance}', message: {what}"


def model_exc_info(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """The ``exc_info`` for logging, limited to frames of the model and the code it calls."""
    own = [trace for trace in _traces(error) if not _filename(trace).startswith(_hidden)]
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
        if not _filename(trace).startswith(_hidden)
    ]
    return "".join(reversed(lines))


def _filename(trace: TracebackType) -> str:
    return trace.tb_frame.f_code.co_filename


def _traces(error: BaseException) -> Iterator[TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _memory_hint(error: BaseException) -> str:
    return _memory_hints[0] if _memory_hints and isinstance(error, MemoryError) else ""


def limit_memory(mebibytes: int) -> None:
    """Limits the allocations of this process, so that a model gets a `MemoryError`.

    Sets ``RLIMIT_DATA``. Reserved address space (as of GPU libraries), library files and tensors shared with
    the server do not count.
    """
    most = mebibytes * _MEBIBYTE
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    _memory_hints[:] = [f" (the model's process may use {mebibytes} MiB: parameter 'CONCH_MEMORY_LIMIT_MB')"]
