"""Checks of fields of options dataclasses; the errors name the field's flag."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from conch.settings.option import FlagError, flag_of


def refuse_without(options: Any, switch: str, names: Iterable[str]) -> None:
    """Refuses fields that have no effect unless a switch is on. Raises FlagError: one is given."""
    for name in names:
        if getattr(options, name) is not None:
            raise FlagError(f"{flag_of(options, name)} needs {switch}")


def contents_of(options: Any, name: str, service: str) -> bytes:
    """The contents of the file that a field names. Raises FlagError: it is missing or can't be read."""
    path: Path | None = getattr(options, name)
    if path is None:
        raise FlagError(f"{flag_of(options, name)} must be specified to serve {service} over TLS")
    try:
        return path.read_bytes()
    except OSError as error:
        raise FlagError(f"{flag_of(options, name)}: {path} can't be read: {error.strerror}") from None
