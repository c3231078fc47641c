"""Paths of models that exist only as they are written."""

from __future__ import annotations

import os
from pathlib import Path


def resolves(path: Path) -> bool:
    """False for a path through a link into another process's root, such as KServe's modelcar.

    Its files can be opened by that path alone: resolved, it is the other process's, and leads nowhere here.
    """
    resolved = os.path.realpath(path)
    return os.path.exists(resolved) and os.path.samefile(resolved, path)
