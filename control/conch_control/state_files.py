"""Files of the state directory. After a crash a file has its former content or the new one."""

from __future__ import annotations

import os
from pathlib import Path

from conch.core.errors import InvalidArgumentError

TEMPORARY = ".tmp"
"""End of the names of files that are not complete; a crash may leave one."""


def make_state_directory(path: Path) -> None:
    """Makes a directory for state, unless it exists.

    Raises:
        InvalidArgumentError: It can't be made or read.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.listdir(path)
    except OSError as error:
        raise InvalidArgumentError(
            f"state directory {path} can't be used: {error.strerror}; name a writable directory"
        ) from None


def write_state_file(path: Path, content: str) -> None:
    """Replaces a file. Raises OSError: it can't be written; the former content stays."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Makes the renames and removals in a directory last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
