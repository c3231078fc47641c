"""The repositories of a server, looked at as one."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping

from conch.core.errors import ConchError
from conch_control.repository.namespaces import ReadParts, namespaced
from conch_control.repository.source import ModelSource, Repository, Scan

log = logging.getLogger(__name__)


class Repositories:
    """The repositories of a server.

    Args:
        repositories: Each of them; one whose location is there already counts once.
        read_parts: Reads what an ensemble is made of; given where models of one name may be in several
            repositories, and are told apart by these.
    """

    def __init__(self, repositories: Iterable[Repository], read_parts: ReadParts | None = None) -> None:
        self._read_parts = read_parts
        self._names: dict[str, tuple[str, ...]] = {}  # at the last look that could be had, by location
        self._repositories = tuple({each.location: each for each in repositories}.values())

    def __iter__(self) -> Iterator[Repository]:
        return iter(self._repositories)

    def check(self) -> None:
        """Checks that all repositories can be used.

        Raises:
            InvalidArgumentError: One of them can't.
        """
        for repository in self._repositories:
            repository.check()

    def close(self) -> None:
        """Gives up what the repositories hold; nothing may be served from them any more."""
        for repository in self._repositories:
            repository.close()

    def scan(self) -> Scan:
        """Looks for models in all of them."""
        models: dict[str, ModelSource] = {}
        duplicates: set[str] = set()
        unreadable: dict[str, str] = {}
        by_repository: dict[str, Mapping[str, ModelSource]] = {}
        for repository in self._repositories:
            try:
                found = repository.models()
            except (ConchError, OSError) as error:  # the former of credentials that have become wrong
                reason = error.message if isinstance(error, ConchError) else str(error)
                log.error("failed to read model repository '%s': %s", repository.location, reason)
                unreadable[repository.location] = reason
                continue
            if self._read_parts is not None:
                by_repository[repository.location] = found
                continue
            duplicates.update(found.keys() & models.keys())
            models.update(found)
        if self._read_parts is not None:
            # Names that are just not seen now go on meaning what they did.
            self._names |= {location: tuple(found) for location, found in by_repository.items()}
            return namespaced(by_repository, self._names, unreadable, self._read_parts)
        for name in duplicates:
            del models[name]
        return Scan(models, frozenset(duplicates), unreadable)
