"""From the command line to a cache."""

from __future__ import annotations

import builtins
import hashlib
import logging
from collections.abc import Mapping
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

import conch.caches
from conch.caches import GROUP, fastest_hash, open_cache
from conch.caches.local import open_local
from conch.cli.settings.settings_reader import read_flags
from conch.core.errors import InvalidArgumentError
from conch.core.response_cache.base import ResponseCache
from conch.core.response_cache.local_cache import LocalCache
from conch.server import InferenceServer
from conch.server_options import PartOptions, ServerOptions
from conch.server_settings import build_options
from conch.settings.option import FlagError
from conch_control.control_options import ControlOptions


def options(*arguments: str) -> Mapping[str, Mapping[str, str]]:
    return build_options(read_flags(arguments, {})).server.cache


def test_settings_of_one_cache_add_up() -> None:
    assert options() == {}
    assert options(
        "--cache-config=local,size=1", "--cache-config", "local,ttl=2", "--cache-config=local,size=3"
    ) == {"local": {"size": "3", "ttl": "2"}}
    assert options("--cache-config=redis,password=a=b,c") == {"redis": {"password": "a=b,c"}}
    assert options("--response-cache-byte-size=77") == {"local": {"size": "77"}}


NO_CACHE = "No cache specified. --cache-config option format is <cache name>,<setting>=<value>. Got "
NO_SETTING = "--cache-config option format is '<cache name>,<setting>=<value>'. Got "


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("local", NO_CACHE + "local"),
        ("size=1", NO_CACHE + "size=1"),
        (",size=1", NO_CACHE + ",size=1"),
        ("", NO_CACHE),
        ("local,", NO_SETTING + "local,"),
        ("local,size", NO_SETTING + "local,size"),
        ("local,size=", NO_SETTING + "local,size="),
        ("local,=1", NO_SETTING + "local,=1"),
    ],
)
def test_malformed_flags(given: str, text: str) -> None:
    with pytest.raises(FlagError) as raised:
        options(f"--cache-config={given}")
    assert str(raised.value) == text


def test_the_old_flag_and_the_new_one_exclude_each_other() -> None:
    with pytest.raises(
        FlagError, match="Incompatible flags --response-cache-byte-size and --cache-config both"
    ):
        options("--response-cache-byte-size=1", "--cache-config=local,size=1")
    with pytest.raises(FlagError, match="'x' is not a whole number"):
        options("--response-cache-byte-size=x")


def test_several_caches() -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        open_cache({"local": {"size": "1"}, "redis": {}})
    assert (
        raised.value.message
        == "found multiple cache configurations, but only a single cache is currently supported"
    )


def test_a_cache_that_does_not_exist() -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        open_cache({"nope": {"size": "1"}})
    assert raised.value.message == "unable to find cache 'nope'; there are: local, redis"


def test_local() -> None:
    cache = open_cache({"local": {"size": "1000", "ttl": "1.5"}})
    assert isinstance(cache, LocalCache)
    assert not (cache.blocking or cache.shared)
    assert (cache.snapshot().capacity, cache.ttl_ns) == (1000, 1_500_000_000)
    assert open_local({"size": "1"}).ttl_ns == 0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "config didn't contain a valid 'size' field."),
        ({"ttl": "1"}, "config didn't contain a valid 'size' field."),
        ({"size": "abc"}, "'size' must be a whole number from 1 to 9223372036854775807, got 'abc'"),
        ({"size": "0"}, "'size' must be a whole number from 1 to 9223372036854775807, got '0'"),
        ({"size": "-1"}, "'size' must be a whole number from 1 to 9223372036854775807, got '-1'"),
        (
            {"size": "1" * 30},
            f"'size' must be a whole number from 1 to 9223372036854775807, got '{'1' * 30}'",
        ),
        (
            {"size": "1,ttl=2"},
            "'size' must be a whole number from 1 to 9223372036854775807, got '1,ttl=2'; each setting needs "
            "a --cache-config of its own",
        ),
        ({"size": "1", "ttl": "-1"}, "'ttl' must be a number of seconds above 0, got '-1'"),
        ({"size": "1", "ttl": "x"}, "'ttl' must be a number of seconds above 0, got 'x'"),
        ({"size": "1", "ttl": "inf"}, "'ttl' must be a number of seconds above 0, got 'inf'"),
        ({"size": "1", "host": "x"}, "there is no setting 'host', only size, ttl"),
    ],
)
def test_wrong_settings(settings: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        open_local(settings)
    assert raised.value.message == f"Failed to initialize LocalCache: {text}"


class Other(ResponseCache):
    def __init__(self, settings: Mapping[str, str]) -> None:
        self.settings = settings
        self.closed = 0

    def lookup(self, key: bytes) -> None:
        return None

    def insert(self, key: bytes, entry: bytes, ttl_ns: int) -> bool:
        return True

    def close(self) -> None:
        self.closed += 1


def offer(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """Makes a cache `other` known, as an installed package would."""
    entry = EntryPoint("other", target, GROUP)
    monkeypatch.setattr(conch.caches, "entry_points", lambda **select: EntryPoints([entry]).select(**select))


def test_others_come_through_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, f"{__name__}:Other")
    cache = open_cache({"other": {"a": "b"}})
    assert isinstance(cache, Other)
    assert cache.settings == {"a": "b"}
    offer(monkeypatch, "builtins:dict")
    with pytest.raises(InvalidArgumentError, match="cache 'other': 'builtins:dict' made no"):
        open_cache({"other": {}})
    offer(monkeypatch, "conch_nowhere.cache:Cache")
    with pytest.raises(InvalidArgumentError, match="cache 'other' needs the Python package 'conch_nowhere'"):
        open_cache({"other": {}})


def test_a_server_opens_its_cache_and_closes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened: list[Other] = []

    def open_other(configs: Mapping[str, Mapping[str, str]]) -> Other:
        opened.append(Other(configs["other"]))
        return opened[-1]

    monkeypatch.setattr("conch.caches.open_cache", open_other)
    given = ServerOptions(cache={"other": {"a": "b"}})
    with caplog.at_level(logging.INFO):
        server = InferenceServer(PartOptions(given, ControlOptions((tmp_path,))))
        server.start()
        assert server.stop()
    assert [cache.closed for cache in opened] == [1]
    assert "response cache 'other', keys are made with " in caplog.text
    with pytest.raises(InvalidArgumentError):
        InferenceServer(PartOptions(given, ControlOptions((tmp_path / "nope",)))).start()
    assert [cache.closed for cache in opened] == [1, 1]


def test_the_hash_is_sha_256_where_no_faster_one_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without_blake3(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "blake3":
            raise ModuleNotFoundError(name="blake3")
        return imported(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_blake3)
    assert fastest_hash() == ("SHA-256", hashlib.sha256)


def test_the_hash_is_blake3_where_it_is_installed() -> None:
    pytest.importorskip("blake3", reason="it is optional")
    name, new_hash = fastest_hash()
    assert name == "BLAKE3"
    one = new_hash()
    one.update(memoryview(b"ab"))
    two = one.copy()
    two.update(b"c")
    assert one.digest() != two.digest()
    # The first bytes of the digest of "abc" that BLAKE3's authors publish.
    assert two.digest().hex().startswith("6437b3ac38465133ffb63b75273a8db5")
