"""Index, status and description of models, from a scan, the registry and the version states.

Nothing here accesses storage. Threads: any.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping

from conch.core.errors import InvalidArgumentError, NotFoundError
from conch.core.execution.placement import devices_of
from conch.core.model_control import IndexEntry
from conch.core.registry import Entry, Registry
from conch.core.rollouts import RolloutReport
from conch.core.spec import ModelSpec
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.agent_api import Index, InstanceStatus, ModelDescription, ModelStatus
from conch_control.config.parse import CONFIG_FILE, OVERRIDE, config_origins
from conch_control.events import EventLog
from conch_control.lifecycle.model_lifecycle import ModelLifecycle
from conch_control.lifecycle.version_diff import STALE
from conch_control.lifecycle.version_states import UNFINISHED, VersionStates
from conch_control.repository.source import DUPLICATE, Scan

_NO_DEVICE = -1
_NO_ENTRY = Entry()


class ModelIndex:
    """The models of one server in the forms in which clients and operators see them.

    `unloaded` is the reason that is shown for models without a version; empty for none. `rollout` tells a
    model's rollout in short.
    """

    def __init__(
        self,
        registry: Registry,
        states: VersionStates,
        events: EventLog,
        lifecycle: ModelLifecycle,
        unloaded: str = "",
        rollout: Callable[[str], RolloutReport | None] = lambda name: None,
    ) -> None:
        self._rollout = rollout
        self._unloaded = unloaded
        self._registry = registry
        self._states = states
        self._events = events
        self._lifecycle = lifecycle

    def entries(self, scan: Scan, ready_only: bool) -> list[IndexEntry]:
        """The lines of Triton's index: each version of each model of the repositories, by name."""
        failures = self._states.failures
        published = self._registry.entries
        shown = self._registry.name_of
        lines: list[IndexEntry] = []
        names = {*scan.models, *scan.duplicates, *scan.remembered}
        for name in sorted(names, key=lambda each: (shown(each), each)):
            if name in scan.duplicates:
                lines.append(IndexEntry(name, state="UNAVAILABLE", reason=DUPLICATE))
            else:
                entry = published.get(name, _NO_ENTRY)
                failure = failures.get(name)
                if failure is None and not entry.states and self._unloaded:
                    failure = self._unloaded
                lines.extend(_lines(shown(name), entry, failure))
        return [line for line in lines if line.state == "READY"] if ready_only else lines

    def statuses(self, scan: Scan, draining: bool) -> Index:
        """The index of the control port: also models that no repository has, and versions with progress."""
        known = self._states.snapshot()
        found = []
        for name in sorted(
            {*scan.remembered, *scan.models, *scan.duplicates, *known.versions, *known.failures}
        ):
            source = None if name in scan.duplicates else scan.source(name)
            versions = tuple(status for _, status in sorted(known.versions.get(name, {}).items()))
            reason = DUPLICATE if name in scan.duplicates else known.failures.get(name, "")
            if not versions and not reason:
                reason = self._unloaded
            location = "" if source is None else source.location
            labels, rollout = self._labels(name), self._rollout(name)
            found.append(ModelStatus(name, location, versions, reason, labels, rollout))
        return Index(self._events.epoch, known.revision, tuple(found), draining)

    def unfinished(self, scan: Scan) -> list[ModelStatus]:
        """Models with versions that are being loaded, by name."""
        known = self._states.snapshot().versions
        return self.progress(
            scan,
            [
                name
                for name, versions in known.items()
                if any(status.phase in UNFINISHED for status in versions.values())
            ],
        )

    def progress(self, scan: Scan, names: Collection[str]) -> list[ModelStatus]:
        """Staging progress of those models that have versions, by name."""
        known = self._states.snapshot()
        found = []
        for name in sorted(names):
            if name in known.versions:
                source = scan.source(name)
                versions = tuple(status for _, status in sorted(known.versions[name].items()))
                location = "" if source is None else source.location
                reason = known.failures.get(name, "")
                found.append(ModelStatus(name, location, versions, reason, self._labels(name)))
        return found

    def _labels(self, name: str) -> Mapping[str, int]:
        return self._registry.entries.get(name, Entry()).labels

    def describe(self, index: Index, name: str) -> ModelDescription:
        """Status, effective config and instances of one model of the index.

        Raises:
            NotFoundError: There is no such model.
            InvalidArgumentError: Several repositories have a model of this name.
        """
        found = [each for each in index.models if name in (each.name, self._registry.name_of(each.name))]
        if not found:
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        if len(found) > 1:
            names = ", ".join(each.name for each in found)
            raise InvalidArgumentError(f"several repositories have a model '{name}': name one of {names}")
        (status,) = found
        default = self._registry.entries.get(status.name, Entry()).default
        if default is None:
            return ModelDescription(status, "", {}, ())
        spec = default.spec
        return ModelDescription(status, json.dumps(spec.config), self._origins(spec), _instances(spec))

    def _origins(self, spec: ModelSpec) -> Mapping[str, str]:
        origin = self._lifecycle.origin(spec.identifier)
        if origin is None:
            return {}
        effective = ModelConfig.FromString(spec.config_message)
        completed = ModelConfig.FromString(spec.config_message)
        del completed.instance_group[:]  # the server chooses what is not written
        source = OVERRIDE if origin.override else CONFIG_FILE
        return config_origins(origin.definition.written, completed, effective, source)


def _lines(name: str, entry: Entry, failure: str | None) -> list[IndexEntry]:
    if entry.states:
        # For a ready model the failure is that of a newer load.
        stale = "" if failure is None else STALE + failure
        return [
            IndexEntry(
                name,
                str(version),
                state.state,
                state.reason or _remarks(entry, version, stale),
                tuple(entry.labels_of(version)),
                None if entry.route is None else entry.route.traffic(version),
            )
            for version, state in sorted(entry.states.items())
        ]
    return [IndexEntry(name) if failure is None else IndexEntry(name, "", "UNAVAILABLE", failure)]


def _remarks(entry: Entry, version: int, stale: str) -> str:
    """Remarks of the index about a version that serves."""
    model = entry.ready.get(version)
    return "" if model is None else "; ".join([*filter(None, (stale,)), *model.notes])


def _instances(spec: ModelSpec) -> tuple[InstanceStatus, ...]:
    return tuple(
        InstanceStatus(
            group.name, f"KIND_{group.kind}", device if group.kind == "GPU" else _NO_DEVICE, group.count
        )
        for group in spec.instance_groups
        for device in devices_of(group)
    )
