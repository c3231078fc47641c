"""Version state machine; publishes to the registry and the event log.

The only writer of version states. `change` does three steps under one lock: check the transitions
(`version_phase`), publish the registry entry, append the events.

Guarantees: the reader of an event finds the registry already updated; a snapshot equals the replay of all
events up to its revision, without the models that `forget` has dropped. Events of version 0 concern the whole
model: ``FAILED`` (no version could be attempted) and ``UNLOADED`` (that failure is over). Staging progress
changes without events.

Owns: statuses and model failures. Locks: `_lock` (re-entrant), taken inside the load queue's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from conch.core.registry import UNLOADED, Entry, Registry, VersionState
from conch.core.rollouts import RolloutTransition
from conch.core.servable import Servable
from conch_control.agent_api import VersionStatus
from conch_control.events import EventLog
from conch_control.version_phase import Phase

FORGOTTEN = "no longer selected"
"""Reason of a version that the version policy no longer selects; hidden from Triton's index."""

UNFINISHED = frozenset({Phase.STAGING, Phase.LOADING, Phase.WARMING})
"""Phases of a version that is being loaded."""

_FETCHED = frozenset({Phase.STAGING, Phase.READY})
_ENDED = frozenset({Phase.UNLOADED, Phase.FAILED})
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
    """A transition of one version; `reason` is for operators, `host_bytes` None if unknown."""

    phase: Phase
    reason: str = ""
    host_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class StatesSnapshot:
    """All states at one moment.

    Attributes:
        revision: Last event included.
        versions: Versions of each model that were ever attempted.
        failures: Errors of whole models, by name.
    """

    revision: int
    versions: Mapping[str, Statuses]
    failures: Mapping[str, str]


class VersionStates:
    """The states of all model versions of one server; thread-safe. Sole writer of registry and event log."""

    def __init__(self, registry: Registry, events: EventLog) -> None:
        self._registry = registry
        self._events = events
        self._lock = threading.RLock()
        self._versions: dict[str, Statuses] = {}
        self._failures: dict[str, str] = {}
        self._known: set[str] = set()  # published even without versions

    def versions(self, name: str) -> Statuses:
        """Statuses of the versions of a model that were ever attempted."""
        return self._versions.get(name, {})

    @property
    def failures(self) -> Mapping[str, str]:
        """Errors of whole models, by name."""
        with self._lock:
            return dict(self._failures)

    def snapshot(self) -> StatesSnapshot:
        """A consistent copy of all states."""
        with self._lock:
            return StatesSnapshot(self._events.revision, dict(self._versions), dict(self._failures))

    def change(
        self, name: str, changes: Mapping[int, Change], ready: Mapping[int, Servable] | None = None
    ) -> Statuses:
        """Applies transitions to versions of one model atomically; returns the new statuses.

        `ready` has all versions that serve from now on; None if unchanged.

        Raises:
            ValueError: A transition is not allowed, or `ready` contradicts the phases.
        """
        with self._lock:
            before = self._versions.get(name, {})
            if not changes and ready is None:
                return before
            after = dict(before)
            for version, change in sorted(changes.items()):
                after[version] = self._changed(name, version, before.get(version), change)
            published = self._registry.entries.get(name, Entry()).ready if ready is None else ready
            marked = {version for version, status in after.items() if status.phase is Phase.READY}
            if marked != set(published):
                raise ValueError(
                    f"model '{name}': versions {sorted(marked)} are said to be ready, {sorted(published)} are"
                )
            self._versions[name] = after
            self._publish(name, after, published)
            # Ready versions first: readers never see a gap without a serving version.
            for version in sorted(changes, key=lambda each: (after[each].phase is not Phase.READY, each)):
                status = after[version]
                self._events.append(name, version, status.phase, status.reason)
            return after

    def end(self, name: str, phases: Iterable[Phase], change: Change) -> None:
        """Applies a transition to all versions of a model that are in one of the phases."""
        among = frozenset(phases)
        with self._lock:
            ended = {version: change for version, each in self.versions(name).items() if each.phase in among}
            if ended:
                self.change(name, ended)

    def publish_known(self, name: str, lasting: bool) -> None:
        """Publishes a model without a version to load, so that requests fail with Triton's text.

        `lasting` is for its own config: as in Triton the server is not ready then, until the model has a
        version or is unloaded.
        """
        with self._lock:
            self._known.add(name)
            entry = self._registry.entries.get(name)
            if entry is None or not entry.states:
                before = entry is not None and entry.lacking
                self._registry.publish(name, Entry(lacking=lasting or before))

    def mark_unloaded(self, name: str, status: VersionStatus) -> None:
        """Moves a draining version to UNLOADED unless its status has changed since."""
        with self._lock:
            # By identity: an equal status may belong to a later unload.
            if self.versions(name).get(status.version) is status:
                self.change(name, {status.version: Change(Phase.UNLOADED, UNLOADED)})

    def report_progress(self, name: str, versions: Iterable[int], done: int, total: int) -> None:
        """Sets the staging progress of versions; for ready ones that of their successors."""
        with self._lock:
            if name not in self._versions:
                return
            statuses = dict(self.versions(name))
            for version in versions:
                # Not draining ones: `mark_unloaded` compares them by identity.
                if version in statuses and statuses[version].phase in _FETCHED:
                    statuses[version] = replace(statuses[version], done_bytes=done, total_bytes=total)
            self._versions[name] = statuses

    def failed(self, name: str, reason: str) -> None:
        """Records why the whole model could not be loaded."""
        with self._lock:
            if self._failures.get(name) != reason:
                self._failures[name] = reason
                self._events.append(name, _WHOLE, Phase.FAILED, reason)

    def rollout_changed(self, name: str, transition: RolloutTransition) -> None:
        """Appends an event about a model's rollout, which changes no version."""
        with self._lock:
            failure = self._failures.get(name)
            phase = Phase.UNLOADED if failure is None else Phase.FAILED
            self._events.append(name, _WHOLE, phase, failure or "", transition)

    def forget(self, name: str, evicted: bool = False) -> None:
        """Drops a model that no repository has any more, unless a version of it is in memory.

        One that was only evicted keeps its labels and its route.
        """
        with self._lock:
            if all(each.phase in _ENDED for each in self._versions.get(name, {}).values()):
                self._versions.pop(name, None)
                self._failures.pop(name, None)
                self._known.discard(name)
                if evicted:
                    self._registry.remove(name)
                else:
                    self._registry.forget(name)

    def clear_failure(self, name: str) -> None:
        """Clears the error of the whole model."""
        with self._lock:
            entry = self._registry.entries.get(name)
            if entry is not None and entry.lacking:
                self._registry.publish(name, Entry(entry.ready, entry.states))
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
            host_bytes = before.host_bytes  # still in memory
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
