"""Environments that were unpacked or built, kept on disk for the next load and the next server.

An entry is a folder named by what the environment is made from, with the environment in ``env``, and beside
the folder a lock file. A record in the folder, written last, says that the environment is whole. It is made
where it stays, and not renamed into place: scripts, ``conda-unpack`` and venvs write their own absolute path
into their files. The maker and its child processes hold the lock exclusively, so an incomplete environment is
never visible; what a crash leaves behind has no record and is made anew.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch.core.model_control import LoadCancelled, never
from conch.workers.environments.locks import FileLock

log = logging.getLogger(__name__)

DIRECTORY = "environment-cache"
LIMIT = "environment-cache-mb"
_DEFAULT_MB = 10 * 1024
_MIB = 1024 * 1024
_RECORD = "complete.json"
_LOCK = ".lock"
_MOST_LOST = 3
"""How often one without a record is found in use until that is no moment in the life of another one."""
_UNUSED = "has not been used for longest and is removed"

Make = Callable[[Path, int], Mapping[str, str]]
"""Makes an environment in an empty folder, and says what is worth keeping about it.

The number is the lock's descriptor, inherited by the processes that make the environment: the folder stays
locked while one of them lives.
"""


@dataclass(frozen=True, slots=True)
class Kept:
    """An environment in the cache, in use until it is released.

    Attributes:
        folder: The folder of the entry.
        facts: What was said about it when it was made.
        release: Gives it up.
    """

    folder: Path
    facts: Mapping[str, str]
    release: Callable[[], None]


@dataclass(frozen=True, slots=True)
class EnvironmentCache:
    """A directory of environments.

    Attributes:
        directory: Where they are; made when the first one is.
        limit_mb: How much of them is kept when a new one comes, in MiB; what is in use stays in any case.
    """

    directory: Path
    limit_mb: int = _DEFAULT_MB

    @classmethod
    def of(cls, options: Mapping[str, str]) -> EnvironmentCache:
        """The cache that the options of the backend say, else the one in the user's cache directory.

        Raises:
            ConchError: An option can't be used, or there is neither an option nor a home directory.
        """
        limit = options.get(LIMIT, str(_DEFAULT_MB))
        if not (limit.isascii() and limit.isdecimal()):
            raise InvalidArgumentError(
                f"--backend-config=python,{LIMIT} must be a whole number of MiB, not '{limit}'"
            )
        given = options.get(DIRECTORY)
        if given is None:
            return cls(_user_cache(), int(limit))
        if not given:
            raise InvalidArgumentError(f"--backend-config=python,{DIRECTORY} must name a directory")
        return cls(Path(given).absolute(), int(limit))

    def obtain(self, key: str, make: Make, label: str, stopped: LoadCancelled = never) -> Kept:
        """An environment, made if it is not there.

        Args:
            key: What it is made from, as a name for a file.
            make: Makes it; what it raises is raised here, and nothing is kept.
            label: What it is, for messages.
            stopped: Asked while another process or thread makes it.

        Raises:
            ConchError: It could not be made, or it was stopped.
        """
        folder, lock_file = self.directory / key, self.directory / f"{key}{_LOCK}"

        def missing() -> bool:
            # Asked for each try: another one may have made it meanwhile, and be using it from then on.
            return _facts(folder) is None

        def waits() -> None:
            log.info("%s: waits for another load or server that is making it", label)

        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lost = 0
            while True:
                lock = FileLock.wait(lock_file, missing, stopped, waits)
                shared = not lock.exclusive
                try:
                    if lock.exclusive and missing():
                        _make(folder, lock, make)
                        self._prune(key)
                    # Another process may have pruned it just now, or cleared it away while it was in use.
                    kept = _use(folder, lock) if not lock.exclusive or lock.share() else None
                except BaseException:
                    lock.close()
                    raise
                if kept is not None:
                    return kept
                lock.close()
                lost += shared
                if lost == _MOST_LOST:
                    log.warning(
                        "%s: the record of '%s' is gone, but it is in use; another one is made beside it",
                        label,
                        folder,
                    )
                    return self.obtain(_beside(key), make, label, stopped)
        except OSError as error:
            raise UnavailableError(
                f"{label}: the cache of environments '{self.directory}' can't be used: {error}; "
                f"--backend-config=python,{DIRECTORY}=DIR names another directory"
            ) from error

    def _prune(self, made: str) -> None:
        """Removes what has not been used for longest, until the rest is within the limit."""
        entries = sorted(self._entries(), key=lambda entry: entry[0], reverse=True)
        left = self.limit_mb * _MIB
        for _, key, size in entries:
            if key == made:
                left -= size
        for used_ns, key, size in entries:
            if key == made:
                continue
            left -= size
            # Without a record it is what a crash has left behind.
            if left < 0 or used_ns == 0:
                left += size if self.remove(key, _UNUSED) else 0

    def _entries(self) -> Iterator[tuple[int, str, int]]:
        """When each one was used last, 0 for those that are not whole; its key and its size."""
        for path in self.directory.iterdir():
            if path.suffix == _LOCK and (path.with_suffix("")).is_dir():
                record = path.with_suffix("") / _RECORD
                try:
                    yield record.stat().st_mtime_ns, path.stem, int(json.loads(record.read_text())["bytes"])
                except (OSError, ValueError, KeyError):
                    yield 0, path.stem, 0

    def remove(self, key: str, why: str) -> bool:
        """Removes an entry unless it is in use or being made.

        Args:
            key: Its key, or the name of its folder.
            why: The reason, for the log.
        """
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


def _beside(key: str) -> str:
    """The key of the next one of the same contents: ``x~2`` for ``x``, and ``x~3`` for that."""
    first, _, number = key.partition("~")
    return f"{first}~{int(number or 1) + 1}"


def clear(folder: Path) -> None:
    """Removes a folder, also one in which nothing may be written; its record first."""
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
    try:
        facts = make(folder, lock.descriptor)
        record = {**facts, "bytes": str(_size(folder))}
        unfinished = folder / f"{_RECORD}.new"
        unfinished.write_text(json.dumps(record, indent=1))
        # Nothing is synced to disk: that takes minutes where others write, and as pip and uv do not either, a
        # loss of power soon afterwards is the one accident after which a record may vouch for too much.
        unfinished.rename(folder / _RECORD)
    except BaseException:
        clear(folder)
        lock.remove()
        raise


def _use(folder: Path, lock: FileLock) -> Kept | None:
    """The environment of a folder whose lock is held, if it is whole."""
    facts = _facts(folder)
    if facts is None:
        return None
    try:
        os.utime(folder / _RECORD)  # used now
    except OSError:
        pass  # a cache that may only be read is not pruned either
    return Kept(folder, facts, lock.close)


def _facts(folder: Path) -> Mapping[str, str] | None:
    """What the record of a folder says; None if there is none that can be read."""
    try:
        facts = json.loads((folder / _RECORD).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def _size(folder: Path) -> int:
    """What its files take, those with several names once."""
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
    # As the XDG base directory specification has it: a relative path there is to be ignored.
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(base):
        raise UnavailableError(
            f"there is no home directory to keep environments in; --backend-config=python,{DIRECTORY}=DIR "
            f"names a directory"
        )
    return Path(base) / "conch" / "environments"
