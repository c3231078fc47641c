"""Paths that a config names."""

from __future__ import annotations

import os
from pathlib import Path


def stays_within(directory: Path, relative: str) -> bool:
    """Whether a path is relative and stays in a directory by its text.

    Links are followed wherever they lead, as repositories use them to share files; they are the
    operator's. The text of a config may be a client's. Nothing is looked up, so that what is refused tells
    neither where the directory is nor what is outside of it.

    Args:
        directory: The directory.
        relative: The path, as `Path` and `os.path.join` append it to the directory.
    """
    if os.path.isabs(relative):
        return False
    root = os.path.abspath(directory)
    path = os.path.abspath(os.path.join(root, relative))
    return os.path.commonpath([root, path]) == root
