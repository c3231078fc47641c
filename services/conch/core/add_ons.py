"""Finds add-ons by their entry points: the server imports none of them by name."""

from __future__ import annotations

from functools import cache
from importlib.metadata import distribution, entry_points
from typing import Any

_OWN = ("conch", "conch_api", "conch_control", "conch_testing")
"""Import packages that are there without an entry point."""


@cache
def server_packages() -> tuple[str, ...]:
    """Import packages of server and add-ons: the names that their loggers begin with."""
    found = {entry.module.partition(".")[0] for entry in distribution("conch").entry_points}
    return (*_OWN, *sorted(found.difference(_OWN)))


def load_add_ons(group: str) -> dict[str, Any]:
    """The objects of a group's entry points, conch's own and those of other distributions, by name."""
    return {each.name: each.load() for each in sorted(entry_points(group=group), key=lambda each: each.name)}


def load_add_on(group: str, name: str) -> Any:
    """The object of one entry point of a group."""
    (entry,) = entry_points(group=group, name=name)
    return entry.load()
