"""Options of the logs, and `LogControl`, which changes them while the server runs.

Names and error texts of settings are Triton's. One lock guards changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from conch.core.errors import InvalidArgumentError, UnsupportedError
from conch.settings.option import option
from conch.settings.value_types import BOOL, FILE, NATURAL, TEXT

if TYPE_CHECKING:
    from conch.observability.exporters import Exporter, ExportOptions, LogItem

Setting = bool | int | str
"""A value of a setting."""

_SWITCHES = ("log_info", "log_warning", "log_error")
_MOST_VERBOSE = 2**32 - 1

FORMATS = ("default", "ISO8601")
"""The time formats of text lines."""


def _log_export(url: str) -> ExportOptions:
    from conch.observability.exporters import LOGS, read_export

    return read_export(LOGS, [("url", url)])


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Options of the server log.

    Attributes:
        verbose: 0 for no verbose messages.
        format: One of `FORMATS`, the time format of text lines.
        json: True if lines are JSON; None for JSON unless the output is a terminal.
        file: File to append to; None for standard error.
        repeat_limit: Maximum warnings or errors per second of one place in the code, or messages of one place
            in a Python model; further ones are counted. 0 for no limit.
        escape: True if the message of a text line is quoted and escaped as in JSON.
        export: Options of the export of lines; None for none.
    """

    GROUP: ClassVar = "log"

    verbose: int = option("--log-verbose", NATURAL, 0, "level of verbose logging", scope="process")
    info: bool = option("--log-info", BOOL, True, "log information", scope="process")
    warning: bool = option("--log-warning", BOOL, True, "log warnings", scope="process")
    error: bool = option("--log-error", BOOL, True, "log errors", scope="process")
    format: str = option(
        "--log-format", TEXT, "default", "time format of text logs", choices=FORMATS, scope="process"
    )
    file: Path | None = option(
        "--log-file",
        FILE,
        None,
        "file to log to instead of standard error; SIGHUP reopens it",
        scope="process",
    )
    json: bool | None = option(
        "--log-json", BOOL, None, "log JSON; without it JSON unless on a terminal", scope="process"
    )
    repeat_limit: int = option(
        "--log-rate-limit",
        NATURAL,
        100,
        "maximum warnings or errors per second of one place in the code, or messages of one place in a "
        "Python model; the rest is counted and the count is logged; 0 for no limit",
        scope="process",
    )
    escape: bool = True
    export: ExportOptions | None = option(
        "--otlp-logs-url",
        TEXT,
        None,
        "OpenTelemetry collector to send the log to as well, such as http://localhost:4318/v1/logs",
        scope="process",
        convert=_log_export,
    )


def _log_file(name: str) -> Path | None:
    return None if name == "-" else Path(name)


@dataclass(frozen=True, slots=True)
class AccessLogOptions:
    """Options of the access log.

    Attributes:
        file: File to append to; None for standard output.
        json: True if lines are JSON, else text.
    """

    GROUP: ClassVar = "access log"

    file: Path | None = option(
        "--access-log",
        TEXT,
        None,
        "file to log each request to, or - for standard output",
        convert=_log_file,
    )
    json: bool = option(
        "--access-log-format",
        TEXT,
        "json",
        "format of the access log",
        choices=("json", "text"),
        convert=lambda form: form == "json",
    )


@dataclass(frozen=True, slots=True)
class AuditLogOptions:
    """Options of the audit log; `file` is None for standard output."""

    GROUP: ClassVar = "access"

    file: Path | None = option(
        "--audit-log",
        TEXT,
        None,
        "file to log refused calls and clients' changes to, or - for standard output; needs --access-policy",
        convert=_log_file,
    )


class LogControl:
    """Reads and changes the log settings; from any thread.

    Args:
        options: The initial settings.
        apply: Applies changed settings; None if logging belongs to the program around the server, which makes
            settings read-only.
        exporter: Exports the log; None for none.

    Attributes:
        exporter: As given.
    """

    def __init__(
        self,
        options: LogOptions,
        apply: Callable[[LogOptions], None] | None,
        exporter: Exporter[LogItem] | None = None,
    ) -> None:
        self.exporter = exporter
        self._options = options
        self._apply = apply
        self._lock = threading.Lock()

    @property
    def verbose(self) -> bool:
        """True if verbose messages are logged."""
        return self._options.verbose > 0

    @property
    def fixed(self) -> bool:
        """True if settings can't be changed, as the program around the server configures logging."""
        return self._apply is None

    def settings(self) -> dict[str, Setting]:
        """All settings in effect, by name."""
        options = self._options
        return {
            "log_file": "" if options.file is None else str(options.file),
            "log_info": options.info,
            "log_warning": options.warning,
            "log_error": options.error,
            "log_verbose_level": options.verbose,
            "log_format": options.format,
        }

    def update(self, changes: Mapping[str, Setting | None]) -> dict[str, Setting]:
        """Changes settings: all of them, or none if one is wrong.

        Args:
            changes: New values by name, None for a missing value; unknown names are ignored, as in Triton.

        Returns:
            All settings in effect.

        Raises:
            UnsupportedError: One of them can't be changed.
            InvalidArgumentError: A value is invalid; the text is that of Triton's gRPC.
        """
        if "log_file" in changes:
            raise UnsupportedError("log file location can not be updated through network protocol")
        checked = _checked(changes)
        if not checked:
            return self.settings()
        if self._apply is None:
            raise UnsupportedError("log settings belong to the program that this server runs in")
        with self._lock:
            self._options = replace(self._options, **checked)
            self._apply(self._options)
            return self.settings()


def _checked(changes: Mapping[str, Setting | None]) -> dict[str, Any]:
    """The changes, checked, by attribute of `LogOptions`."""
    checked: dict[str, Any] = {}
    for name in _SWITCHES:
        if name in changes:
            switch = changes[name]
            if not isinstance(switch, bool):
                raise InvalidArgumentError(f"expect boolean for '{name}'")
            checked[name.removeprefix("log_")] = switch
    if "log_verbose_level" in changes:
        level = changes["log_verbose_level"]
        if not isinstance(level, int) or isinstance(level, bool):
            raise InvalidArgumentError("expect int32 for 'log_verbose_level'")
        if not 0 <= level <= _MOST_VERBOSE:
            raise InvalidArgumentError(
                f"expect a number from 0 to {_MOST_VERBOSE} for 'log_verbose_level', got: {level}"
            )
        checked["verbose"] = level
    if "log_format" in changes:
        form = changes["log_format"]
        if not isinstance(form, str):
            raise InvalidArgumentError("expect string for 'log_format'")
        if form not in FORMATS:
            raise InvalidArgumentError(f"invalid argument for log_format, got: {form}")
        checked["format"] = form
    return checked
