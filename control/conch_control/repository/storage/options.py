"""Settings of repositories in object stores, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """What the operator decides about object stores.

    Attributes:
        cache_directory: Where fetched files are kept; None for the usual place.
        cache_bytes: Most bytes kept there; 0 for any number.
        timeout_s: Seconds after which a store that does not answer has failed.
    """

    cache_directory: Path | None = None
    cache_bytes: int = 0
    timeout_s: float = 30.0
