"""Paths that a config names."""

from __future__ import annotations

import os
from pathlib import Path


def stays_within(directory: Path, relative: str) -> bool:
    """Whether a path stays in a directory by its text.

    Links are followed wherever they lead, as repositories use them to share files; they are the
    operator's. The text of a config may be a client's.
    """
    root = os.path.abspath(directory)
    path = os.path.abspath(os.path.join(root, relative))
    return os.path.commonpath([root, path]) == root
