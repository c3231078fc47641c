"""The directory where fetched models are: contents as blobs, models as trees of links to them.

```
lock                    held while something is counted, linked or evicted
blobs/<digest>          the content of one object in one state; never changed
partial/<digest>        the first bytes of one, held by whoever fetches it
owners/<id>/lock        held by a server for its life; what a dead one has left is removed
owners/<id>/<n>/<name>  a model that is in use, linked to blobs
owners/<id>/<n>.wanted  what is being fetched for it: that much room is taken
owners/<id>/<n>.copied  bytes that had to be copied, as they could not be linked
```

Several servers may share it. All locks are the kernel's, so that nothing of a killed process holds up others.
A blob that is linked, or wanted, is never evicted.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from conch.core.clock import wall_seconds
from conch_control.repository.storage.partial import Partial, Write
from conch_control.repository.storage.survey import Entry, Survey, entries_of, files_of, is_alive, size_of

log = logging.getLogger(__name__)

_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EACCES)
_FORGET_S = 7 * 24 * 3600
"""How long what was fetched in part waits for somebody to go on."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A content to be had.

    Attributes:
        digest: Its name in the cache.
        size: Bytes.
    """

    digest: str
    size: int


class ModelCache:
    """The directory. Nothing is made before `open`.

    Args:
        directory: Where.
        budget: Most bytes to keep; 0 for any number.
        now: Time in seconds since 1970, for what was used least recently.
        write: Writes what is fetched.
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
        self._write = write
        self._blobs = directory / "blobs"
        self._partials = directory / "partial"
        self._owners = directory / "owners"
        self._own = self._owners / f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._opening = threading.Lock()
        self._held: int | None = None
        self._closed = False
        self._numbers = itertools.count()

    def open(self) -> None:
        """Makes the directory where it is missing, and removes what dead servers have left in it.

        Raises:
            OSError: It can't be written, or has been closed.
        """
        with self._opening:
            if self._closed:  # whoever still looks at the repository must not leave another directory
                raise OSError(errno.EBADF, f"the model cache '{self.directory}' has been closed")
            if self._held is not None:
                return
            self.directory.mkdir(0o700, parents=True, exist_ok=True)
            for directory in (self._blobs, self._partials, self._owners):
                directory.mkdir(parents=True, exist_ok=True)
            with self.locked():
                self._own.mkdir()
                held = os.open(self._own / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(held, fcntl.LOCK_EX)
                self._held = held
                self._clean()

    def close(self) -> None:
        """Removes the trees; what is in use must not be any more. The blobs stay."""
        with self._opening:
            self._closed = True
            held, self._held = self._held, None
            if held is not None:
                shutil.rmtree(self._own, ignore_errors=True)
                os.close(held)

    def has(self, blob: Blob) -> bool:
        """Whether a content is there."""
        return size_of(self._blobs / blob.digest) == blob.size

    def find(self, blob: Blob) -> bytes | None:
        """A content, if it is there."""
        path = self._blobs / blob.digest
        try:
            content = path.read_bytes()
            self._touch(path)
        except OSError:
            return None
        return content if len(content) == blob.size else None

    def keep(self, blob: Blob, content: bytes) -> None:
        """Adds a small content, if there is room for it."""
        new = self._partials / f"{blob.digest}.{uuid.uuid4().hex[:12]}"
        try:
            with self.locked():
                self._make_room({blob.digest: blob.size})
                new.write_bytes(content)
                new.chmod(0o444)
                new.rename(self._blobs / blob.digest)
        except OSError as error:
            log.debug("'%s' does not take a content: %s", self.directory, error)
            new.unlink(missing_ok=True)

    def tree(self, name: str) -> Tree:
        """A new empty tree.

        Args:
            name: What its directory is to be called.

        Raises:
            OSError: It can't be made.
        """
        self.open()
        number = str(next(self._numbers))
        (self._own / number / name).mkdir(parents=True)
        return Tree(self, self._own / number, name)

    def partial(self, blob: Blob) -> Partial | None:
        """What there is of a content so far, to go on with; None while somebody else does, or has done.

        Raises:
            OSError: It can't be made.
        """
        path = self._partials / blob.digest
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(descriptor)
            if status.st_nlink == 0:  # whoever had it is done with it
                raise BlockingIOError
            if status.st_size == 0 and self.has(blob):  # somebody was faster: this is a new one
                path.unlink(missing_ok=True)
                raise BlockingIOError
            if status.st_size > blob.size:
                os.ftruncate(descriptor, 0)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        return Partial(self, path, descriptor, self._write)

    def free(self, size: int) -> bool:
        """Removes contents that nobody uses, least recently used first, until so many bytes are free.

        Returns:
            Whether there was any.
        """
        with self.locked():
            survey = self._survey()
            return self._evict(survey.unused(), size) > 0

    def no_room(self, error: OSError) -> OSError:
        """What to say when the disk is full."""
        return OSError(error.errno, f"the disk of the model cache '{self.directory}' is full")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps others, of this server or of another one, from counting, linking and evicting."""
        descriptor = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _link(self, blob: Blob, target: Path) -> int:
        """Puts a content into a tree; returns how many bytes had to be copied for it."""
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
        """Makes a blob of what has been fetched; the directory is locked.

        Raises:
            FileNotFoundError: It has gone, or is not all there.
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
        # The access time only: the other one is seen in the models that are linked to it.
        seconds = self._now()
        os.utime(path, ns=(int(seconds * 1e9), path.stat().st_mtime_ns))

    def _make_room(self, wanted: Mapping[str, int]) -> None:
        """Evicts what it takes to have room for some contents; the directory is locked.

        Raises:
            OSError: There is not that much room; nothing has been evicted.
        """
        if not self._budget:
            return
        survey = self._survey()
        survey.wanted.update(wanted)
        excess = survey.used() - self._budget
        if excess <= 0:
            return
        unused = survey.unused()
        if sum(entry.size for entry in unused) < excess:
            need = sum(size for digest, size in wanted.items() if digest not in survey.blobs)
            taken = survey.used() - need - sum(entry.size for entry in unused)
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

    def _survey(self) -> Survey:
        survey = Survey(entries_of(self._blobs), entries_of(self._partials), {}, 0)
        for owner in list(self._owners.iterdir()):
            if not is_alive(owner):
                shutil.rmtree(owner, ignore_errors=True)
                continue
            for path in files_of(owner):
                with suppress(OSError, ValueError):
                    if path.suffix == ".wanted":
                        for line in path.read_text().splitlines():
                            digest, _, size = line.partition(" ")
                            survey.wanted[digest] = int(size)
                    elif path.suffix == ".copied":
                        survey.copied += int(path.read_text())
        return survey

    def _clean(self) -> None:
        survey = self._survey()
        oldest = self._now() - _FORGET_S
        for digest, entry in survey.partials.items():
            if digest not in survey.wanted and entry.changed < oldest:
                with suppress(OSError):
                    entry.path.unlink()


class Tree:
    """A model's directory in the cache.

    Args:
        cache: The cache.
        place: A directory of its own.
        name: The model's name.
    """

    def __init__(self, cache: ModelCache, place: Path, name: str) -> None:
        self._cache = cache
        self._place = place
        self._wanted = place.with_name(f"{place.name}.wanted")
        self._copied = 0
        self.directory = place / name

    def begin(self, directories: Iterable[str], files: Mapping[str, Blob]) -> list[str]:
        """Makes the directories, puts in what is there, and claims room for the rest.

        Args:
            directories: All directories below the model's own.
            files: All files, by their path.

        Returns:
            The paths of the files that are missing.

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
                cache._make_room({blob.digest: blob.size for blob in missing.values()})
                lines = {f"{blob.digest} {blob.size}\n" for blob in missing.values()}
                self._wanted.write_text("".join(lines))
            self._count()
        return list(missing)

    def finish(self, files: Mapping[str, Blob]) -> None:
        """Puts in what has been fetched since.

        Raises:
            FileNotFoundError: Some of it is not there.
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
        """Removes it; nothing of it may be in use."""
        shutil.rmtree(self._place, ignore_errors=True)
        for suffix in (".wanted", ".copied"):
            self._place.with_name(self._place.name + suffix).unlink(missing_ok=True)

    def _link(self, path: str, blob: Blob) -> None:
        self._copied += self._cache._link(blob, self.directory / path)

    def _count(self) -> None:
        """Says how much is copied: the originals may have to go for it."""
        if self._copied:
            self._place.with_name(f"{self._place.name}.copied").write_text(str(self._copied))
            self._cache._make_room({})
