"""Settings that name files, and settings that need others. Used by: `server_options`, `console_settings`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from conch.cli.settings.all_settings import Settings
from conch.cli.settings.setting import FlagError


def refuse_without(settings: Settings, switch: str, names: Iterable[str]) -> None:
    """Refuses settings that have no effect without a switch. Raises FlagError: one is given."""
    for name in names:
        if settings[name] is not None:
            raise FlagError(f"--{name} needs --{switch}")


def contents_of(settings: Settings, name: str, service: str) -> bytes:
    """The contents of the file that a setting names. Raises FlagError: it is missing or can't be read."""
    path: Path | None = settings[name]
    if path is None:
        raise FlagError(f"--{name} must be specified to serve {service} over TLS")
    try:
        return path.read_bytes()
    except OSError as error:
        raise FlagError(f"--{name}: {path} can't be read: {error.strerror}") from None
