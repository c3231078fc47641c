"""Where engines keep what they compile, so that the next load is quick. Used by: backends."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def engine_cache(engine: str, model: Path, *versions: str) -> Path:
    """The cache folder of one model file, made where it is missing.

    Args:
        engine: Name of the engine.
        model: The model's file; its content is part of the folder's name.
        versions: Versions of what compiles it.
    """
    digest = hashlib.sha256("\0".join(versions).encode())
    if model.is_file():
        with model.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    # The XDG base directory specification says to ignore a relative path.
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    folder = root / "conch" / engine / digest.hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    return folder
