"""Opens model repositories of any kind: local directories, and URLs by their scheme.

The kinds of the schemes are found through entry points, so that another package can add one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

from conch.core.add_ons import entry_points
from conch.core.errors import InvalidArgumentError, UnsupportedError
from conch_control.control_options import StorageOptions
from conch_control.repository.local import LocalRepository
from conch_control.repository.source import Repository

GROUP = "conch.repositories"
"""Entry-point group; each entry has the name of a URL scheme and points to a `RepositoryKind`."""

RepositoryKind = Callable[[str, StorageOptions], Repository]
"""Opens the repository at a URL of the kind's scheme without accessing it; see `Repository.check`.

Raises InvalidArgumentError if the URL is malformed, and ImportError if a package is missing: the server then
names the package, and the extra of the entry point.
"""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://.*", re.DOTALL)


def open_repository(location: str | Path, options: StorageOptions | None = None) -> Repository:
    """Opens the repository at a location without accessing it; a location without a scheme is a local path.

    Raises:
        InvalidArgumentError: The location is malformed, or its scheme is not known.
        UnsupportedError: A package for its kind is not installed.
    """
    url = None if isinstance(location, Path) else _URL.fullmatch(location)
    if url is None:
        return LocalRepository(Path(location))
    text, scheme = url[0], url[1]
    found = entry_points(group=GROUP, name=scheme)
    if not found:
        # Backwards, so that S3 is the first one.
        names = sorted({entry.name for entry in entry_points(group=GROUP)}, reverse=True)
        known = ", ".join(f"{name}://" for name in names)
        raise InvalidArgumentError(
            f"model repository '{without_user(text)}': scheme '{scheme}' is not known; known are {known} and "
            f"local paths without a scheme"
        )
    entry = next(iter(found))
    try:
        opening: RepositoryKind = entry.load()
        return opening(text, options or StorageOptions())
    except ImportError as error:
        raise UnsupportedError(
            f"model repository '{without_user(text.rstrip('/'))}': {scheme}:// needs the package "
            f"'{error.name}', which is not installed{_advice(entry)}"
        ) from None


def without_user(url: str) -> str:
    """A URL without user information, for errors."""
    return re.sub(r"://[^/@]*@", "://***@", url)


def _advice(entry: EntryPoint) -> str:
    if entry.dist is None or not entry.extras:
        return ""
    return f"; install it with: pip install '{entry.dist.name}[{entry.extras[0]}]'"
