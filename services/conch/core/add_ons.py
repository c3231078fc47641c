"""Finds add-ons by their entry points: the server imports none of them by name."""

from __future__ import annotations

import sys
from functools import cache
from importlib import metadata
from typing import Any

_OWN = ("conch", "conch_api", "conch_control", "conch_testing")
"""Import packages that are there without an entry point."""


@cache
def server_packages() -> tuple[str, ...]:
    """Import packages of server and add-ons: the names that their loggers begin with."""
    found = {entry.module.partition(".")[0] for entry in metadata.distribution("conch").entry_points}
    return (*_OWN, *sorted(found.difference(_OWN)))


@cache
def _installed(path: tuple[str, ...]) -> Any:  # of another type in Python 3.11
    return metadata.entry_points()


def entry_points(**selected: str) -> metadata.EntryPoints:
    """Entry points by `group` and `name`; those of all distributions are read once, as that takes a while."""
    found: metadata.EntryPoints = _installed(tuple(sys.path)).select(**selected)
    return found


def load_add_ons(group: str) -> dict[str, Any]:
    """The objects of a group's entry points, conch's own and those of other distributions, by name."""
    return {each.name: each.load() for each in sorted(entry_points(group=group), key=lambda each: each.name)}


def load_add_on(group: str, name: str) -> Any:
    """The object of one entry point of a group."""
    (entry,) = entry_points(group=group, name=name)
    return entry.load()
