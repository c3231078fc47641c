"""Finds add-ons by their entry points: the server imports none of them by name."""

from __future__ import annotations

from functools import cache
from importlib.metadata import distribution


@cache
def server_packages() -> tuple[str, ...]:
    """Import packages of server and add-ons: the names that their loggers begin with."""
    found = {entry.module.partition(".")[0] for entry in distribution("conch").entry_points}
    return ("conch", "conch_control", *sorted(found - {"conch", "conch_control"}))
