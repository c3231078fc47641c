"""What is said of every model version: the one place where states change.

A change is checked against the life of a version, published in the registry as Triton's protocol shows it,
and logged as events, in this order and under one lock. So whoever reads an event finds the registry changed,
and a snapshot holds exactly what the events up to its revision say.

An event of version 0 is about a model as a whole: ``FAILED`` says why it never came to loading a version,
``UNLOADED`` that this is no longer so. How far staging is changes without events.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from conch.core.registry import Entry, Registry, VersionState
from conch.core.servable import Servable
from conch_control.events import EventLog
from conch_control.lifecycle.version_phase import Phase
from conch_control.port import VersionStatus

UNLOADED = "unloaded"
"""Reason of a version that is not loaded because nobody wants it to be."""
FORGOTTEN = "no longer selected"
"""Reason of a version that is not among those to load any more; Triton's index does not show it."""

UNFINISHED = frozenset({Phase.STAGING, Phase.LOADING, Phase.WARMING})
"""Phases of a version that is on its way to being ready."""

_FETCHED = frozenset({Phase.STAGING, Phase.READY})
_WHOLE = 0
_LOADING_STATE = VersionState("LOADING")
_STATES: Mapping[Phase, VersionState] = {
    Phase.STAGING: _LOADING_STATE,
    Phase.LOADING: _LOADING_STATE,
    Phase.WARMING: _LOADING_STATE,
    Phase.READY: VersionState("READY"),
    Phase.DRAINING: VersionState("UNLOADING"),
    Phase.UNLOADED: VersionState("UNAVAILABLE", UNLOADED),
}

Statuses = Mapping[int, VersionStatus]


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of a version.

    Attributes:
        phase: What it is in from now on.
        reason: Why, where there is something to say.
        host_bytes: By how much the process has grown for it; None if nobody knows.
    """

    phase: Phase
    reason: str = ""
    host_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that is known at one moment.

    Attributes:
        revision: The last event that it has taken in.
        versions: The versions of each model that were ever attempted.
        failures: Why models as a whole could not be loaded.
    """

    revision: int
    versions: Mapping[str, Statuses]
    failures: Mapping[str, str]


class Book:
    """The states of all model versions of one server; any thread may read or change them.

    Args:
        registry: Where models are published; nobody else publishes there.
        events: Where changes are logged; nobody else logs there.
    """

    def __init__(self, registry: Registry, events: EventLog) -> None:
        self._registry = registry
        self._events = events
        self._lock = threading.RLock()
        self._versions: dict[str, Statuses] = {}
        self._failures: dict[str, str] = {}
        self._known: set[str] = set()  # models that are published even if they have no versions

    def versions(self, name: str) -> Statuses:
        """The versions of a model that were ever attempted."""
        return self._versions.get(name, {})

    @property
    def failures(self) -> Mapping[str, str]:
        """Why models as a whole could not be loaded, by name."""
        with self._lock:
            return dict(self._failures)

    def snapshot(self) -> Snapshot:
        """All that is known now."""
        with self._lock:
            return Snapshot(self._events.revision, dict(self._versions), dict(self._failures))

    def change(
        self, name: str, changes: Mapping[int, Change], ready: Mapping[int, Servable] | None = None
    ) -> Statuses:
        """Changes the states of versions of one model, all at once.

        Args:
            name: Model name.
            changes: What becomes of each of them.
            ready: All versions that take requests from now on; None if they are those that did.

        Returns:
            The versions as they are now.

        Raises:
            ValueError: A version can't become that, or those that are ready are not those that take requests.
        """
        with self._lock:
            before = self._versions.get(name, {})
            if not changes and ready is None:
                return before
            after = dict(before)
            for version, change in sorted(changes.items()):
                after[version] = self._changed(name, version, before.get(version), change)
            published = self._registry.entries.get(name, Entry()).ready if ready is None else ready
            said = {version for version, status in after.items() if status.phase is Phase.READY}
            if said != set(published):
                raise ValueError(
                    f"model '{name}': versions {sorted(said)} are said to be ready, {sorted(published)} are"
                )
            self._versions[name] = after
            self._publish(name, after, published)
            # What serves from now on first: no reader is to see a model without a version in between.
            for version in sorted(changes, key=lambda each: (after[each].phase is not Phase.READY, each)):
                status = after[version]
                self._events.append(name, version, status.phase, status.reason)
            return after

    def end(self, name: str, phases: Iterable[Phase], change: Change) -> None:
        """Has all versions of a model that are in some phases become something."""
        among = frozenset(phases)
        with self._lock:
            ended = {version: change for version, each in self.versions(name).items() if each.phase in among}
            if ended:
                self.change(name, ended)

    def known(self, name: str) -> None:
        """Publishes a model, possibly without versions: requests then fail with Triton's text for that."""
        with self._lock:
            self._known.add(name)
            if name not in self._registry.entries:
                self._registry.publish(name, Entry())

    def drained(self, name: str, status: VersionStatus) -> None:
        """Says that a version which was draining is gone, unless something else has become of it since."""
        with self._lock:
            # By identity: an equal status may belong to a later unload of the same version.
            if self.versions(name).get(status.version) is status:
                self.change(name, {status.version: Change(Phase.UNLOADED, UNLOADED)})

    def fetched(self, name: str, versions: Iterable[int], done: int, total: int) -> None:
        """Says how much of the files of versions is there; of their successors', where they serve."""
        with self._lock:
            if name not in self._versions:
                return
            statuses = dict(self.versions(name))
            for version in versions:
                # Not those that drain: `drained` knows them by identity.
                if version in statuses and statuses[version].phase in _FETCHED:
                    statuses[version] = replace(statuses[version], done_bytes=done, total_bytes=total)
            self._versions[name] = statuses

    def failed(self, name: str, reason: str) -> None:
        """Says why a model as a whole could not be loaded."""
        with self._lock:
            if self._failures.get(name) != reason:
                self._failures[name] = reason
                self._events.append(name, _WHOLE, Phase.FAILED, reason)

    def settled(self, name: str) -> None:
        """Says that nothing is wrong with a model as a whole any more."""
        with self._lock:
            if self._failures.pop(name, None) is not None:
                self._events.append(name, _WHOLE, Phase.UNLOADED)

    def _changed(
        self, name: str, version: int, before: VersionStatus | None, change: Change
    ) -> VersionStatus:
        if before is not None and not before.phase.may_become(change.phase):
            raise ValueError(
                f"model '{name}' version {version} is {before.phase.value} and can't become "
                f"{change.phase.value}"
            )
        host_bytes = change.host_bytes
        if change.phase is Phase.DRAINING and before is not None:
            host_bytes = before.host_bytes  # it is still there
        return VersionStatus(version, change.phase, change.reason, self._events.now(), host_bytes)

    def _publish(self, name: str, statuses: Statuses, ready: Mapping[int, Servable]) -> None:
        states = {version: _state(status) for version, status in statuses.items() if _shown(status)}
        if states or name in self._known:
            self._registry.publish(name, Entry(dict(ready), states))
        else:
            self._registry.remove(name)


def _shown(status: VersionStatus) -> bool:
    return status.phase is not Phase.UNLOADED or status.reason != FORGOTTEN


def _state(status: VersionStatus) -> VersionState:
    if status.phase is Phase.FAILED or (status.phase is Phase.READY and status.reason):
        return VersionState(status.phase.index_state, status.reason)
    return _STATES[status.phase]
