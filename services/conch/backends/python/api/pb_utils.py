"""Exports the names that models import as `triton_python_backend_utils`; has logging and model control."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum

from conch.backends.python.api.pb_errors import TritonError, TritonModelException
from conch.backends.python.api.pb_metrics import MetricFamily, update_metrics
from conch.backends.python.api.pb_model_config import ModelConfig
from conch.backends.python.api.pb_request import (
    InferenceRequest,
    get_input_tensor_by_name,
    get_output_tensor_by_name,
)
from conch.backends.python.api.pb_response import InferenceResponse
from conch.backends.python.api.pb_tensor import Tensor
from conch.backends.python.api.pb_trace import InferenceTrace
from conch.backends.python.api.pb_types import (
    TRITON_STRING_TO_NUMPY,
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    MemoryType,
    PreferredMemory,
    deserialize_bytes_tensor,
    get_input_config_by_name,
    get_output_config_by_name,
    numpy_to_triton_type,
    serialize_byte_tensor,
    text_of,
    triton_string_to_numpy,
    triton_to_numpy_type,
    using_decoupled_model_transaction_policy,
)
from conch.backends.python.api.response_sender import ResponseSender
from conch.backends.python.calls.call_context import current_call_context, loading
from conch.backends.python.calls.response_iterator import ResponseIterator
from conch.backends.python.runtime.module_loading import directory_of
from conch.core.errors import ConchError
from conch.core.model_control import LoadParameter
from conch.core.model_spans import span

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceTrace",
    "LogLevel",
    "Logger",
    "MemoryType",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "ResponseIterator",
    "ResponseSender",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "span",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "update_metrics",
    "using_decoupled_model_transaction_policy",
]

_log = logging.getLogger("conch.python_model")


class LogLevel(IntEnum):
    """Levels of a message, as numbers of `logging`."""

    VERBOSE = logging.DEBUG
    INFO = logging.INFO
    WARNING = logging.WARNING
    ERROR = logging.ERROR


_LogLevel = LogLevel


class Logger:
    """Logs for a model; the record names the calling line of the model."""

    LogLevel = LogLevel
    VERBOSE = LogLevel.VERBOSE
    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR

    @staticmethod
    def log(message: str, level: _LogLevel = LogLevel.INFO) -> None:
        """Logs a message at a level.

        Raises:
            TypeError: The message is not a text, as in all methods, or the level not a `LogLevel`.
        """
        if not isinstance(level, LogLevel):
            raise TypeError(f"the level of a log message must be a LogLevel, not {type(level)}")
        _log.log(level, "%s", _text(message), stacklevel=2)

    @staticmethod
    def log_info(message: str) -> None:
        """Logs an informational message."""
        _log.info("%s", _text(message), stacklevel=2)

    @staticmethod
    def log_warn(message: str) -> None:
        """Logs a warning."""
        _log.warning("%s", _text(message), stacklevel=2)

    @staticmethod
    def log_error(message: str) -> None:
        """Logs an error."""
        _log.error("%s", _text(message), stacklevel=2)

    @staticmethod
    def log_verbose(message: str) -> None:
        """Logs a debug message."""
        _log.debug("%s", _text(message), stacklevel=2)


def _text(message: object) -> str:
    """The message as text; Triton accepts any bytes."""
    if isinstance(message, bytes):
        return message.decode(errors="backslashreplace")
    return text_of(message, "a log message")


def get_model_dir() -> str:
    """The version directory of the calling model.

    Raises:
        TritonModelException: The caller is not a model.
    """
    # Models share a process, so the innermost model module on the stack decides.
    frame = inspect.currentframe()
    while frame is not None:
        directory = directory_of(frame.f_globals.get("__name__", ""))
        if directory is not None:
            return str(directory)
        frame = frame.f_back
    raise TritonModelException("get_model_dir must be called from a model.")


def load_model(model_name: str, config: str | None = "", files: Mapping[str, bytes] | None = None) -> None:
    """Loads or reloads a model; returns when it is ready.

    Args:
        model_name: Its name.
        config: A config in JSON that replaces the file's.
        files: Files that replace the repository's: contents by path, as in ``file:1/model.onnx``.

    Raises:
        TritonModelException: It cannot be loaded; the version that served before still does.
        TypeError: The config is not text, or a file is not bytes.
    """
    parameters: dict[str, LoadParameter] = {}
    if config:
        if not isinstance(config, str):
            raise TypeError(f"config must be a string, not {type(config)}")
        parameters["config"] = config
    for path, content in (files or {}).items():
        if not isinstance(content, bytes):
            raise TypeError(f"Object of type '{type(content).__name__}' is not an instance of 'bytes'")
        parameters[path] = content
    caller = current_call_context()
    with _failing("Failed to load model", caller.name), loading(caller, model_name, TritonModelException):
        caller.server.load(model_name, parameters)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unloads a model; its requests finish in the background.

    Args:
        model_name: Its name; no error if it is not loaded.
        unload_dependents: True to unload the models that were loaded for it, too.

    Raises:
        TritonModelException: Unloading is not allowed.
    """
    caller = current_call_context()
    with _failing("Failed to unload model", caller.name):
        caller.server.unload(model_name, bool(unload_dependents))


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Returns True if a model is ready.

    Args:
        model_name: Its name.
        model_version: Its version; empty for the newest.

    Raises:
        TritonModelException: The version is not a number.
    """
    caller = current_call_context()
    with _failing("Failed to check model readiness", caller.name):
        return any(caller.server.model_ready(name, model_version) for name in caller.names(model_name))


@contextmanager
def _failing(what: str, name: str) -> Iterator[None]:
    try:
        yield
    except ConchError as error:
        raise TritonModelException(
            f"{what}: Failed to process the request for model '{name}', message: {error.message}"
        ) from None
