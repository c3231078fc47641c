"""Finds add-ons by their entry points: the server imports none of them by name."""

from __future__ import annotations

import os
import sys
from functools import cache, lru_cache
from importlib import metadata
from typing import Any

_OWN = ("conch", "conch_api", "conch_control", "conch_testing")
"""Import packages that are there without an entry point."""


@cache
def server_packages() -> tuple[str, ...]:
    """Import packages of server and add-ons: the names that their loggers begin with."""
    found = {entry.module.partition(".")[0] for entry in metadata.distribution("conch").entry_points}
    return (*_OWN, *sorted(found.difference(_OWN)))


@lru_cache(maxsize=1)
def _installed(folders: tuple[tuple[str, int], ...]) -> Any:  # of another type in Python 3.11
    return metadata.entry_points()


def _changed_ns(folder: str) -> int:
    """Time of a folder's last change, as when something is installed there; 0 if there is none."""
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0


def entry_points(**selected: str) -> metadata.EntryPoints:
    """Entry points by `group` and `name`; read once while nothing is installed, as that takes long."""
    folders = tuple((folder, _changed_ns(folder)) for folder in sys.path)
    found: metadata.EntryPoints = _installed(folders).select(**selected)
    return found


def load_add_ons(group: str) -> dict[str, Any]:
    """The objects of a group's entry points, conch's own and those of other distributions, by name."""
    return {each.name: each.load() for each in sorted(entry_points(group=group), key=lambda each: each.name)}


def load_add_on(group: str, name: str) -> Any:
    """The object of one entry point of a group."""
    (entry,) = entry_points(group=group, name=name)
    return entry.load()
