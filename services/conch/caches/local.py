"""The cache ``local``, in the server's memory."""

from __future__ import annotations

from collections.abc import Mapping

from conch.caches.cache_settings import Settings
from conch.core.response_cache.local_cache import LocalCache


def open_local(given: Mapping[str, str]) -> LocalCache:
    """Opens a local cache.

    Args:
        given: ``size`` in bytes; optionally ``ttl`` in seconds.

    Raises:
        InvalidArgumentError: A setting is missing or invalid; the texts are Triton's.
    """
    settings = Settings("LocalCache", given, ("size", "ttl"))
    if "size" not in given:
        raise settings.error("config didn't contain a valid 'size' field.")
    return LocalCache(settings.number("size", 0, least=1), settings.seconds("ttl"))
