"""The Redis cache over a socket."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import redis
from tests.support.redis_server import RedisServer, redis_server, scripted_server, silent_server
from tests.support.servers import free_port
from tests.support.waiting import PATIENCE_S

from conch.caches.redis import RedisCache, open_redis
from conch.core.errors import ConchError, InternalError, InvalidArgumentError

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def cache(server: RedisServer) -> Iterator[RedisCache]:
    with closing(open_redis(server.settings(), {})) as cache:
        yield cache


def test_entries_are_found_by_their_keys(cache: RedisCache) -> None:
    assert (cache.blocking, cache.shared) == (True, True)
    entries = {os.urandom(32): os.urandom(size) for size in (0, 1, 1000, 300_000)}
    for key, entry in entries.items():
        assert cache.lookup(key) is None
        assert cache.insert(key, entry, 0)
    for key, entry in entries.items():
        assert cache.lookup(key) == entry
        cache.insert(key, b"new", 0)
        assert cache.lookup(key) == b"new"


@pytest.mark.parametrize(
    ("ttl_ns", "least", "most"),
    [(0, -1, -1), (60_000_000_000, 50_000, 60_000), (3_600_000_000_001, 3_590_000, 3_600_001)],
)
def test_time_to_live_is_left_to_redis(
    server: RedisServer, cache: RedisCache, ttl_ns: int, least: int, most: int
) -> None:
    key = os.urandom(32)
    cache.insert(key, b"x", ttl_ns)
    with server.client() as client:
        assert least <= client.pttl(b"conch:response:" + key) <= most


def test_several_servers_share_it(server: RedisServer, cache: RedisCache) -> None:
    with (
        closing(open_redis(server.settings(db="0"), {})) as other,
        closing(open_redis(server.settings(db="1"), {})) as apart,
    ):
        cache.insert(b"k", b"shared", 0)
        assert (other.lookup(b"k"), apart.lookup(b"k")) == (b"shared", None)


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options for the connection pool of the next cache; it has time for any answer."""
    given: dict[str, Any] = {}

    def pool(**options: Any) -> redis.ConnectionPool:
        given.update(options)
        return made(**options | {"socket_connect_timeout": PATIENCE_S, "socket_timeout": PATIENCE_S})

    made = redis.ConnectionPool
    monkeypatch.setattr(redis, "ConnectionPool", pool)
    return given


def test_settings_reach_the_client(server: RedisServer, options: dict[str, Any]) -> None:
    settings = server.settings(
        user="u", password="p,=", db="2", connect_timeout="0", socket_timeout="1500", pool_size="7",
        wait_timeout="20", ttl="0.5",
    )  # fmt: skip
    with closing(open_redis(settings, {"TRITONCACHE_REDIS_USERNAME": "other"})) as cache:
        assert (options["username"], options["password"], options["db"]) == ("u", "p,=", 2)
        assert (options["socket_connect_timeout"], options["socket_timeout"]) == (None, 1.5)
        assert (cache.connections, options["max_connections"]) == (7, 7)
        assert (cache.patience_ns, cache.ttl_ns) == (20_000_000, 500_000_000)


def test_name_and_password_from_the_environment(server: RedisServer, options: dict[str, Any]) -> None:
    environment = {"TRITONCACHE_REDIS_USERNAME": "u", "TRITONCACHE_REDIS_PASSWORD": "p"}
    address = {"host": "127.0.0.1", "port": str(server.port)}
    with closing(open_redis(address, environment)) as cache:
        assert (options["username"], options["password"]) == ("u", "p")
        assert (options["socket_connect_timeout"], options["socket_timeout"]) == (1.0, 0.5)
        assert (cache.connections, cache.patience_ns, cache.ttl_ns) == (4, 100_000_000, 0)


ADDRESS = {"host": "127.0.0.1", "port": "1"}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {},
            "didn't specify address. Must at a minimum specify 'host' and 'port' in the configuration - e.g.",
        ),
        ({"host": "x"}, "didn't specify address. Must at a minimum specify"),
        ({"host": "x", "port": "0"}, "'port' must be a whole number from 1 to 65535, got '0'"),
        (
            {"host": "x", "port": "6379,db=1"},
            "got '6379,db=1'; each setting needs a --cache-config of its own",
        ),
        (ADDRESS | {"pool_size": "0"}, "'pool_size' must be a whole number from 1 to 1024, got '0'"),
        (ADDRESS | {"size": "1"}, "there is no setting 'size', only host, port, user,"),
        (ADDRESS | {"ttl": "0"}, "'ttl' must be a number of seconds above 0, got '0'"),
        (ADDRESS | {"ttl": "nan"}, "'ttl' must be a number of seconds above 0, got 'nan'"),
        (ADDRESS | {"tls_enabled": "yes"}, "'tls_enabled' must be true or false, got 'yes'"),
        (ADDRESS | {"cacert": "/x"}, "'cacert' needs 'tls_enabled=true'"),
        (ADDRESS | {"tls_enabled": "true", "sni": "y"}, "'sni' must be the 'host'"),
    ],
)
def test_wrong_settings(settings: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        open_redis(settings, {})
    assert raised.value.message.startswith("Failed to initialize RedisCache: ")
    assert text in raised.value.message


def failure(settings: dict[str, str]) -> str:
    with pytest.raises(ConchError) as raised:
        open_redis(settings, {})
    assert isinstance(raised.value, InternalError)
    assert raised.value.message.startswith("Failed to initialize RedisCache: ")
    return raised.value.message


def test_a_server_that_is_not_there_at_the_start() -> None:
    assert "refused" in failure({"host": "127.0.0.1", "port": str(free_port())})


def test_a_server_that_does_not_answer_at_the_start() -> None:
    with silent_server() as port:
        assert "imeout" in failure({"host": "127.0.0.1", "port": str(port), "socket_timeout": "50"})


@pytest.mark.parametrize(
    "reason", ["NOAUTH Authentication required.", "WRONGPASS invalid username-password pair"]
)
def test_a_server_that_wants_another_password(reason: str) -> None:
    with scripted_server(f"-{reason}\r\n".encode()) as port:
        assert failure({"host": "127.0.0.1", "port": str(port)}).endswith(f": {reason}")


def test_a_server_that_does_not_speak_tls() -> None:
    with scripted_server(b"-ERR what\r\n") as port:
        assert "SSL" in failure({"host": "127.0.0.1", "port": str(port), "tls_enabled": "true"})


def test_a_certificate_that_is_not_there(server: RedisServer) -> None:
    assert "No such file" in failure(server.settings(tls_enabled="true", cacert="/nowhere/ca.pem"))


def test_calls_fail_soon_while_it_is_away_and_work_when_it_is_back() -> None:
    with redis_server() as server, closing(open_redis(server.settings(), {})) as cache:
        cache.insert(b"k", b"v", 0)
        server.stop()
        for call in (lambda: cache.lookup(b"k"), lambda: cache.insert(b"k", b"v", 0)):
            with pytest.raises(redis.RedisError):
                call()
        server.start()
        assert cache.lookup(b"k") is None
        cache.insert(b"k", b"v", 0)
        assert cache.lookup(b"k") == b"v"
