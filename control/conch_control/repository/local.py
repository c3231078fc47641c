"""Repositories in local directories: every subdirectory is a model.

Object stores get a class of their own with the same `scan`, staging each model in a local directory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from conch.core.errors import InvalidArgumentError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scan:
    """The models found at one moment.

    Attributes:
        models: Directory of each model whose name is unique.
        duplicates: Names that more than one repository has.
    """

    models: Mapping[str, Path]
    duplicates: frozenset[str]


class LocalRepositories:
    """The repositories of a server.

    Args:
        paths: Their directories; one named twice counts once.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(dict.fromkeys(path.absolute() for path in paths))

    def check(self) -> None:
        """Checks that all repositories are there.

        Raises:
            InvalidArgumentError: One of them is not a directory.
        """
        for path in self._paths:
            if not path.is_dir():
                raise InvalidArgumentError(f"repository path is not a valid directory: '{path}'")

    def scan(self) -> Scan:
        """Looks for models; a repository that can't be read now counts as empty."""
        models: dict[str, Path] = {}
        duplicates: set[str] = set()
        for path in self._paths:
            try:
                with os.scandir(path) as entries:
                    names = [entry.name for entry in entries if entry.is_dir()]
            except OSError as error:
                log.error("failed to read model repository '%s': %s", path, error)
                continue
            for name in names:
                if not name.isprintable():
                    log.error("ignoring model directory %r in '%s': its name is not text", name, path)
                    continue
                if name in models:
                    duplicates.add(name)
                models[name] = path / name
        for name in duplicates:
            del models[name]
        return Scan(models, frozenset(duplicates))
