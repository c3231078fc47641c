"""Finds a model's original exception by the error text that clients receive.

The client's error holds only the text; the log record of the failure holds the exception. One lock
guards what was captured on other threads. Used by: `loaded_model`.
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType

from conch.backends.python.runtime.tracebacks import describe, failure_text, model_exc_info
from conch.core.errors import ConchError

LOGGER = "conch.backends.python"
"""Parent of the loggers that record exceptions of models."""

_MOST = 100


class ExceptionCapture(logging.Handler):
    """Keeps the latest logged exceptions of models while entered.

    Attributes:
        finalize: The latest exception of a `finalize`.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._found = threading.Lock()
        # By the client's error text; of equal texts the newest.
        self._exceptions: dict[str, tuple[BaseException, TracebackType | None]] = {}
        self.finalize: BaseException | None = None
        self._logger = logging.getLogger(LOGGER)

    def __enter__(self) -> ExceptionCapture:
        self._logger.addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Stores the exception of a record."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None or not isinstance(record.args, tuple) or not record.args:
            return
        if record.getMessage().startswith("finalize of"):
            self.finalize = error
        trace = model_exc_info(error)[2]
        with self._found:
            for text in (failure_text(str(record.args[0]), error), describe(error)):
                self._exceptions.pop(text, None)
                self._exceptions[text] = error, trace
            while len(self._exceptions) > _MOST:
                del self._exceptions[next(iter(self._exceptions))]

    def exception_for(self, shown: ConchError) -> BaseException | None:
        """The exception behind an error, with its model frames; None if unknown."""
        with self._found:
            error, trace = self._exceptions.get(shown.message, (None, None))
        return None if error is None else error.with_traceback(trace)
