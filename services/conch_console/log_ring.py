"""`LogRing`: the newest lines of the server's log, bounded in number and size, for the console's pages.

Threads and locks: any thread logs; a deque takes records without a lock. The event loop reads.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import Any

from conch.core.add_ons import server_packages
from conch.core.errors import message_of, record_message, record_traceback

_LINES = 1000
_MESSAGE_CHARACTERS = 2000
_CRASH_CHARACTERS = 16_384
_SUPERVISION = "conch.workers.supervision"
_MODEL_LOGGER = "conch.python_model."
_QUOTED = re.compile(r"'([^'\n]{1,200})'")
_INSTANCE = re.compile(r"(.+?)_\d+(?:_\d+)?")  # an instance is named by its model, group and number
_WITH_VERSION = re.compile(r"(?:^|\s)([^\s:]{1,200}):\d+\b")


class LogRing(logging.Handler):
    """A handler that keeps records as plain objects.

    Args:
        lines: Number of lines to keep.

    Attributes:
        count: Records taken so far; the newest has this number.
    """

    def __init__(self, lines: int = _LINES) -> None:
        super().__init__()
        self._records: deque[dict[str, Any]] = deque(maxlen=lines)
        self._number = count(1).__next__
        self.count = 0

    def install(self) -> None:
        """Starts to take the records of all loggers of the server."""
        for package in server_packages():
            logging.getLogger(package).addHandler(self)

    def remove(self) -> None:
        """Takes no further records."""
        for package in server_packages():
            logging.getLogger(package).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Takes a record; never raises."""
        try:
            message = record_message(record)
        except Exception:  # of user code: a model's message may not fit its arguments
            message = message_of(record.msg)
        trace = record_traceback(record)
        crash = record.name.startswith(_SUPERVISION) and record.levelno >= logging.ERROR
        number = self._number()
        self._records.append(
            {
                "n": number,
                "t": round(record.created, 3),
                "level": record.levelname.lower(),
                "logger": record.name,
                "message": _cut(message, _CRASH_CHARACTERS if crash else _MESSAGE_CHARACTERS),
                "trace": _cut(trace, _CRASH_CHARACTERS),
                "crash": crash,
                "models": _models(record, message),
            }
        )
        self.count = number

    def newest(self, most: int, after: int = 0) -> list[dict[str, Any]]:
        """At most so many of the newest records behind a number, oldest first."""
        return list(self._after(after))[-most:]

    def _after(self, after: int) -> Iterator[dict[str, Any]]:
        for record in list(self._records):
            if record["n"] > after:
                yield record


def _models(record: logging.LogRecord, message: str) -> list[str]:
    """Names that may be those of models: of the record's fields, and in quotes in its text."""
    found = {str(value) for name in ("model", "model_name") if (value := getattr(record, name, None))}
    if record.name.startswith(_MODEL_LOGGER):
        found.add(record.name.removeprefix(_MODEL_LOGGER))
    for name in _QUOTED.findall(message[:_MESSAGE_CHARACTERS]):
        found.add(name)
        instance = _INSTANCE.fullmatch(name)
        if instance is not None:
            found.add(instance[1])
    found.update(_WITH_VERSION.findall(message[:_MESSAGE_CHARACTERS]))
    return sorted(found)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most} more characters)"
