"""Caches unpacked and built environments on disk, for later loads and servers.

An entry is a folder named by its key, with the environment in ``env``, and a lock file beside it. A record,
written last, marks the environment as complete. Environments are made in place, because scripts and venvs
contain absolute paths. The maker and its children hold the lock exclusively, so an incomplete environment is
never visible; an entry without a record is made anew.

Owns: the directory. Threads and locks: any thread and process; a `FileLock` per entry.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch.core.model_control import LoadCancelled, never
from conch_environments.locks import FileLock

log = logging.getLogger(__name__)

DIRECTORY = "environment-cache"
LIMIT = "environment-cache-mb"
_DEFAULT_MB = 10 * 1024
_MIB = 1024 * 1024
_RECORD = "complete.json"
_LOCK = ".lock"
_MOST_LOST = 3
"""Tries until an entry that is in use but has no record counts as damaged."""
_UNUSED = "has not been used for longest and is removed"

Make = Callable[[Path, int], Mapping[str, str]]
"""Makes an environment in an empty folder; returns facts for the record.

The number is the lock's descriptor, which the tools inherit: the folder stays locked while one of them lives.
"""


@dataclass(frozen=True, slots=True)
class Kept:
    """An entry in use, with its record; `release` ends the use."""

    folder: Path
    facts: Mapping[str, str]
    release: Callable[[], None]


@dataclass(frozen=True, slots=True)
class EnvironmentCache:
    """A directory of environments.

    Attributes:
        directory: Their directory; created with the first one.
        limit_mb: Total size in MiB that remains when an entry is added; entries in use always stay.
    """

    directory: Path
    limit_mb: int = _DEFAULT_MB

    @classmethod
    def of(cls, options: Mapping[str, str]) -> EnvironmentCache:
        """The cache of the backend's options, otherwise the one in the user's cache directory.

        Raises:
            ConchError: An option is invalid, or there is no home directory.
        """
        check_options(options)
        given = options.get(DIRECTORY)
        return cls(
            _user_cache() if given is None else Path(given).absolute(), int(options.get(LIMIT, _DEFAULT_MB))
        )

    def find_or_make(self, key: str, make: Make, label: str, stopped: LoadCancelled = never) -> Kept:
        """Finds or makes an environment. An error of `make` leaves no entry.

        `stopped` is polled while another process or thread makes it.

        Raises:
            ConchError: It could not be made, or the load was stopped.
        """
        folder, lock_file = self.directory / key, self.directory / f"{key}{_LOCK}"

        def missing() -> bool:
            # Evaluated for each try: another process may have made it meanwhile.
            return _facts(folder) is None

        def on_wait() -> None:
            log.info("%s: waits for another load or server that is making it", label)

        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lost = 0
            while True:
                lock = FileLock.wait(lock_file, missing, stopped, on_wait)
                shared = not lock.exclusive
                with ExitStack() as undo:
                    undo.callback(lock.close)
                    if lock.exclusive and missing():
                        _make(folder, lock, make)
                        self._prune(key)
                    # Another process may have pruned or cleared it just now.
                    kept = _use(folder, lock) if not lock.exclusive or lock.share() else None
                    if kept is not None:
                        undo.pop_all()
                        return kept
                lost += shared
                if lost == _MOST_LOST:
                    log.warning(
                        "%s: the record of '%s' is gone, but it is in use; another one is made beside it",
                        label,
                        folder,
                    )
                    return self.find_or_make(_next_key(key), make, label, stopped)
        except OSError as error:
            raise UnavailableError(
                f"{label}: the cache of environments '{self.directory}' can't be used: {error}; "
                f"--backend-config=python,{DIRECTORY}=DIR names another directory"
            ) from error

    def _prune(self, made: str) -> None:
        """Removes the least recently used entries beyond the limit."""
        entries = sorted(self._entries(), key=lambda entry: entry[0], reverse=True)
        left = self.limit_mb * _MIB
        for _, key, size in entries:
            if key == made:
                left -= size
        for used_ns, key, size in entries:
            if key == made:
                continue
            left -= size
            # An entry without a record is the rest of a crash.
            if left < 0 or used_ns == 0:
                left += size if self.remove(key, _UNUSED) else 0

    def _entries(self) -> Iterator[tuple[int, str, int]]:
        """Yields time of last use (0 if incomplete), key and size in bytes."""
        for path in self.directory.iterdir():
            if path.suffix == _LOCK and (path.with_suffix("")).is_dir():
                record = path.with_suffix("") / _RECORD
                try:
                    yield record.stat().st_mtime_ns, path.stem, int(json.loads(record.read_text())["bytes"])
                except (OSError, ValueError, KeyError):
                    yield 0, path.stem, 0

    def remove(self, key: str, why: str) -> bool:
        """Removes an entry unless it is in use or being made; `why` goes to the log."""
        try:
            lock = FileLock.try_exclusive(self.directory / f"{key}{_LOCK}")
            if lock is None:
                return False
            with lock:
                log.info("the environment '%s' %s", key, why)
                clear(self.directory / key)
                lock.remove()
        except OSError as error:
            log.warning("can't remove the environment '%s': %s", self.directory / key, error)
            return False
        return True


def check_options(options: Mapping[str, str]) -> None:
    """Checks the backend's options of the cache. Raises InvalidArgumentError: one is malformed."""
    limit = options.get(LIMIT, str(_DEFAULT_MB))
    if not (limit.isascii() and limit.isdecimal()):
        raise InvalidArgumentError(
            f"--backend-config=python,{LIMIT} must be a whole number of MiB, not '{limit}'"
        )
    if options.get(DIRECTORY) == "":
        raise InvalidArgumentError(f"--backend-config=python,{DIRECTORY} must name a directory")


def _next_key(key: str) -> str:
    """Next key for the same contents: ``x~2`` for ``x``, ``x~3`` for ``x~2``."""
    first, _, number = key.partition("~")
    return f"{first}~{int(number or 1) + 1}"


def clear(folder: Path) -> None:
    """Removes a folder, even a read-only one; its record first."""
    (folder / _RECORD).unlink(missing_ok=True)
    if not folder.is_dir():
        return
    for parent, _, _ in os.walk(folder):
        if not os.lstat(parent).st_mode & stat.S_IWUSR:
            os.chmod(parent, 0o700)
    shutil.rmtree(folder)


def _make(folder: Path, lock: FileLock, make: Make) -> None:
    clear(folder)
    folder.mkdir(mode=0o700)
    with ExitStack() as undo:
        undo.callback(lock.remove)
        undo.callback(clear, folder)
        facts = make(folder, lock.descriptor)
        record = {**facts, "bytes": str(_size(folder))}
        unfinished = folder / f"{_RECORD}.new"
        unfinished.write_text(json.dumps(record, indent=1))
        # No fsync, which can take minutes; pip and uv do none either. After a power loss a record may vouch
        # for files that were lost.
        unfinished.rename(folder / _RECORD)
        undo.pop_all()


def _use(folder: Path, lock: FileLock) -> Kept | None:
    """The entry of a folder whose lock is held; None if incomplete."""
    facts = _facts(folder)
    if facts is None:
        return None
    try:
        os.utime(folder / _RECORD)  # last use
    except OSError:
        pass  # a read-only cache is not pruned
    return Kept(folder, facts, lock.close)


def _facts(folder: Path) -> Mapping[str, str] | None:
    """The record of a folder; None if missing or malformed."""
    try:
        facts = json.loads((folder / _RECORD).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def _size(folder: Path) -> int:
    """Size of its files, hard links counted once."""
    seen: set[tuple[int, int]] = set()
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            status = os.lstat(os.path.join(parent, name))
            identity = (status.st_dev, status.st_ino)
            if status.st_nlink == 1 or identity not in seen:
                seen.add(identity)
                size += status.st_size
    return size


def _user_cache() -> Path:
    # The XDG base directory specification says to ignore a relative path.
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(base):
        raise UnavailableError(
            f"there is no home directory to keep environments in; --backend-config=python,{DIRECTORY}=DIR "
            f"names a directory"
        )
    return Path(base) / "conch" / "environments"
