"""What is logged, where and how."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FORMATS = ("default", "ISO8601")
"""The time formats of text lines."""


@dataclass(frozen=True, slots=True)
class LogOptions:
    """What is logged, and how.

    Attributes:
        info: Whether informational messages are logged.
        warning: Whether warnings are logged.
        error: Whether errors are logged.
        verbose: 0 for no verbose messages.
        format: One of `FORMATS`, the time format of text lines.
        json: Whether lines are JSON; None for JSON unless the output is a terminal.
        file: Where to append the lines; None for standard error.
        most_alike: How many warnings or errors of one place in the code are logged in a second, and how many
            messages of one place in a Python model; the rest are only counted. 0 for no such limit.
        escape: Whether the message of a text line is quoted and escaped as in JSON.
    """

    info: bool = True
    warning: bool = True
    error: bool = True
    verbose: int = 0
    format: str = "default"
    json: bool | None = None
    file: Path | None = None
    most_alike: int = 100
    escape: bool = True


@dataclass(frozen=True, slots=True)
class AccessLogOptions:
    """The log with one line for each request.

    Attributes:
        file: Where to append the lines; None for standard output.
        json: Whether lines are JSON, and not text.
    """

    file: Path | None = None
    json: bool = True
