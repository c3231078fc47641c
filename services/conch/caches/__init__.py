"""Opens the response cache that is configured; caches are found by name through entry points."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points

from conch.core.errors import InvalidArgumentError
from conch.core.response_cache.base import ResponseCache

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
            f"`pip install conch[{name}]`"
        ) from error
    if not isinstance(cache, ResponseCache):
        raise InvalidArgumentError(
            f"cache '{name}': '{entry.value}' made no conch.core.response_cache ResponseCache"
        )
    return cache
