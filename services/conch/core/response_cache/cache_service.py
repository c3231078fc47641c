"""The response cache of a server, which wraps models."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from conch.core.clock import Clock, monotonic_ns
from conch.core.response_cache.base import ResponseCache
from conch.core.response_cache.cache_key import Identity, KeyMaker, NewHash
from conch.core.response_cache.cache_threads import CacheThreads
from conch.core.response_cache.cached_model import CachedModel
from conch.core.response_cache.local_cache import LocalCache, LocalCacheStatistics
from conch.core.response_cache.remotely_cached_model import RemotelyCachedModel
from conch.core.servable import Servable


class CacheService:
    """One cache for the models of a server.

    Args:
        cache: The cache; owned by the service.
        new_hash: Creates the cryptographic hash of keys.
        clock: Monotonic time in nanoseconds.

    Attributes:
        shared: True if other servers, or this one after a restart, see the entries.
    """

    def __init__(
        self, cache: ResponseCache, new_hash: NewHash = hashlib.sha256, clock: Clock = monotonic_ns
    ) -> None:
        self.shared = cache.shared
        self._cache = cache
        self._new_hash = new_hash
        self._clock = clock
        self._threads = CacheThreads(cache, clock) if cache.blocking else None

    def wrap(self, model: Servable, identity: Identity) -> Servable:
        """Wraps a model in the cache.

        Args:
            model: One load of one version.
            identity: Distinguishes this load from those with other responses.
        """
        keys = KeyMaker(model.spec, identity, self._new_hash)
        if self._threads is None:
            return CachedModel(model, self._cache, keys, self._clock)
        return RemotelyCachedModel(model, self._cache, keys, self._clock, self._threads)

    @property
    def local_statistics(self) -> Callable[[], LocalCacheStatistics] | None:
        """Counters of a cache in this process; None for another one."""
        return self._cache.snapshot if isinstance(self._cache, LocalCache) else None

    def close(self) -> None:
        """Closes the cache, after the last use by a model."""
        if self._threads is not None:
            self._threads.close()
        self._cache.close()
