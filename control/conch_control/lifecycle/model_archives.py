"""Unpacked archives that are registered as repositories while the server runs, each for one model.

An archive is the directory of one model, bare model files, or a repository with one model or one ensemble
and its parts. It may be another tenant's than the next one, so its links may not lead out of it. Its model
gets a given name (Triton's name mapping); with namespaces, parts of different archives may share names.
Implements `conch.core.model_control.ArchiveControl`.

Owns: the registered archives. Locks: `_lock` guards them, never held while loading.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from conch.core.errors import InvalidArgumentError, OutOfRangeError
from conch.core.model_control import LoadParameter, ModelControl
from conch.core.registry import Entry, Registry
from conch.core.spec import identifier
from conch_control.control_options import ControlOptions
from conch_control.events import EventLog
from conch_control.lifecycle.version_states import VersionStates
from conch_control.repository.dependency_graph import read_composing_models
from conch_control.repository.directory_layout import LayoutKind, find_layout
from conch_control.repository.local import LocalRepository
from conch_control.repository.mounted_repository import RenamedModel, single_model
from conch_control.repository.repositories import Repositories
from conch_control.repository.source import ModelSource

_CLEAN_UP_S = 30.0
_IN_MEMORY = frozenset({"READY", "LOADING", "UNLOADING"})


@dataclass(frozen=True, slots=True)
class _Archive:
    """The models of a directory at its registration; a `Repository`."""

    location: str
    sources: Mapping[str, ModelSource]
    self_managed: bool = True

    def check(self) -> None:
        """Returns at once: the models were read when the archive was registered."""

    def models(self) -> Mapping[str, ModelSource]:
        """The models."""
        return self.sources

    def close(self) -> None:
        """Returns at once: an archive holds nothing open."""


class ModelArchives:
    """The archives of one server; thread-safe."""

    def __init__(
        self,
        agent: ModelControl,
        repositories: Repositories,
        registry: Registry,
        states: VersionStates,
        events: EventLog,
        options: ControlOptions,
    ) -> None:
        self._agent = agent
        self._repositories = repositories
        self._registry = registry
        self._states = states
        self._events = events
        self._options = options
        self._lock = threading.Lock()
        self._archives: dict[str, _Archive] = {}  # by identifier of the model

    def register(self, name: str, directory: Path, main: str = "") -> str:
        """Registers an archive and loads its model; returns the identifier of the model.

        Args:
            name: Name for the model.
            directory: The unpacked archive.
            main: Directory of the model, where several could be meant.

        Raises:
            AlreadyExistsError: The directory is registered.
            InvalidArgumentError: It does not hold one model or one ensemble.
            ConchError: The model can't be loaded; nothing stays registered.
        """
        try:
            sources = archive_models(directory, name, main, self._options)
        except OSError as error:
            raise InvalidArgumentError(f"'{directory}' can't be read: {error.strerror}") from None
        archive = _Archive(str(directory), sources)
        model = self._identifier(archive, name)
        self._repositories.add(archive)
        with self._lock:
            self._archives[model] = archive
        if self._options.namespacing:
            self._registry.add_namespaces(archive.location)
        nothing: Mapping[str, LoadParameter] = {}
        with ExitStack() as undo:
            undo.callback(self.unregister, model, _CLEAN_UP_S)  # parts of an ensemble may be loaded
            self._agent.load(model, nothing)
            undo.pop_all()
        return model

    def unregister(self, model: str, timeout_s: float) -> bool:
        """Unloads the models of an archive and waits until they have left memory.

        Args:
            model: Identifier of the model; an unknown one is ignored.
            timeout_s: Time to wait for requests in flight.

        Returns:
            True if all have left memory in time.
        """
        archive = self._archives.get(model)
        if archive is None:
            return True
        names = [model, *(self._identifier(archive, each) for each in archive.sources)]
        for name in dict.fromkeys(names):
            self._agent.unload(name, True)
        gone = self._wait_gone(names, timeout_s)
        self._remove(model, archive)
        return gone

    def _identifier(self, archive: _Archive, name: str) -> str:
        return identifier(archive.location, name) if self._options.namespacing else name

    def _wait_gone(self, names: Collection[str], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while True:
            revision = self._events.revision  # before the look: a later change ends the wait
            if not any(self._in_memory(name) for name in names):
                return True
            left = deadline - time.monotonic()
            if left <= 0 or self._events.closed:
                return False
            with suppress(OutOfRangeError):  # more events than the log keeps: look again
                self._events.after(revision, left)

    def _in_memory(self, name: str) -> bool:
        entry = self._registry.entries.get(name, Entry())
        return any(state.state in _IN_MEMORY for state in entry.states.values())

    def _remove(self, model: str, archive: _Archive) -> None:
        self._repositories.remove(archive.location)
        for name in archive.sources:
            self._states.forget(self._identifier(archive, name))
        with self._lock:
            self._archives.pop(model, None)
        self._registry.remove_namespace(archive.location)


def _check_entries(directory: Path) -> None:
    """Raises InvalidArgumentError: a link leads out of an archive, or an entry is no file."""
    root = directory.resolve()
    for folder, folders, files in os.walk(root):
        for path in (Path(folder, name) for name in (*folders, *files)):
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                problem = "is a link that leads out of it"
            elif path.is_dir() or path.is_file() or path.is_symlink():
                continue
            else:
                problem = "is neither a file nor a directory"
            raise InvalidArgumentError(f"'{directory}' can't be served: '{path.relative_to(root)}' {problem}")


def archive_models(
    directory: Path, name: str, main: str, options: ControlOptions
) -> Mapping[str, ModelSource]:
    """The models of an unpacked archive, its own one under the given name.

    Raises:
        InvalidArgumentError: It does not hold one model or one ensemble.
        OSError: It can't be read.
    """
    _check_entries(directory)
    layout = find_layout(directory)
    if layout.kind is not LayoutKind.REPOSITORY:
        return {name: single_model(layout, name)}
    sources = dict(LocalRepository(directory).models())
    parts = {each: read_composing_models(source, options) for each, source in sources.items()}
    if main not in sources:
        used = {part for each in parts.values() for part in each}
        ensembles = [each for each in sources if parts[each] and each not in used]
        candidates = list(sources) if len(sources) == 1 else ensembles
        if len(candidates) != 1:
            raise InvalidArgumentError(
                f"'{directory}' has the models {', '.join(sorted(sources))}, and which one is meant can't be "
                f"told: an archive has one model, or one ensemble and its parts"
            )
        (main,) = candidates
    del sources[main]
    if name in sources:
        raise InvalidArgumentError(f"'{directory}' has a part '{name}', and '{main}' is to get that name")
    return {name: RenamedModel(directory / main, name), **sources}
