"""What the control plane needs of an object store, and the way to the stores there are."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from conch.core.errors import UnsupportedError
from conch_control.repository.layout import Fingerprint
from conch_control.repository.storage.credentials import Credentials
from conch_control.repository.storage.locations import Location

Entry = tuple[str, int, int, int | str]
"""One object in a `Fingerprint`."""


class BusyError(OSError):
    """The store can't answer now, and may a little later."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as a listing shows it.

    Attributes:
        path: Its name, without the repository's prefix.
        size: Bytes.
        identity: Changes whenever the object does, such as its etag; empty where the store has no such thing.
        mtime_ns: When it was last changed.
        md5: MD5 of its content in hexadecimal, as far as the store says; some stores err there.
    """

    path: str
    size: int
    identity: str
    mtime_ns: int
    md5: str = ""

    def entry(self, path: str) -> Entry:
        """The object under some path in a fingerprint."""
        # Where the identity counts, the time says nothing more.
        return path, self.size, 0 if self.identity else self.mtime_ns, self.identity


class Store(Protocol):
    """An object store, seen from its repository; to be used on one event loop.

    All operations raise `FileNotFoundError` for what is not there, `PermissionError`, `BusyError` where
    another try makes sense, and `OSError` for the rest. They may take any time and can be cancelled.
    """

    async def list(self, prefix: str) -> list[StoredObject]:
        """All objects whose paths begin with a prefix, with directories' placeholders (``path/``).

        Args:
            prefix: Empty, or ending with a slash.
        """

    async def read(self, path: str, start: int, end: int) -> bytes:
        """Bytes of an object, fewer or more if the store or the way to it is broken."""

    async def close(self) -> None:
        """Closes connections."""


OpenStore = Callable[[Location, Credentials, float], Awaitable[Store]]
"""Opens a store for which silence of so many seconds is a failure."""

_MODULES = {"s3": "s3", "gs": "gcs", "as": "azure"}
_EXTRAS = {"s3": "s3", "gs": "gcs", "as": "azure"}


def find_store(location: Location) -> OpenStore:
    """The way to the kind of store that a location is in.

    Raises:
        UnsupportedError: The package for it is not installed.
    """
    try:
        module = importlib.import_module(f"conch_control.repository.storage.{_MODULES[location.scheme]}")
    except ImportError as error:
        extra = _EXTRAS[location.scheme]
        raise UnsupportedError(
            f"model repository '{location}': {location.scheme}:// needs the package '{error.name}', which is "
            f"not installed; install it with: pip install 'conch[{extra}]'"
        ) from None
    opening: OpenStore = module.open_store
    return opening


def fingerprint_of(entries: dict[str, StoredObject], directories: set[str]) -> Fingerprint:
    """The fingerprint of a model from its objects and directories, by their paths in it."""
    files = [item.entry(path) for path, item in entries.items()]
    return tuple(sorted([*files, *((f"{path}/", 0, 0, 0) for path in directories)]))
