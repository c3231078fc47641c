"""`pb_utils.Logger`: messages of models go into the server's log."""

from __future__ import annotations

import logging
from enum import IntEnum

_log = logging.getLogger("conch.python_model")


class LogLevel(IntEnum):
    """Levels of a message, with their numbers in the standard library's logging."""

    VERBOSE = logging.DEBUG
    INFO = logging.INFO
    WARNING = logging.WARNING
    ERROR = logging.ERROR


class Logger:
    """Logs for a model; the record names the place in the model that called."""

    LogLevel = LogLevel
    VERBOSE = LogLevel.VERBOSE
    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR

    @staticmethod
    def log(message: str, level: int = LogLevel.INFO) -> None:
        """Logs a message at a level."""
        _log.log(level, "%s", message, stacklevel=2)

    @staticmethod
    def log_info(message: str) -> None:
        """Logs a message for information."""
        _log.info("%s", message, stacklevel=2)

    @staticmethod
    def log_warn(message: str) -> None:
        """Logs a warning."""
        _log.warning("%s", message, stacklevel=2)

    @staticmethod
    def log_error(message: str) -> None:
        """Logs an error."""
        _log.error("%s", message, stacklevel=2)

    @staticmethod
    def log_verbose(message: str) -> None:
        """Logs a message for those who look closely."""
        _log.debug("%s", message, stacklevel=2)
