"""Log output: JSON for machines, Triton's line format for people."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

VERBOSE = 5
"""Level of verbose messages, below Python's DEBUG."""

_PACKAGES = ("conch", "conch_control")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_LETTER = {"DEBUG": "I", "INFO": "I", "WARNING": "W", "ERROR": "E", "CRITICAL": "E"}


@dataclass(frozen=True, slots=True)
class LogOptions:
    """What is logged, and how.

    Attributes:
        info: Whether informational messages are logged.
        warning: Whether warnings are logged.
        error: Whether errors are logged.
        verbose: 0 for no verbose messages.
        format: ``default`` or ``ISO8601``, the time format of text lines.
        json: Whether lines are JSON; None for JSON unless the output is a terminal.
        file: Where to append the lines; None for standard error.
    """

    info: bool = True
    warning: bool = True
    error: bool = True
    verbose: int = 0
    format: str = "default"
    json: bool | None = None
    file: Path | None = None


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``ts``, ``level``, ``logger``, ``message``, extras, ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """Triton's line: ``I1120 13:31:05.123456 4242 file.py:12] "message"``, times in UTC."""

    def __init__(self, iso: bool) -> None:
        super().__init__()
        self._iso = iso

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line, with the traceback of an exception on lines of its own."""
        time = datetime.fromtimestamp(record.created, UTC)
        letter = _LETTER.get(record.levelname, "I")
        place = f"{record.process} {record.filename}:{record.lineno}]"
        message = json.dumps(record.getMessage(), ensure_ascii=False)
        head = f"{time:%Y-%m-%dT%H:%M:%SZ} {letter}" if self._iso else f"{letter}{time:%m%d %H:%M:%S.%f}"
        line = f"{head} {place} {message}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure(options: LogOptions, stream: TextIO | None = None) -> logging.Handler:
    """Sends the logs of conch where the options say.

    Args:
        options: What and how.
        stream: Where to, unless the options name a file; standard error if None.

    Returns:
        The handler, for `unconfigure`.

    Raises:
        OSError: The log file can't be opened.
    """
    target = stream or sys.stderr
    handler: logging.Handler
    if options.file is not None:
        handler = logging.FileHandler(options.file, encoding="utf-8")
        as_json = options.json is True
    else:
        handler = logging.StreamHandler(target)
        as_json = not target.isatty() if options.json is None else options.json
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter(options.format == "ISO8601"))
    wanted = {
        logging.INFO: options.info,
        logging.WARNING: options.warning,
        logging.ERROR: options.error,
        logging.CRITICAL: options.error,
    }
    handler.addFilter(lambda record: wanted.get(record.levelno, True))
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        logger.setLevel(VERBOSE if options.verbose else logging.INFO)
        logger.addHandler(handler)
        logger.propagate = False
    return handler


def unconfigure(handler: logging.Handler) -> None:
    """Takes a handler back and closes it."""
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        logger.removeHandler(handler)
        logger.propagate = True
    handler.close()
