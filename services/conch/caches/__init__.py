"""Opens the configured response cache, by name through entry points; finds the hash of its keys."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping

from conch.core.add_ons import entry_points
from conch.core.errors import InvalidArgumentError
from conch.core.response_cache.base import ResponseCache
from conch.core.response_cache.cache_key import NewHash
from conch.core.response_cache.cache_service import CacheService

log = logging.getLogger(__name__)

GROUP = "conch.caches"
"""The entry-point group; an entry is a function from settings to a `ResponseCache`."""


def open_cache(configs: Mapping[str, Mapping[str, str]]) -> ResponseCache:
    """Opens the configured cache.

    Args:
        configs: Settings by cache name.

    Raises:
        ConchError: There are several, none has that name, or it can't be opened.
    """
    if len(configs) > 1:
        raise InvalidArgumentError(
            "found multiple cache configurations, but only a single cache is currently supported"
        )
    ((name, settings),) = configs.items()
    found = entry_points(group=GROUP, name=name)
    if not found:
        names = ", ".join(sorted({entry.name for entry in entry_points(group=GROUP)}))
        raise InvalidArgumentError(f"unable to find cache '{name}'; there are: {names}")
    entry = next(iter(found))
    try:
        cache = entry.load()(settings)
    except ModuleNotFoundError as error:
        raise InvalidArgumentError(
            f"cache '{name}' needs the Python package '{error.name}', which is not installed; try "
            f"`pip install 'conch[{name}]'`"
        ) from error
    if not isinstance(cache, ResponseCache):
        raise InvalidArgumentError(
            f"cache '{name}': '{entry.value}' made no conch.core.response_cache ResponseCache"
        )
    return cache


def open_cache_service(configs: Mapping[str, Mapping[str, str]]) -> CacheService:
    """Opens the configured cache with the fastest hash for its keys. Raises ConchError: see `open_cache`."""
    cache = open_cache(configs)
    name, new_hash = fastest_hash()
    log.info("response cache '%s', keys are made with %s", next(iter(configs)), name)
    return CacheService(cache, new_hash)


def fastest_hash() -> tuple[str, NewHash]:
    """Name and maker of the fastest cryptographic hash that is installed; docs/cache.md has figures."""
    try:
        from blake3 import blake3
    except ModuleNotFoundError:
        return "SHA-256", hashlib.sha256
    return "BLAKE3", blake3
