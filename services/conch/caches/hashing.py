"""The hash of the cache's keys. Used by: `server`."""

from __future__ import annotations

import hashlib

from conch.core.response_cache.cache_key import NewHash


def fastest_hash() -> tuple[str, NewHash]:
    """Name and maker of the fastest cryptographic hash that is installed; docs/cache.md has figures."""
    try:
        from blake3 import blake3
    except ModuleNotFoundError:
        return "SHA-256", hashlib.sha256
    return "BLAKE3", blake3
