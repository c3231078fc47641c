"""The log settings that can be read and changed while the server runs; names and texts are Triton's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from conch.core.errors import InvalidArgumentError, UnsupportedError
from conch.observability.options import FORMATS, LogOptions

Setting = bool | int | str
"""A value of a setting."""

_SWITCHES = ("log_info", "log_warning", "log_error")
_MOST_VERBOSE = 2**32 - 1


class LogControl:
    """Reads and changes the log settings; from any thread.

    Args:
        options: The settings at the start.
        apply: Makes changed settings those in effect. None where the program around the server has its own
            logging: then nothing can be changed.
    """

    def __init__(self, options: LogOptions, apply: Callable[[LogOptions], None] | None) -> None:
        self._options = options
        self._apply = apply
        self._lock = threading.Lock()

    @property
    def verbose(self) -> bool:
        """Whether verbose messages are logged."""
        return self._options.verbose > 0

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
            changes: New values by name; None for one that came without a value. Names that are none of the
                settings' are left out of account, as Triton does.

        Returns:
            All settings in effect then.

        Raises:
            UnsupportedError: One of them can't be changed.
            InvalidArgumentError: A value is not what its setting expects; the text is that of Triton's gRPC.
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
    """Changes of `LogOptions` by name of the attribute."""
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
