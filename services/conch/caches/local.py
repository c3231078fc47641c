"""The cache ``local``: in the server's own memory."""

from __future__ import annotations

from collections.abc import Mapping

from conch.caches.settings import Settings
from conch.core.response_cache.local import LocalCache


def open_local(given: Mapping[str, str]) -> LocalCache:
    """A local cache.

    Args:
        given: ``size`` in bytes; ``ttl`` in seconds, if entries are to be valid for so long only.

    Raises:
        InvalidArgumentError: There is no size, or something else is wrong; texts are Triton's.
    """
    settings = Settings("LocalCache", given, ("size", "ttl"))
    if "size" not in given:
        raise settings.error("config didn't contain a valid 'size' field.")
    return LocalCache(settings.number("size", 0, least=1), settings.seconds("ttl"))
