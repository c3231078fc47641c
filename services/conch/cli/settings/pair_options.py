"""Parses options of the form ``<name>,<key>=<value>``, of backends and caches. Used by: `server_options`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from conch.cli.settings.setting import FlagError


def backend_options(specifications: Iterable[str]) -> Mapping[str, Mapping[str, str]]:
    """Parses ``<backend>,<key>=<value>`` options; the key ``""`` has those without a backend.

    Raises:
        FlagError: One is malformed.
    """
    options: dict[str, dict[str, str]] = {}
    for specification in specifications:
        backend, comma, setting = specification.rpartition(",")
        key, equals, value = setting.partition("=")
        if not equals or not key or (comma and not backend):
            raise FlagError(
                f"--backend-config: '{specification}' is not of the form '<backend>,<setting>=<value>' or "
                f"'<setting>=<value>'"
            )
        options.setdefault(backend, {})[key] = value
    return options


def cache_options(specifications: list[str], byte_size: int | None) -> Mapping[str, Mapping[str, str]]:
    """Parses ``<cache name>,<setting>=<value>`` options, whose values may hold commas; texts are Triton's.

    `byte_size` is the value of the deprecated flag.

    Raises:
        FlagError: One is malformed, or both flags are given.
    """
    if byte_size is not None:
        if specifications:
            raise FlagError(
                "Error: Incompatible flags --response-cache-byte-size and --cache-config both provided. "
                "Please provide one or the other."
            )
        return {"local": {"size": str(byte_size)}}
    caches: dict[str, dict[str, str]] = {}
    for specification in specifications:
        name, comma, setting = specification.partition(",")
        if not (name and comma):
            raise FlagError(
                f"No cache specified. --cache-config option format is <cache name>,<setting>=<value>. "
                f"Got {specification}"
            )
        key, _, value = setting.partition("=")
        if not (key and value):
            raise FlagError(
                f"--cache-config option format is '<cache name>,<setting>=<value>'. Got {specification}"
            )
        caches.setdefault(name, {})[key] = value
    return caches
