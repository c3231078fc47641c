"""Log records of a worker: sent by the worker's handler, logged by the server with their original place.

Threads and locks: none beyond those of `logging`; both classes are usable from any thread.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from conch.core.current_span import span_fields
from conch.core.errors import record_message, record_traceback, shortened
from conch.ipc import codec
from conch.ipc.channel import ChannelClosedError, WireError

_MODEL_LOGGERS = "conch.python_model"
_CONCH_LOGGERS = "conch."
_SPAN = ("trace_id", "span_id")


class ServerHandler(logging.Handler):
    """Sends records to the server; `send` takes the JSON fields of one."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__()
        self._send = send
        self._pid = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        """Sends a record."""
        text = ""
        try:
            text = record_message(record)
            if record.stack_info:
                text = shortened(f"{text}\n{record.stack_info}")
            fields = {
                "name": record.name,
                "level": record.levelno,
                "text": text,
                "exception": record_traceback(record),
                "file": record.pathname,
                "line": record.lineno,
                "function": record.funcName,
                "span": span_fields(),
            }
            self._send(codec.encode_json(fields))
        except ChannelClosedError:
            # The server has closed the socket, or the model has forked: a fork's stderr is the worker's.
            if os.getpid() != self._pid:
                sys.stderr.write(f"{record.levelname} {text}\n")
        except Exception:  # a record that can't be formatted is the model's fault
            self.handleError(record)


def log_to_server(send: Callable[[bytes], None], level: int) -> None:
    """Sends all records of this process from a level on."""
    root = logging.getLogger()
    root.addHandler(ServerHandler(send))
    root.setLevel(level)


class WorkerLog:
    """Logs one worker's records on the server: those of conch by their own loggers, others by the model's."""

    def __init__(self, model: str) -> None:
        self._log = logging.getLogger(f"{_MODEL_LOGGERS}.{model}")
        self._sent = -1

    @property
    def level(self) -> int:
        """The level from which on the worker is to send records; resets `changed`."""
        self._sent = self._log.getEffectiveLevel()
        return self._sent

    @property
    def changed(self) -> bool:
        """True if the level differs from the one last read."""
        return self._log.getEffectiveLevel() != self._sent

    def handle(self, fields: dict[str, Any]) -> None:
        """Logs a record.

        Raises:
            WireError: The fields are no record.
        """
        name, level, text = fields.get("name"), fields.get("level"), fields.get("text")
        file, line, function = fields.get("file"), fields.get("line"), fields.get("function")
        if not (isinstance(name, str) and isinstance(level, int) and isinstance(text, str)):
            raise WireError("a record of the log has a name, a level and a text")
        exception = fields.get("exception", "")
        span = fields.get("span", {})
        if not (isinstance(span, dict) and all(isinstance(span.get(name, ""), str) for name in _SPAN)):
            raise WireError("the ids of a record of the log are texts")
        if not isinstance(exception, str):
            raise WireError("the exception of a record of the log is a text")
        if not (isinstance(file, str) and isinstance(line, int)):
            raise WireError("a record of the log has a file and a line")
        target = self._target(name)
        if target.isEnabledFor(level):
            where = function if isinstance(function, str) else None
            record = target.makeRecord(target.name, level, file, line, "%s", (text,), None, where)
            record.exc_text = exception or None
            vars(record).update({name: span[name] for name in _SPAN if name in span})
            target.handle(record)

    def _target(self, name: str) -> logging.Logger:
        """The nearest logger of conch's own that exists here; the model's for other names.

        Models may make up any number of names, so none is created.
        """
        if name.startswith(_CONCH_LOGGERS) and not name.startswith(_MODEL_LOGGERS):
            while "." in name:
                if name in logging.Logger.manager.loggerDict:
                    return logging.getLogger(name)
                name = name.rpartition(".")[0]
        return self._log
