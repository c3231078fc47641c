"""Settings of object stores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """Settings of object stores.

    Attributes:
        cache_directory: Cache directory; None for the default.
        cache_bytes: Most bytes in the cache; 0 for no limit.
        timeout_s: Timeout of a store in seconds.
    """

    cache_directory: Path | None = None
    cache_bytes: int = 0
    timeout_s: float = 30.0
