"""Measures the cache directory: used and evictable bytes."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Entry:
    """A file: size, link count, atime and mtime in Unix seconds."""

    path: Path
    size: int
    links: int
    used: float
    changed: float


@dataclass(slots=True)
class CacheUsage:
    """Content of the cache; `wanted` has reserved sizes by digest."""

    blobs: dict[str, Entry]
    partials: dict[str, Entry]
    wanted: dict[str, int]
    copied: int

    def used(self) -> int:
        """Bytes taken or reserved."""
        return (
            sum(entry.size for entry in self.blobs.values())
            + sum(entry.size for digest, entry in self.partials.items() if digest not in self.wanted)
            + sum(size for digest, size in self.wanted.items() if digest not in self.blobs)
            + self.copied
        )

    def unused(self) -> list[Entry]:
        """Files that may be evicted."""
        blobs = [
            entry for digest, entry in self.blobs.items() if entry.links == 1 and digest not in self.wanted
        ]
        return blobs + [entry for digest, entry in self.partials.items() if digest not in self.wanted]


def entries_of(directory: Path) -> dict[str, Entry]:
    """Files of a directory by name."""
    found: dict[str, Entry] = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                status = entry.stat()
                path = Path(entry.path)
                found[entry.name] = Entry(
                    path, status.st_size, status.st_nlink, status.st_atime, status.st_mtime
                )
    return found


def files_of(owner: Path) -> list[Path]:
    """Files of an owner; empty if it has just ended."""
    try:
        return list(owner.iterdir())
    except OSError:
        return []


def owner_is_alive(owner: Path) -> bool:
    """True if an owner holds its lock."""
    try:
        descriptor = os.open(owner / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def size_of(path: Path) -> int:
    """Bytes of a file; -1 if it is missing."""
    try:
        return path.stat().st_size
    except OSError:
        return -1
