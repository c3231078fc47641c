"""Registry: model name and version to the version that serves it; error texts are Triton's.

With namespaces, entries are keyed by identifiers (`ModelSpec.identifier`), and a name resolves to the only
ready model of that name.

Owns: the published entries and the draining versions.
Threads and locks: readers take no lock, as all mappings are replaced, never changed; writers take one lock.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from conch.core.cold_models import ColdModels
from conch.core.errors import InvalidArgumentError, NotFoundError, UnavailableError
from conch.core.servable import Servable

_LARGEST_VERSION = 2**63 - 1
_MOST_DIGITS = 30
_MOST_SHOWN = 100


@dataclass(frozen=True, slots=True)
class VersionState:
    """State of one version as the repository index shows it.

    Attributes:
        state: ``READY``, ``UNAVAILABLE``, ``LOADING``, ``UNLOADING`` or ``UNKNOWN``.
        reason: Why it is not ready, or empty.
    """

    state: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """The versions of one model name or identifier.

    Attributes:
        ready: Versions that serve requests.
        states: State of every version that was ever loaded or attempted.
        lacking: Whether the model was to be loaded and has no version to load.
    """

    ready: Mapping[int, Servable] = field(default_factory=dict)
    states: Mapping[int, VersionState] = field(default_factory=dict)
    lacking: bool = False

    @property
    def latest(self) -> Servable | None:
        """The highest ready version."""
        return self.ready[max(self.ready)] if self.ready else None


def parse_version(text: str) -> int:
    """Parses the version of a request; -1, for an empty text, means the newest ready one.

    Raises:
        InvalidArgumentError: The text is not a positive integer.
    """
    if not text:
        return -1
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > _MOST_DIGITS:
        raise _not_a_version(text)
    version = sign * int(digits)
    if version > _LARGEST_VERSION:
        raise _not_a_version(text)
    if version < 0:
        raise InvalidArgumentError(
            f"invalid model version specified '{text}' , version should be an integral value > 0"
        )
    return version


def _not_a_version(text: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"failed to get model version from specified version string '{text[:_MOST_SHOWN]}' (details: stol), "
        f"version should be an integral value > 0"
    )


class Registry:
    """The models of a server.

    Attributes:
        namespaces: The possible namespaces of models; empty if names are unique.
        draining: By identifier, versions that are being replaced or unloaded and may have live sequences,
            oldest first.
        cold: Asked before a model without a version that serves is refused; None if all are in memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.cold: ColdModels | None = None
        self.namespaces: tuple[str, ...] = ()
        self.draining: Mapping[str, tuple[Servable, ...]] = MappingProxyType({})
        self._entries: Mapping[str, Entry] = MappingProxyType({})
        self._latest: dict[str, Servable] = {}

    @property
    def entries(self) -> Mapping[str, Entry]:
        """All entries by identifier, as an immutable mapping."""
        return self._entries

    def publish(self, name: str, entry: Entry) -> None:
        """Replaces the entry of an identifier, for all later requests."""
        with self._lock:
            self._entries = MappingProxyType({**self._entries, name: entry})
            latest = entry.latest
            if latest is None:
                self._latest.pop(name, None)
            else:
                self._latest[name] = latest
            self._rename(name)

    def remove(self, name: str) -> None:
        """Removes an identifier."""
        with self._lock:
            self._latest.pop(name, None)
            self._entries = MappingProxyType(
                {key: entry for key, entry in self._entries.items() if key != name}
            )
            self._rename(name)

    def name_of(self, identifier: str) -> str:
        """The client-visible name of an identifier."""
        return self.name_and_namespace(identifier)[0]

    def name_and_namespace(self, identifier: str) -> tuple[str, str]:
        """The client-visible name of an identifier, and its namespace or an empty text."""
        for namespace in self.namespaces:
            if identifier.startswith(f"{namespace}::"):
                return identifier[len(namespace) + 2 :], namespace
        return identifier, ""

    def identifiers(self, name: str) -> list[str]:
        """The published identifiers of a name, which may be an identifier itself."""
        known = self._entries
        if name in known or not self.namespaces:
            return [name] if name in known else []
        found = (f"{namespace}::{name}" for namespace in self.namespaces)
        return [identifier for identifier in found if identifier in known]

    def find(self, name: str) -> tuple[str, Entry]:
        """The identifier and the entry of a client-visible name.

        Raises:
            InvalidArgumentError: Several models of that name are ready.
            NotFoundError: There is none, or none that is ready.
        """
        entry = self._entries.get(name)
        if entry is not None:
            return name, entry
        known = self.identifiers(name)
        if not known:
            self._miss(name)
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        ready = [identifier for identifier in known if self._entries[identifier].ready]
        if len(ready) > 1:
            raise InvalidArgumentError(
                f"There are {len(ready)} identifiers of model '{name}' in global map, model namespace must "
                f"be provided to resolve ambiguity."
            )
        if not ready:
            raise NotFoundError(f"Identifier of model '{name}' is not found in global map")
        return ready[0], self._entries[ready[0]]

    def _miss(self, name: str) -> None:
        """Raises ColdModelError if a name without a version that serves is that of a model to be loaded."""
        if self.cold is not None:
            self.cold.missed(name)

    def _rename(self, identifier: str) -> None:
        """Points the name of an identifier to its only ready model; called with the lock held."""
        name = self.name_of(identifier)
        if name != identifier:
            ready = [self._latest[each] for each in self.identifiers(name) if each in self._latest]
            if len(ready) == 1:
                self._latest[name] = ready[0]
            else:
                self._latest.pop(name, None)

    def begin_draining(self, name: str, model: Servable) -> None:
        """Keeps a version resolvable for its live sequences; called before its successor is published."""
        with self._lock:
            models = (*self.draining.get(name, ()), model)
            self.draining = MappingProxyType({**self.draining, name: models})

    def draining_of(self, name: str) -> tuple[Servable, ...]:
        """The draining versions of a name or identifier."""
        found = self.draining.get(name, ())
        if found or not self.namespaces:
            return found
        each = (self.draining.get(f"{namespace}::{name}", ()) for namespace in self.namespaces)
        return tuple(model for models in each for model in models)

    def end_draining(self, name: str, model: Servable) -> None:
        """Removes a draining version, if it is there."""
        with self._lock:
            draining = dict(self.draining)
            draining[name] = tuple(each for each in draining.get(name, ()) if each is not model)
            if not draining[name]:
                del draining[name]
            self.draining = MappingProxyType(draining)

    def resolve(self, name: str, version: str = "") -> Servable:
        """The version that serves a name and version text, which is empty for the newest ready one.

        Raises:
            InvalidArgumentError: The version is not a number.
            NotFoundError: The name, or that version of it, is unknown, or has no ready version.
            UnavailableError: The version is known but not ready.
            ColdModelError: The model is not in memory, and can be loaded.
        """
        if not version:
            model = self._latest.get(name)
            if model is not None:
                return model
        number = parse_version(version)
        _, entry = self.find(name)
        if number < 0:
            model = entry.latest
            if model is None:
                self._miss(name)
                raise NotFoundError(f"Request for unknown model: '{name}' has no available versions")
            return model
        model = entry.ready.get(number)
        if model is not None:
            return model
        if not entry.ready:
            self._miss(name)
        if number in entry.states:
            raise UnavailableError(
                f"Request for unknown model: '{name}' version {number} is not at ready state"
            )
        raise NotFoundError(f"Request for unknown model: '{name}' version {number} is not found")
