"""The server log: JSON for machines, Triton's line format for people.

Threads: the logging thread formats, `conch-log` writes.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TextIO

from conch.core.add_ons import server_packages
from conch.core.clock import Clock, monotonic_ns
from conch.core.current_span import span_fields
from conch.core.errors import message_of, record_message, record_traceback, shortened
from conch.core.request_log import REQUESTS
from conch.observability.exporters import Exporter, LogItem
from conch.observability.logging.line_writer import LineSource, LineWriter
from conch.observability.logging.log_settings import LogOptions
from conch.observability.logging.log_sinks import FileSink, Sink, sink_of
from conch.observability.logging.repeat_limit import Fate, RepeatLimit

VERBOSE = 5
"""Level of verbose messages, below Python's DEBUG."""

MODELS = "conch.python_model"
"""Logger of `pb_utils.Logger`."""

ANNOUNCEMENTS = "conch.announcements"
"""Logger name of announcements in JSON."""

Lines = Iterable[tuple[int, str, Mapping[str, str]]]
"""Messages, each with its fields."""

_LINE_BYTES = 64  # overhead of a queued line
_FLUSH_TIMEOUT_S = 2.0
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
# Valid in JSON, but line breaks or control characters to some readers and terminals.
_BREAKING = re.compile("[\x7f-\x9f\u2028\u2029]")
_CONTROLS = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")  # all but tab
_LETTER = {"DEBUG": "I", "INFO": "I", "WARNING": "W", "ERROR": "E", "CRITICAL": "E"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``ts``, ``level``, ``logger``, ``message``, extras, ids, ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record_message(record),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        line |= span_fields()
        if trace := record_traceback(record):
            line["exception"] = trace
        return quoted(line)


class TextFormatter(logging.Formatter):
    """Triton's line: ``I1120 13:31:05.123456 4242 file.py:12] "message"``, times in UTC."""

    def __init__(self, iso: bool, escape: bool = True) -> None:
        super().__init__()
        self._iso = iso
        self._escape = escape

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line, followed by the indented traceback of an exception."""
        time = datetime.fromtimestamp(record.created, UTC)
        letter = _LETTER.get(record.levelname, "I")
        place = f"{record.process} {record.filename}:{record.lineno}]"
        message = record_message(record)
        if self._escape:
            message = quoted(message)
        head = f"{time:%Y-%m-%dT%H:%M:%SZ} {letter}" if self._iso else f"{letter}{time:%m%d %H:%M:%S.%f}"
        line = f"{head} {place} {message}"
        if trace := record_traceback(record):
            # Indented and escaped: an exception may quote a client, whose text must not forge a line.
            line += "".join(f"\n    {on_one_line(each)}" for each in trace.split("\n"))
        return line


class LogHandler(logging.Handler, LineSource[str]):
    """Formats records on the logging thread and queues the lines for a writing thread.

    Attributes:
        json: True if lines are JSON.
        exporter: Gets each record that is written, too; None for none.
    """

    def __init__(
        self,
        options: LogOptions,
        sink: Sink,
        as_json: bool,
        clock: Clock = monotonic_ns,
        exporter: Exporter[LogItem] | None = None,
    ) -> None:
        super().__init__()
        self.exporter = exporter
        self.json = as_json
        self._clock = clock
        self._wanted: dict[int, bool] = {}
        self._limit = RepeatLimit[logging.LogRecord](options.repeat_limit)
        self._process = os.getpid()
        self._writer = LineWriter("conch-log", sink, self, clock=clock)
        self.apply(options)

    def apply(self, options: LogOptions) -> None:
        """Applies changed levels and formats."""
        iso = options.format == "ISO8601"
        self.setFormatter(JsonFormatter() if self.json else TextFormatter(iso, options.escape))
        self._wanted = {
            logging.INFO: options.info,
            logging.WARNING: options.warning,
            logging.ERROR: options.error,
            logging.CRITICAL: options.error,
        }
        for package in server_packages():
            logging.getLogger(package).setLevel(VERBOSE if options.verbose else logging.INFO)
        REQUESTS.on = options.verbose > 0

    def emit(self, record: logging.LogRecord) -> None:
        """Queues a record; never blocks and never raises."""
        if not self._wanted.get(record.levelno, True):
            return
        if record.levelno >= logging.WARNING or record.name == MODELS:
            # Not informational messages of the server: each reports another event.
            place = (record.pathname, record.lineno, record.msg if isinstance(record.msg, str) else "")
            fate = Fate.LOGGED
            if os.getpid() == self._process:
                fate = self._limit.admit(place, lambda: _detached(record), self._clock())
            if fate is not Fate.LOGGED:
                if fate is Fate.COUNTED_FIRST:
                    self._writer.check_delayed()
                return
        line = self._format(record)
        self._writer.put(line, _LINE_BYTES + len(line))
        if self.exporter is not None and os.getpid() == self._process:
            self.exporter.export([_item(record)])

    def announce(self, text: str, lines: Lines) -> None:
        """Writes a text at any log level: verbatim, or its lines with their levels and fields in JSON."""
        if not self.json:
            self._writer.put(text, _LINE_BYTES + len(text))
            return
        for level, message, fields in lines:
            record = logging.LogRecord(ANNOUNCEMENTS, level, __file__, 0, message, None, None)
            line = self.format(_changed(record, **fields))
            self._writer.put(line, _LINE_BYTES + len(line))

    def reopen(self) -> None:
        """Reopens the log file soon; signal-safe."""
        self._writer.reopen()

    def flush(self) -> None:
        """Waits until earlier records are written, up to a timeout."""
        self._writer.flush(_FLUSH_TIMEOUT_S)

    def close(self) -> None:
        """Writes queued lines, up to a timeout, and resets the levels of conch's loggers."""
        for package in server_packages():
            logging.getLogger(package).setLevel(logging.NOTSET)
        REQUESTS.on = False
        self._writer.close(_FLUSH_TIMEOUT_S)
        super().close()

    def line(self, text: str) -> str:
        """The line, which was formatted by the thread that logged."""
        return text

    def next_ns(self) -> int | None:
        """Time of the next summary of suppressed messages."""
        return self._limit.next_ns()

    def due(self, now_ns: int | None) -> list[str]:
        """Summaries that are due."""
        found = [_summary(repeats.first, repeats.count) for repeats in self._limit.due(now_ns)]
        if self.exporter is not None:
            self.exporter.export([_item(record) for record in found])
        return [self._format(record) for record in found]

    def _format(self, record: logging.LogRecord) -> str:
        try:
            return self.format(record)
        except Exception as error:  # the record of a model, whose arguments may not fit or may raise
            text = shortened(record.msg) if isinstance(record.msg, str) else type(record.msg).__name__
            broken = f"a message could not be formatted, {type(error).__name__}: {text}"
            place = record.name, record.levelno, record.pathname, record.lineno
            return self.format(logging.LogRecord(*place, broken, None, None))

    def dropped_items(self, count: int) -> str:
        """A line about dropped ones."""
        text = f"log lines were dropped, as they could not be written: {count:,}"
        return self._line(text, count)

    def reopen_failed(self, error: OSError) -> str:
        """A line about a file that could not be reopened."""
        return self._line(f"the log file could not be opened anew, the old one is written to: {error}", None)

    def _line(self, text: str, dropped: int | None) -> str:
        record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)
        return self._format(record if dropped is None else _changed(record, dropped=dropped))


def configure(
    options: LogOptions, stream: TextIO | None = None, exporter: Exporter[LogItem] | None = None
) -> LogHandler:
    """Installs a handler for conch's logs; `unconfigure` removes it.

    Args:
        options: Options of the log.
        stream: Output if the options name no file; standard error if None.
        exporter: Gets each record that is written, too.

    Raises:
        OSError: The log file can't be opened.
    """
    target = stream or sys.stderr
    if options.file is not None:
        handler = LogHandler(options, FileSink(options.file), options.json is True, exporter=exporter)
    else:
        as_json = not target.isatty() if options.json is None else options.json
        handler = LogHandler(options, sink_of(target), as_json, exporter=exporter)
    for package in server_packages():
        logger = logging.getLogger(package)
        logger.addHandler(handler)
        logger.propagate = False
    return handler


def unconfigure(handler: logging.Handler) -> None:
    """Removes and closes a handler."""
    for package in server_packages():
        logger = logging.getLogger(package)
        logger.removeHandler(handler)
        logger.propagate = True
    handler.close()


def _summary(record: logging.LogRecord, count: int) -> logging.LogRecord:
    """A record that summarises further ones from the same place."""
    return _changed(record, msg=f"... {count:,} more like this: {record.msg}", suppressed=count)


def _detached(record: logging.LogRecord) -> logging.LogRecord:
    """A copy with the message as text and no exception, so it keeps no objects alive."""
    return _changed(record, msg=_message(record), args=None, exc_info=None, exc_text=None)


def _message(record: logging.LogRecord) -> str:
    try:
        return record_message(record)
    except Exception:  # the record of a model, whose arguments may not fit or may raise
        return message_of(record.msg)


def _item(record: logging.LogRecord) -> LogItem:
    """A record for the exporter; made on the thread that logs, whose span is current."""
    found = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    found |= span_fields()
    trace_id, span_id = (str(found.pop(name, "")) for name in ("trace_id", "span_id"))
    if text := record_traceback(record):
        found["exception.stacktrace"] = text
    attributes = {
        name: value if isinstance(value, str | int | float) else message_of(value)
        for name, value in found.items()
    }
    time_ns = int(record.created * 1e9)
    message = _message(record)
    return LogItem(
        time_ns, record.levelno, record.levelname, record.name, message, attributes, trace_id, span_id
    )


def _changed(record: logging.LogRecord, **changes: object) -> logging.LogRecord:
    return logging.makeLogRecord({**vars(record), **changes})


def quoted(value: object) -> str:
    """A value as JSON on one line with readable text; other types become their `str`."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return _BREAKING.sub(_escaped, text)


def on_one_line(text: str) -> str:
    """A text with its line breaks and control characters escaped."""
    return _CONTROLS.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"
