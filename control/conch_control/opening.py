"""The repositories that options name, opened."""

from __future__ import annotations

from collections.abc import Iterable

from conch_control.dependencies import read_parts
from conch_control.options import ControlOptions
from conch_control.repository.repositories import Repositories
from conch_control.repository.source import Repository
from conch_control.repository.storage import open_repository


def open_repositories(options: ControlOptions, others: Iterable[Repository] = ()) -> Repositories:
    """Opens all repositories; nothing of them is read yet.

    Args:
        options: What names them.
        others: Repositories that are open already.

    Raises:
        InvalidArgumentError: A location makes no sense, or what it needs is not installed.
    """
    opened = [open_repository(location, options.storage) for location in options.repositories]
    opened += others
    if not options.namespacing:
        return Repositories(opened)
    return Repositories(opened, lambda source: read_parts(source, options))
