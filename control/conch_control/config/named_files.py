"""Files that a config names, by paths relative to the model's directory."""

from __future__ import annotations

import os
from pathlib import Path

from conch.core.errors import InternalError


def stays_within(directory: Path, relative: str) -> bool:
    """True if a path is relative and textually stays in a directory.

    Links are not checked, as operators use them to share files. The text may be a client's, so nothing is
    looked up: a refusal tells nothing about the file system.
    """
    if os.path.isabs(relative):
        return False
    root = os.path.abspath(directory)
    path = os.path.abspath(os.path.join(root, relative))
    return os.path.commonpath([root, path]) == root


def read_error(path: Path, error: OSError, prefix: str = "") -> InternalError:
    """Triton's error for a file that can't be read."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return InternalError(f"{prefix}failed to open text file for read {path}: {reason}")
