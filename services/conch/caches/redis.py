"""The cache ``redis``: entries in a Redis server, which several servers may share.

Threads: `CacheThreads` makes the calls, as they block.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from conch.caches.cache_settings import Settings
from conch.core.errors import InternalError
from conch.core.response_cache.base import ResponseCache

_PREFIX = b"conch:response:"
_NS_PER_MS = 1_000_000
_SETTINGS = (
    "host",
    "port",
    "user",
    "password",
    "db",
    "connect_timeout",
    "socket_timeout",
    "pool_size",
    "wait_timeout",
    "tls_enabled",
    "cert",
    "key",
    "cacert",
    "cacert_dir",
    "sni",
    "ttl",
)
_TLS_FILES = {
    "cert": "ssl_certfile",
    "key": "ssl_keyfile",
    "cacert": "ssl_ca_certs",
    "cacert_dir": "ssl_ca_path",
}


class RedisCache(ResponseCache):
    """Stores entries as strings of a Redis server, which evicts them by its own policy.

    Args:
        pool: Connections to the server.
        connections: Their limit.
        patience_ns: Longest wait of a request for a connection.
        ttl_ns: Default time to live of entries; 0 for no limit.
    """

    blocking = True
    shared = True

    def __init__(
        self, pool: redis.ConnectionPool, connections: int, patience_ns: int, ttl_ns: int = 0
    ) -> None:
        self.connections = connections
        self.patience_ns = patience_ns
        self.ttl_ns = ttl_ns
        self._pool = pool
        self._client = redis.Redis(connection_pool=pool)

    def check(self) -> None:
        """Raises redis.RedisError if the server can't be used."""
        self._client.ping()

    def lookup(self, key: bytes) -> bytes | None:
        """The entry of a key. Raises redis.RedisError: the server can't be reached."""
        found: Any = self._client.get(_PREFIX + key)
        return None if found is None else bytes(found)

    def insert(self, key: bytes, entry: bytes, ttl_ns: int) -> bool:
        """Stores an entry; its time is rounded up to milliseconds.

        Raises:
            redis.RedisError: The server can't be reached, or has no room.
        """
        self._client.set(_PREFIX + key, entry, px=-(-ttl_ns // _NS_PER_MS) or None)
        return True

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()
        self._pool.disconnect()


def open_redis(given: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> RedisCache:
    """Opens a cache in a Redis server, which must be reachable.

    Args:
        given: The settings; names are Triton's, times in milliseconds, but for ``ttl``, which is in seconds.
        environment: Has user name and password if the settings do not.

    Raises:
        InvalidArgumentError: A setting is missing or invalid.
        InternalError: The server can't be reached, or refuses to serve.
    """
    settings = Settings("RedisCache", given, _SETTINGS)
    if "host" not in given or "port" not in given:
        raise settings.error(
            "didn't specify address. Must at a minimum specify 'host' and 'port' in the configuration - e.g. "
            "--cache-config redis,host=redis --cache-config redis,port=6379"
        )
    connections = settings.number("pool_size", 4, least=1, most=1024)
    options: dict[str, Any] = {
        "host": given["host"],
        "port": settings.number("port", 0, least=1, most=65535),
        "username": settings.text("user", environment.get("TRITONCACHE_REDIS_USERNAME")),
        "password": settings.text("password", environment.get("TRITONCACHE_REDIS_PASSWORD")),
        "db": settings.number("db", 0),
        "socket_connect_timeout": _seconds(settings, "connect_timeout", 1000),
        "socket_timeout": _seconds(settings, "socket_timeout", 500),
        # No retries: requests are served sooner by the model.
        "retry": Retry(NoBackoff(), 0),
        **_tls(settings, given),
    }
    pool = redis.ConnectionPool(max_connections=connections, **options)
    patience_ns = settings.number("wait_timeout", 100) * _NS_PER_MS
    cache = RedisCache(pool, connections, patience_ns, settings.seconds("ttl"))
    try:
        cache.check()
    except (redis.RedisError, OSError, ValueError) as error:
        cache.close()
        code = getattr(error, "status_code", None)  # which redis-py takes off the text
        reason = f"{code} {error}" if code else str(error)
        raise InternalError(f"Failed to initialize RedisCache: {reason}") from error
    return cache


def _seconds(settings: Settings, name: str, default: int) -> float | None:
    """Converts milliseconds to seconds; 0 waits for ever, as in Triton."""
    return settings.number(name, default, most=10**9) / 1000 or None


def _tls(settings: Settings, given: Mapping[str, str]) -> dict[str, Any]:
    """The TLS options of redis-py."""
    if not settings.flag("tls_enabled"):
        unused = [name for name in (*_TLS_FILES, "sni") if name in given]
        if unused:
            raise settings.error(f"'{unused[0]}' needs 'tls_enabled=true'")
        return {}
    if given.get("sni", given["host"]) != given["host"]:
        raise settings.error("'sni' must be the 'host'; another name is not supported")
    files = {option: given[name] for name, option in _TLS_FILES.items() if name in given}
    return {"connection_class": redis.SSLConnection, "ssl_cert_reqs": "required", **files}
