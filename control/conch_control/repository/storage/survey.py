"""What is in the directory of a model cache, and what of it may go."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Entry:
    """A file: its size, its links, when it was last used and last changed, in seconds since 1970."""

    path: Path
    size: int
    links: int
    used: float
    changed: float


@dataclass(slots=True)
class Survey:
    """What is in the directory; `wanted` is what room is claimed for."""

    blobs: dict[str, Entry]
    partials: dict[str, Entry]
    wanted: dict[str, int]
    copied: int

    def used(self) -> int:
        """Bytes that are taken, or claimed."""
        return (
            sum(entry.size for entry in self.blobs.values())
            + sum(entry.size for digest, entry in self.partials.items() if digest not in self.wanted)
            + sum(size for digest, size in self.wanted.items() if digest not in self.blobs)
            + self.copied
        )

    def unused(self) -> list[Entry]:
        """What may be evicted."""
        blobs = [
            entry for digest, entry in self.blobs.items() if entry.links == 1 and digest not in self.wanted
        ]
        return blobs + [entry for digest, entry in self.partials.items() if digest not in self.wanted]


def entries_of(directory: Path) -> dict[str, Entry]:
    """The files in a directory, by name."""
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
    """What an owner has in its directory; nothing if it has just ended."""
    try:
        return list(owner.iterdir())
    except OSError:
        return []


def is_alive(owner: Path) -> bool:
    """Whether an owner still holds its lock."""
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
    """Bytes of a file; -1 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return -1
