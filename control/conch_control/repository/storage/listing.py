"""From the objects of a repository to its models, and from a model's objects to its directory; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from conch_control.repository.layout import Fingerprint
from conch_control.repository.storage.stores import StoredObject, fingerprint_of

_LONGEST_NAME = 255
"""Bytes that a file's name may have."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a model consists of.

    Attributes:
        files: Its objects by their path in the model's directory.
        directories: Its directories, also empty ones.
        problem: Why no directory can hold it; empty where one can.
    """

    files: Mapping[str, StoredObject]
    directories: frozenset[str]
    problem: str = ""

    @property
    def fingerprint(self) -> Fingerprint:
        """What tells it from other states of the model."""
        return fingerprint_of(dict(self.files), set(self.directories))


def by_model(objects: Iterable[StoredObject]) -> dict[str, list[StoredObject]]:
    """The objects of a repository by the model they belong to; those outside of all are left out."""
    models: dict[str, list[StoredObject]] = {}
    for item in objects:
        name, slash, _ = item.path.partition("/")
        if slash and is_safe(name):
            models.setdefault(name, []).append(item)
    return models


def is_safe(name: str) -> bool:
    """Whether a name can be that of a file or a directory, in its own directory."""
    return (
        name not in ("", ".", "..")
        and "\0" not in name
        and "/" not in name
        and len(name.encode(errors="surrogateescape")) <= _LONGEST_NAME
    )


def contents_of(name: str, objects: Iterable[StoredObject]) -> Contents:
    """What a model consists of.

    Args:
        name: Its name.
        objects: Those whose paths begin with the name and a slash.
    """
    files: dict[str, StoredObject] = {}
    directories: set[str] = set()
    problem = ""
    for item in sorted(objects, key=lambda item: item.path):
        path = item.path[len(name) + 1 :]
        if not path:
            continue  # the placeholder of the model's own directory
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
        # Some tools write a directory's placeholder as an empty object without a slash.
        if files[path].size == 0:
            del files[path]
        else:
            problem = problem or f"'{name}/{path}' is an object and a directory"
    return Contents(files, frozenset(directories), problem)
