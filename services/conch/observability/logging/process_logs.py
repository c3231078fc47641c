"""The logs of a server process: opens and closes them together, and reopens their files at SIGHUP."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType
from typing import Protocol

from conch.core.errors import ConchError
from conch.observability.exporters import EXPORT_REASONS, DropCounter
from conch.observability.logging.access_log import AccessLog
from conch.observability.logging.audit_log import AuditLog
from conch.observability.logging.log_handler import Lines, LogHandler, configure, unconfigure
from conch.observability.logging.log_settings import (
    AccessLogOptions,
    AuditLogOptions,
    LogControl,
    LogOptions,
)

_EXPORT_S = 5.0  # for the last export


class Reopenable(Protocol):
    """A log with a file."""

    def reopen(self) -> None:
        """Reopens the file; called from a signal handler."""


@contextmanager
def reopened_at_hangup(logs: Sequence[Reopenable]) -> Iterator[None]:
    """Reopens the files of logs at each SIGHUP while the block runs; for the main thread.

    Without logs the signal keeps its handler.
    """
    if not logs:
        yield
        return

    def on_hangup(number: int, frame: FrameType | None) -> None:
        for each in logs:
            each.reopen()

    before = signal.signal(signal.SIGHUP, on_hangup)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


class LogFileError(Exception):
    """A log can't be opened; the text says which and why."""


class Logs:
    """The logs of a process, entered and left by the main thread.

    Args:
        handler: The installed log handler.
        control: Settings of the log.
        access: The access log; None for none.
        audit: The audit log; None for none.
        files: The logs with files.
        in_file: True if the log is a file.
    """

    def __init__(
        self,
        handler: LogHandler,
        control: LogControl,
        access: AccessLog | None,
        audit: AuditLog | None,
        files: tuple[Reopenable, ...],
        in_file: bool = False,
    ) -> None:
        self._handler = handler
        self._in_file = in_file
        self._files = files
        self._stack = ExitStack()
        self.control = control
        self.access = access
        self.audit = audit

    def announce(self, text: str, lines: Lines) -> None:
        """Writes a text, or in JSON its lines; also the text to standard error if the log is a file."""
        self._handler.announce(text, lines)
        self._handler.flush()
        if self._in_file:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    @property
    def only_json(self) -> bool:
        """True if the log goes to standard error, as lines of JSON."""
        return self._handler.json and not self._in_file

    def flush(self) -> None:
        """Writes everything and closes the logs, for a process that ends at once."""
        for each in self._requests:
            each.close()
        self._handler.close()
        self._close_export()

    @property
    def _requests(self) -> list[AccessLog | AuditLog]:
        """The logs of requests, which log the lines that they drop."""
        return [each for each in (self.access, self.audit) if each is not None]

    def _close_export(self) -> None:
        if self._handler.exporter is not None:
            self._handler.exporter.close(time.monotonic() + _EXPORT_S)

    def __enter__(self) -> Logs:
        self._stack.callback(self._close_export)  # last: it sends what the others log
        self._stack.callback(unconfigure, self._handler)
        for each in self._requests:
            self._stack.callback(each.close)  # first: they log their dropped lines
        self._stack.enter_context(reopened_at_hangup(self._files))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def open_logs(
    options: LogOptions, access: AccessLogOptions | None, audit: AuditLogOptions | None = None
) -> Logs:
    """Opens the logs and installs the handler. Raises LogFileError: one of them can't be opened."""
    exporter = None
    try:
        if options.export is not None:
            exporter = options.export.open_exporter(DropCounter(EXPORT_REASONS))
        handler = configure(options, exporter=exporter)
    except ConchError as error:
        raise LogFileError(f"--otlp-logs-url: {error}") from None
    except OSError as error:
        raise LogFileError(f"--log-file can't be opened: {error}") from None
    control = LogControl(options, handler.apply, exporter)
    files: list[Reopenable] = [] if options.file is None else [handler]
    access_log: AccessLog | None = None
    audit_log: AuditLog | None = None
    flag = "--access-log"
    try:
        if access is not None:
            # Ensemble steps are verbose; read each time, as verbosity can change.
            access_log = AccessLog(access, lambda: control.verbose)
            files += [] if access.file is None else [access_log]
        flag = "--audit-log"
        if audit is not None:
            audit_log = AuditLog(audit.file)
            files += [] if audit.file is None else [audit_log]
    except OSError as error:
        if access_log is not None:
            access_log.close()
        unconfigure(handler)
        raise LogFileError(f"{flag} can't be opened: {error}") from None
    return Logs(handler, control, access_log, audit_log, tuple(files), options.file is not None)
