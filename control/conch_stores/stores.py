"""The interface of object stores, and the mapping of objects to models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from conch_control.repository.layout import Fingerprint
from conch_stores.credentials import Credentials
from conch_stores.locations import Location

Entry = tuple[str, int, int, int | str]
"""One object in a `Fingerprint`."""


class StoreBusyError(OSError):
    """The store can't answer now; a retry may succeed."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object in a listing.

    Attributes:
        path: Name without the repository's prefix.
        identity: Changes with the object, such as its etag; empty if the store has none.
        mtime_ns: Last modification.
        md5: MD5 in hexadecimal as the store reports it; not always right.
    """

    path: str
    size: int
    identity: str
    mtime_ns: int
    md5: str = ""

    def entry(self, path: str) -> Entry:
        """Fingerprint entry of the object under a path."""
        # The mtime adds nothing to an identity.
        return path, self.size, 0 if self.identity else self.mtime_ns, self.identity


class Store(Protocol):
    """An object store, used on one event loop.

    Operations raise `FileNotFoundError`, `PermissionError`, `StoreBusyError` if a retry makes sense, else
    `OSError`. They have no time limit and can be cancelled.
    """

    async def list(self, prefix: str) -> list[StoredObject]:
        """All objects under a prefix, with directory placeholders (``path/``)."""

    async def read(self, path: str, start: int, end: int) -> bytes:
        """Bytes of an object; may return another count if store or proxy misbehave."""

    async def close(self) -> None:
        """Closes the connections."""


OpenStore = Callable[[Location, Credentials, float], Awaitable[Store]]
"""Opens a store; the float is the longest silence in seconds."""


def fingerprint_of(entries: dict[str, StoredObject], directories: set[str]) -> Fingerprint:
    """Fingerprint of a model from its objects and directories."""
    files = [item.entry(path) for path, item in entries.items()]
    return tuple(sorted([*files, *((f"{path}/", 0, 0, 0) for path in directories)]))


_LONGEST_NAME = 255
"""Longest file name in bytes."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The content of a model.

    Attributes:
        files: Objects by path in the model's directory.
        directories: Directories, also empty ones.
        problem: Reason for which it can't be a directory; empty if it can.
    """

    files: Mapping[str, StoredObject]
    directories: frozenset[str]
    problem: str = ""

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the model."""
        return fingerprint_of(dict(self.files), set(self.directories))


def by_model(objects: Iterable[StoredObject]) -> dict[str, list[StoredObject]]:
    """Objects by model; those outside of model directories are dropped."""
    models: dict[str, list[StoredObject]] = {}
    for item in objects:
        name, slash, _ = item.path.partition("/")
        if slash and is_safe(name):
            models.setdefault(name, []).append(item)
    return models


def is_safe(name: str) -> bool:
    """True for a valid single file name."""
    return (
        name not in ("", ".", "..")
        and "\0" not in name
        and "/" not in name
        and len(name.encode(errors="surrogateescape")) <= _LONGEST_NAME
    )


def contents_of(name: str, objects: Iterable[StoredObject]) -> Contents:
    """The content of a model."""
    files: dict[str, StoredObject] = {}
    directories: set[str] = set()
    problem = ""
    for item in sorted(objects, key=lambda item: item.path):
        path = item.path[len(name) + 1 :]
        if not path:
            continue  # placeholder of the model's directory
        placeholder = path.endswith("/")
        parts = path.rstrip("/").split("/") if placeholder else path.split("/")
        if not all(is_safe(part) for part in parts):
            problem = problem or f"an object's name can't be that of a file: {item.path!r}"
            continue
        # Python's caches are no part of a model, as in local repositories.
        if "__pycache__" in parts[: None if placeholder else -1]:
            continue
        depth = len(parts) + (1 if placeholder else 0)
        directories.update("/".join(parts[:count]) for count in range(1, depth))
        if not placeholder:
            files[path] = item
    for path in sorted(files.keys() & directories):
        # Some tools write directory placeholders without a trailing slash.
        if files[path].size == 0:
            del files[path]
        else:
            problem = problem or f"'{name}/{path}' is an object and a directory"
    return Contents(files, frozenset(directories), problem)
