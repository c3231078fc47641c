"""`pb_utils.Logger`: writes models' messages to the server's log. Used by: `pb_utils`."""

from __future__ import annotations

import logging
from enum import IntEnum

from conch.backends.python.api.argument_checks import text_of

_log = logging.getLogger("conch.python_model")


def _text(message: object) -> str:
    """The message as text; Triton accepts any bytes."""
    if isinstance(message, bytes):
        return message.decode(errors="backslashreplace")
    return text_of(message, "a log message")


class LogLevel(IntEnum):
    """Levels of a message, with their numbers in the standard library's logging."""

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
            TypeError: The message is not a text, or the level not a `LogLevel`; the other methods check the
                message too.
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
