"""Chooses the directories to watch for local repositories, and maps events to models.

All directories of a model are watched, including link targets and the directories that hold the links. A
directory is watched before it is listed: entries created later cause an event, earlier ones are in the
list.

Locks: `_lock` guards what the reader's thread shares. Threads: all methods but `take_changed` are for the
planner's thread.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conch_control.planner.watch_paths import Identity, WatchError, file_system, is_silent, resolve

if TYPE_CHECKING:
    from conch_control.planner.inotify import Directories

log = logging.getLogger(__name__)

_CACHES = "__pycache__"
_EVERYTHING = ""
"""Stands for all entries of a directory."""


@dataclass(frozen=True, slots=True)
class _Owner:
    """Owner of a watch on a directory entry.

    Attributes:
        kind: ``model``; ``link``, a link that may lead to a model; ``root``, a repository; ``way``, a link on
            the way to a repository.
        name: Model name, or location of the repository.
    """

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class ChangedModels:
    """Models that events concern."""

    names: frozenset[str] = frozenset()
    everything: bool = False

    def __bool__(self) -> bool:
        return self.everything or bool(self.names)


class Watcher:
    """Watches models' directories; logs repositories that can't be watched.

    Calls `notify` after events, on the reader's thread.
    """

    def __init__(
        self,
        locations: Collection[str],
        notify: Callable[[], None],
        file_system: Callable[[str], str] = file_system,
    ) -> None:
        self._notify = notify
        self._file_system = file_system
        self._locations = tuple(locations)
        self._unwatched: dict[str, str] = {}
        self._missing: set[str] = set()
        self._kinds: dict[int, str] = {}
        self._lock = threading.Lock()  # guards the next attributes
        self._names: set[str] = set()
        self._everything = False
        # Owners of a watched directory's entries, by name.
        self._places: dict[Identity, dict[str, set[_Owner]]] = {}
        self._spots: dict[_Owner, set[tuple[Identity, str]]] = {}
        self.directories: Directories | None = None
        for location in locations:
            if "://" in location:
                self._refuse(location, "object stores do not report changes")
        if len(self._unwatched) < len(self._locations):
            self.directories = self._open()

    @property
    def unwatched(self) -> bool:
        """True if some repositories must be polled."""
        return bool(self._unwatched or self._missing)

    def take_changed(self) -> ChangedModels:
        """Returns and clears the changes since the last call."""
        with self._lock:
            found = ChangedModels(frozenset(self._names), self._everything)
            self._names, self._everything = set(), False
        return found

    def cover_repositories(self) -> None:
        """Watches the repositories' directories and the links in them."""
        links: dict[_Owner, set[tuple[Identity, str]]] = {}
        for location in self._locations:
            if location in self._unwatched:
                continue
            spots = set(self._watch_hinges(location, _Owner("way", location), location))
            root = resolve(location).path
            identity = self._watch(root, _EVERYTHING, _Owner("root", location), location)
            if identity is None:
                self._missing.add(location)
            else:
                self._missing.discard(location)
                self._set(_Owner("root", location), {(identity, _EVERYTHING)})
                for owner, found in self._links(root, location):
                    links.setdefault(owner, set()).update(found)
            self._set(_Owner("way", location), spots)
        for owner in {owner for owner in self._spots if owner.kind == "link"} | links.keys():
            self._set(owner, links.get(owner, set()))

    def cover(self, name: str, directory: str) -> None:
        """Watches a model's directories."""
        location = os.path.dirname(directory)
        if self.directories is None or location not in self._locations or location in self._unwatched:
            return
        owner = _Owner("model", name)
        spots = set(self._watch_hinges(directory, owner, location))
        spots.update(self._tree(resolve(directory).path, owner, location, set()))
        self._set(owner, spots)

    def keep(self, names: Collection[str]) -> None:
        """Stops watching all other models."""
        for owner in [owner for owner in self._spots if owner.kind == "model" and owner.name not in names]:
            self._set(owner, set())

    def close(self, timeout_s: float) -> None:
        """Stops watching."""
        if self.directories is not None:
            self.directories.close(timeout_s)
            self.directories = None

    def _open(self) -> Directories | None:
        # Imported here: an unexpected watchdog version only means polling.
        try:
            from conch_control.planner.inotify import Directories

            return Directories(self._on_event, self._on_overflow)
        except (ImportError, WatchError) as error:
            self._refuse_all(str(error))
        return None

    def _links(self, root: str, location: str) -> Iterator[tuple[_Owner, set[tuple[Identity, str]]]]:
        """Watches the links of a repository, also dangling ones."""
        try:
            with os.scandir(root) as entries:
                links = [entry.name for entry in entries if entry.is_symlink()]
        except OSError:
            return
        for name in links:
            owner = _Owner("link", name)
            yield owner, set(self._watch_hinges(os.path.join(root, name), owner, location))

    def _watch_hinges(self, path: str, owner: _Owner, location: str) -> Iterator[tuple[Identity, str]]:
        for directory, name in resolve(path).hinges:
            identity = self._watch(directory, name, owner, location)
            if identity is not None:
                yield identity, name

    def _tree(
        self, directory: str, owner: _Owner, location: str, seen: set[Identity]
    ) -> Iterator[tuple[Identity, str]]:
        identity = self._watch(directory, _EVERYTHING, owner, location)
        if identity is None or identity in seen:
            return
        seen.add(identity)
        yield identity, _EVERYTHING
        try:
            with os.scandir(directory) as found:
                entries = list(found)
        except OSError:
            return
        for entry in entries:
            if entry.is_symlink():
                yield from self._watch_hinges(entry.path, owner, location)
                target = resolve(entry.path).path
                if os.path.isdir(target):
                    yield from self._tree(target, owner, location, seen)
                else:
                    parent, name = os.path.split(target)
                    at = self._watch(parent, name, owner, location)
                    if at is not None:
                        yield at, name
            elif entry.name != _CACHES and entry.is_dir(follow_symlinks=False):
                yield from self._tree(entry.path, owner, location, seen)

    def _watch(self, directory: str, name: str, owner: _Owner, location: str) -> Identity | None:
        """Watches one entry of a directory, or all, for an owner."""
        if self.directories is None:
            return None
        try:
            identity = self.directories.add(directory)
        except WatchError as error:
            self._refuse_all(str(error))
            return None
        if identity is None:
            return None
        kind = self._kind(directory, identity)
        # Changes in lower overlay layers cause no event; links on the way change only in the upper
        # layer.
        if is_silent(kind) and not (name and kind == "overlay"):
            self._refuse(location, f"'{directory}' is on a file system ({kind}) whose changes may go unseen")
        with self._lock:
            self._places.setdefault(identity, {}).setdefault(name, set()).add(owner)
        return identity

    def _kind(self, directory: str, identity: Identity) -> str:
        device = identity[0]
        if device not in self._kinds:
            self._kinds[device] = self._file_system(directory)
        return self._kinds[device]

    def _set(self, owner: _Owner, spots: set[tuple[Identity, str]]) -> None:
        """Replaces the watched entries of an owner."""
        stale = self._spots.get(owner, set()) - spots
        if spots:
            self._spots[owner] = spots
        else:
            self._spots.pop(owner, None)
        for identity, name in stale:
            with self._lock:
                owners = self._places.get(identity)
                if owners is None:
                    continue
                owners.get(name, set()).discard(owner)
                if not owners.get(name):
                    owners.pop(name, None)
                unused = not owners
                if unused:
                    del self._places[identity]
            if unused and self.directories is not None:
                self.directories.remove(identity)

    def _refuse(self, location: str, reason: str) -> None:
        if location not in self._unwatched:
            self._unwatched[location] = reason
            log.warning("model repository '%s' can't be watched, it is polled: %s", location, reason)

    def _refuse_all(self, reason: str) -> None:
        for location in self._locations:
            self._refuse(location, reason)

    def _on_event(self, identity: Identity, name: str) -> None:
        if name == _CACHES:
            return
        with self._lock:
            owners = self._places.get(identity)
            if owners is None:
                return
            concerned = set(owners.get(_EVERYTHING, ()))
            if name == _EVERYTHING:
                concerned.update(*owners.values())
            else:
                concerned.update(owners.get(name, ()))
            for owner in concerned:
                if owner.kind in ("model", "link"):
                    self._names.add(owner.name)
                elif owner.kind == "root" and name != _EVERYTHING:
                    self._names.add(name)
                else:
                    self._everything = True
            touched = bool(concerned)
        if touched:
            self._notify()

    def _on_overflow(self) -> None:
        with self._lock:
            self._everything = True
        self._notify()
