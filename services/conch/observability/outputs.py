"""The logs of a server process: opened together, opened anew at SIGHUP, closed together."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from types import TracebackType

from conch.observability.access import AccessLog
from conch.observability.hangup import Reopenable, reopened_at_hangup
from conch.observability.logs import LogHandler, configure, unconfigure
from conch.observability.options import AccessLogOptions, LogOptions
from conch.observability.settings import LogControl


class LogFileError(Exception):
    """A log can't be opened; the text says which and why."""


class Logs:
    """The logs of a process, for the main thread to enter and leave.

    Args:
        handler: The log, in use.
        control: Its settings.
        access: The access log; None for none.
        files: Those of them that have files.
        in_file: Whether the log is a file.

    Attributes:
        control: The settings of the log.
        access: The access log; None for none.
    """

    def __init__(
        self,
        handler: LogHandler,
        control: LogControl,
        access: AccessLog | None,
        files: tuple[Reopenable, ...],
        in_file: bool = False,
    ) -> None:
        self._handler = handler
        self._in_file = in_file
        self._files = files
        self._stack = ExitStack()
        self.control = control
        self.access = access

    def announce(self, text: str, level: int = logging.INFO) -> None:
        """Writes text for people to the log, in its order; where the log is a file, to standard error too."""
        self._handler.announce(text, level)
        self._handler.flush()
        if self._in_file:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    @property
    def only_json(self) -> bool:
        """Whether people see nothing but lines of JSON."""
        return self._handler.json and not self._in_file

    def settle(self) -> None:
        """Has what was logged so far written, so that what is printed next comes after it."""
        self._handler.flush()

    def flush(self) -> None:
        """Has everything written, for a process that ends at once."""
        if self.access is not None:
            self.access.close()
        self._handler.close()

    def __enter__(self) -> Logs:
        self._stack.callback(unconfigure, self._handler)
        if self.access is not None:
            self._stack.callback(self.access.close)  # first: what it has dropped is logged
        self._stack.enter_context(reopened_at_hangup(self._files))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def open_logs(options: LogOptions, access: AccessLogOptions | None) -> Logs:
    """Opens the logs; from here on what is logged goes there.

    Raises:
        LogFileError: One of them can't be opened.
    """
    try:
        handler = configure(options)
    except OSError as error:
        raise LogFileError(f"--log-file can't be opened: {error}") from None
    control = LogControl(options, handler.apply)
    files: list[Reopenable] = [] if options.file is None else [handler]
    if access is None:
        return Logs(handler, control, None, tuple(files), bool(files))
    try:
        # Steps of ensembles are verbose; asked anew each time, as that can be changed meanwhile.
        requests = AccessLog(access, lambda: control.verbose)
    except OSError as error:
        unconfigure(handler)
        raise LogFileError(f"--access-log can't be opened: {error}") from None
    if access.file is not None:
        files.append(requests)
    return Logs(handler, control, requests, tuple(files), options.file is not None)
