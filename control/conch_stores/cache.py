"""The local model cache: object contents as blobs, models as trees of hard links to them.

```
lock                    held while counting, linking or evicting
blobs/<digest>          content of one object version; immutable
partial/<digest>        first bytes of one, locked by the thread that fetches it
owners/<id>/lock        held by a server for its life; directories of dead owners are removed
owners/<id>/<n>/<name>  a model in use, linked to blobs
owners/<id>/<n>.wanted  blobs being fetched for it, with reserved sizes
owners/<id>/<n>.copied  bytes copied where links were impossible
```

Several servers may share it. All locks are kernel locks, released when a process is killed. Linked and
wanted blobs are never evicted. Threads: any.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from conch.core.clock import wall_seconds

log = logging.getLogger(__name__)

_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EACCES)
_FORGET_S = 7 * 24 * 3600
"""Age at which partial downloads are removed, in seconds."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Write = Callable[[int, bytes, int], int]
"""Writes bytes to a descriptor at an offset; returns the count, as `os.pwrite`."""


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


def is_disk_full(error: OSError) -> bool:
    """True if an error says that the disk is full."""
    return error.errno in _FULL


@dataclass(frozen=True, slots=True)
class Blob:
    """Identity of a content."""

    digest: str
    size: int


class ModelCache:
    """A cache directory with a limit in bytes, 0 for none; thread-safe and process-safe.

    Nothing is created before `open`.
    """

    def __init__(
        self,
        directory: Path,
        budget: int = 0,
        now: Callable[[], float] = wall_seconds,
        write: Write = os.pwrite,
    ) -> None:
        self.directory = directory
        self._budget = budget
        self._now = now
        self.write = write
        self._blobs = directory / "blobs"
        self._partials = directory / "partial"
        self._owners = directory / "owners"
        self.own_directory = self._owners / f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._opening = threading.Lock()
        self._held: int | None = None
        self._closed = False
        self._numbers = itertools.count()

    def open(self) -> None:
        """Creates the directory and removes what dead servers have left.

        Raises:
            OSError: It can't be written, or the cache is closed.
        """
        with self._opening:
            if self._closed:  # a late listing must not create another directory
                raise OSError(errno.EBADF, f"the model cache '{self.directory}' has been closed")
            if self._held is not None:
                return
            self.directory.mkdir(0o700, parents=True, exist_ok=True)
            for directory in (self._blobs, self._partials, self._owners):
                directory.mkdir(parents=True, exist_ok=True)
            with self.locked():
                self.own_directory.mkdir()
                held = os.open(self.own_directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(held, fcntl.LOCK_EX)
                self._held = held
                self._clean()

    def close(self) -> None:
        """Removes this server's trees; blobs stay."""
        with self._opening:
            self._closed = True
            held, self._held = self._held, None
            if held is not None:
                shutil.rmtree(self.own_directory, ignore_errors=True)
                os.close(held)

    def has(self, blob: Blob) -> bool:
        """True if a blob is complete."""
        return size_of(self._blobs / blob.digest) == blob.size

    def find(self, blob: Blob) -> bytes | None:
        """Content of a blob, if present."""
        path = self._blobs / blob.digest
        try:
            content = path.read_bytes()
            self._touch(path)
        except OSError:
            return None
        return content if len(content) == blob.size else None

    def keep(self, blob: Blob, content: bytes) -> None:
        """Adds a small blob if there is room."""
        new = self._partials / f"{blob.digest}.{uuid.uuid4().hex[:12]}"
        try:
            with self.locked():
                self._evict_for({blob.digest: blob.size})
                new.write_bytes(content)
                new.chmod(0o444)
                new.rename(self._blobs / blob.digest)
        except OSError as error:
            log.debug("'%s' does not take a content: %s", self.directory, error)
            new.unlink(missing_ok=True)

    def tree(self, name: str) -> Tree:
        """Creates an empty tree. Raises OSError: it can't be created."""
        self.open()
        number = str(next(self._numbers))
        (self.own_directory / number / name).mkdir(parents=True)
        return Tree(self, self.own_directory / number, name)

    def partial(self, blob: Blob) -> Partial | None:
        """Locks the partial download of a blob; None if another thread or server has it or has finished.

        Raises:
            OSError: It can't be created.
        """
        path = self._partials / blob.digest
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with ExitStack() as undo:
            undo.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            status = os.fstat(descriptor)
            if status.st_nlink == 0:  # the previous holder has finished
                return None
            if status.st_size == 0 and self.has(blob):  # already complete: this file is new
                path.unlink(missing_ok=True)
                return None
            if status.st_size > blob.size:
                os.ftruncate(descriptor, 0)
            undo.pop_all()
        return Partial(self, path, descriptor, self.write)

    def free(self, size: int) -> bool:
        """Evicts at least `size` bytes if possible; returns True if anything was evicted."""
        with self.locked():
            usage = self._usage()
            return self._evict(usage.unused(), size) > 0

    def disk_full(self, error: OSError) -> OSError:
        """The error for a full disk."""
        return OSError(error.errno, f"the disk of the model cache '{self.directory}' is full")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the cache against counting, linking and evicting by others."""
        descriptor = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _link(self, blob: Blob, target: Path) -> int:
        """Links a blob into a tree; returns the bytes copied instead, if any."""
        path = self._blobs / blob.digest
        copied = 0
        try:
            os.link(path, target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            shutil.copyfile(path, target)
            copied = blob.size
        self._touch(path)
        return copied

    def _complete(self, blob: Blob) -> None:
        """Turns a finished download into a blob; call with the cache locked.

        Raises:
            FileNotFoundError: It is missing or incomplete.
        """
        partial = self._partials / blob.digest
        if self.has(blob):
            partial.unlink(missing_ok=True)
            return
        if size_of(partial) != blob.size:
            raise FileNotFoundError(errno.ENOENT, "what was fetched is gone", str(partial))
        partial.chmod(0o444)
        partial.rename(self._blobs / blob.digest)

    def _touch(self, path: Path) -> None:
        # Only the access time: the mtime shows in linked models.
        seconds = self._now()
        os.utime(path, ns=(int(seconds * 1e9), path.stat().st_mtime_ns))

    def _evict_for(self, wanted: Mapping[str, int]) -> None:
        """Evicts to make room; call with the cache locked.

        Raises:
            OSError: There is not enough room; nothing was evicted.
        """
        if not self._budget:
            return
        usage = self._usage()
        usage.wanted.update(wanted)
        excess = usage.used() - self._budget
        if excess <= 0:
            return
        unused = usage.unused()
        if sum(entry.size for entry in unused) < excess:
            need = sum(size for digest, size in wanted.items() if digest not in usage.blobs)
            taken = usage.used() - need - sum(entry.size for entry in unused)
            raise OSError(
                errno.ENOSPC,
                f"the model cache '{self.directory}' may hold {self._budget} bytes "
                f"(--model-cache-byte-size), {taken} of which are in use, and {need} more are needed",
            )
        self._evict(unused, excess)

    def _evict(self, entries: list[Entry], size: int) -> int:
        freed = 0
        for entry in sorted(entries, key=lambda entry: entry.used):
            if freed >= size:
                break
            with suppress(OSError):
                entry.path.unlink()
                freed += entry.size
        return freed

    def _usage(self) -> CacheUsage:
        usage = CacheUsage(entries_of(self._blobs), entries_of(self._partials), {}, 0)
        for owner in list(self._owners.iterdir()):
            if not owner_is_alive(owner):
                shutil.rmtree(owner, ignore_errors=True)
                continue
            for path in files_of(owner):
                with suppress(OSError, ValueError):
                    if path.suffix == ".wanted":
                        for line in path.read_text().splitlines():
                            digest, _, size = line.partition(" ")
                            usage.wanted[digest] = int(size)
                    elif path.suffix == ".copied":
                        usage.copied += int(path.read_text())
        return usage

    def _clean(self) -> None:
        usage = self._usage()
        oldest = self._now() - _FORGET_S
        for digest, entry in usage.partials.items():
            if digest not in usage.wanted and entry.changed < oldest:
                with suppress(OSError):
                    entry.path.unlink()


class Tree:
    """A model's directory in the cache."""

    def __init__(self, cache: ModelCache, place: Path, name: str) -> None:
        self._cache = cache
        self._place = place
        self._wanted = place.with_name(f"{place.name}.wanted")
        self._copied = 0
        self.directory = place / name

    def begin(self, directories: Iterable[str], files: Mapping[str, Blob]) -> list[str]:
        """Creates the directories, links present blobs and reserves room; returns the missing paths.

        Raises:
            OSError: There is no room.
        """
        for path in sorted(directories):
            (self.directory / path).mkdir(parents=True, exist_ok=True)
        missing: dict[str, Blob] = {}
        cache = self._cache
        with cache.locked():
            for path, blob in files.items():
                if blob.size == 0:
                    (self.directory / path).touch()
                elif cache.has(blob):
                    self._link(path, blob)
                else:
                    missing[path] = blob
            if missing:
                cache._evict_for({blob.digest: blob.size for blob in missing.values()})
                lines = {f"{blob.digest} {blob.size}\n" for blob in missing.values()}
                self._wanted.write_text("".join(lines))
            self._count()
        return list(missing)

    def finish(self, files: Mapping[str, Blob]) -> None:
        """Links the fetched blobs.

        Raises:
            FileNotFoundError: Some are missing.
            OSError: There is no room.
        """
        cache = self._cache
        with cache.locked():
            for blob in files.values():
                cache._complete(blob)
            for path, blob in files.items():
                self._link(path, blob)
            self._wanted.unlink(missing_ok=True)
            self._count()

    def remove(self) -> None:
        """Removes the tree, which must not be in use."""
        shutil.rmtree(self._place, ignore_errors=True)
        for suffix in (".wanted", ".copied"):
            self._place.with_name(self._place.name + suffix).unlink(missing_ok=True)

    def _link(self, path: str, blob: Blob) -> None:
        self._copied += self._cache._link(blob, self.directory / path)

    def _count(self) -> None:
        """Records copied bytes, and evicts for them."""
        if self._copied:
            self._place.with_name(f"{self._place.name}.copied").write_text(str(self._copied))
            self._cache._evict_for({})


class Partial:
    """The first bytes of a blob in the cache, and the right to append: the file is locked."""

    def __init__(self, cache: ModelCache, path: Path, descriptor: int, write: Write) -> None:
        self._cache = cache
        self._path = path
        self._lock = threading.Lock()  # `close` may run while another thread writes
        self._descriptor: int | None = descriptor
        self._write = write
        self.size = os.fstat(descriptor).st_size

    def append(self, data: bytes) -> None:
        """Appends bytes; evicts blobs if the disk is full.

        Raises:
            OSError: They can't be written; the earlier bytes stay valid.
        """
        with self._lock:
            while data:
                try:
                    written = self._write(self._open(), data, self.size)
                except OSError as error:
                    if not is_disk_full(error):
                        raise
                    if not self._cache.free(len(data)):
                        raise self._cache.disk_full(error) from None
                    continue
                self.size += written
                data = data[written:]

    def restart(self) -> None:
        """Drops all bytes. Raises FileNotFoundError: another server has completed it."""
        with self._lock, self._cache.locked():
            self._unlink()
            fresh = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(fresh, fcntl.LOCK_EX)
            os.close(self._open())
            self._descriptor = fresh
            self.size = 0

    def drop(self) -> None:
        """Removes the file. Raises FileNotFoundError: another server has completed it."""
        with self._lock, self._cache.locked():
            self._unlink()

    def md5(self) -> str:
        """MD5 in hexadecimal."""
        digest = hashlib.md5(usedforsecurity=False)
        with self._lock:
            offset = 0
            while data := os.pread(self._open(), 1 << 20, offset):
                digest.update(data)
                offset += len(data)
        return digest.hexdigest()

    def sync(self) -> None:
        """Flushes to disk, so that a power loss leaves no wrong bytes."""
        with self._lock:
            try:
                os.fsync(self._open())
            except OSError as error:
                raise self._cache.disk_full(error) if is_disk_full(error) else error from None

    def close(self) -> None:
        """Unlocks the file for others."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)

    def _unlink(self) -> None:
        # Never truncated: it may be a blob already, linked to a model.
        if os.stat(self._path).st_ino != os.fstat(self._open()).st_ino:
            raise FileNotFoundError(errno.ENOENT, "what was fetched is gone", str(self._path))
        self._path.unlink()

    def _open(self) -> int:
        if self._descriptor is None:
            raise OSError(errno.EBADF, "it has been closed")
        return self._descriptor
