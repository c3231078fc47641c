"""The agent: composes the control plane of one server and implements its API.

Owns: repositories, event log, version states, load statistics. Threads: none of its own; any thread may
call it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from conch.core.bls import Calls
from conch.core.clock import wall_seconds
from conch.core.custom_metrics import FAMILIES, CustomFamilies
from conch.core.errors import (
    ConchError,
    InvalidArgumentError,
    NotFoundError,
    UnsupportedError,
    as_conch_error,
)
from conch.core.execution.placement import devices_of
from conch.core.load_statistics import LoadStatistics
from conch.core.model_control import IndexEntry, LoadParameter
from conch.core.registry import Entry, Registry
from conch.core.response_cache.cache_service import CacheService
from conch.core.spec import ModelSpec
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.parse import CONFIG_FILE, OVERRIDE, config_origins
from conch_control.control_options import WILDCARD, ControlOptions
from conch_control.events import EventLog
from conch_control.lifecycle.access_policy import GuardedAgent
from conch_control.lifecycle.ensemble_dependencies import EnsembleDependencies
from conch_control.lifecycle.ensemble_loader import EnsembleError
from conch_control.lifecycle.load_overrides import apply_overrides, read_overrides
from conch_control.lifecycle.model_archives import ModelArchives
from conch_control.lifecycle.model_definition import PollError
from conch_control.lifecycle.model_lifecycle import ModelLifecycle
from conch_control.lifecycle.model_loader import GetBackend, ModelLoader
from conch_control.lifecycle.version_diff import STALE
from conch_control.lifecycle.version_states import UNFINISHED, VersionStates
from conch_control.port import Index, InstanceStatus, ModelDescription, ModelStatus
from conch_control.repository.repositories import open_repositories
from conch_control.repository.source import DUPLICATE, ModelSource, Repository, Scan, without_incomplete
from conch_control.repository.uploads import remove_abandoned

log = logging.getLogger(__name__)


_NO_DEVICE = -1


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """A model that could not be loaded at the start."""

    name: str
    error: ConchError

    @property
    def reason(self) -> str:
        """The error for operators."""
        if isinstance(self.error, PollError | EnsembleError):
            return self.error.reason
        return self.error.message

    def __str__(self) -> str:
        return f"failed to load '{self.name}': {self.reason}"


class Agent:
    """Implements `AgentPort` and `ModelControl`.

    Attributes:
        loads: Load times and failure counts.
        archives: Directories that are registered while the server runs.
        draining: The server drains or stops.

    Raises:
        InvalidArgumentError: The options contradict each other, or the location of a repository is malformed
            or needs a package that is not installed.
    """

    def __init__(
        self,
        options: ControlOptions,
        registry: Registry,
        get_backend: GetBackend,
        cache: CacheService | None = None,
        on_drain: Callable[[], None] = lambda: None,
        *,
        repositories: Iterable[Repository] = (),
        families: CustomFamilies = FAMILIES,
    ) -> None:
        _check_options(options)
        self._registry = registry
        self._options = options
        self.repositories = open_repositories(options, repositories)
        if options.namespacing:
            registry.namespaces = tuple(repository.location for repository in self.repositories)
        self._on_drain = on_drain
        self.draining = False
        self.events = EventLog(wall_seconds)
        self._states = VersionStates(registry, self.events)
        # Models may load others in explicit mode even if --allow-model-control is off for clients.
        models = GuardedAgent(
            _ModelFacingAgent(self), options.mode, most_config_bytes=options.max_config_bytes
        )
        calls = Calls(registry, models)
        loader = ModelLoader(options, get_backend, registry, cache, calls, families)
        self.loads = LoadStatistics()
        self.lifecycle = ModelLifecycle(options, registry, loader, self._states, self.loads)
        self._dependencies = EnsembleDependencies(options, registry, self.lifecycle, self._states, self.loads)
        self.archives = ModelArchives(self, self.repositories, registry, self._states, self.events, options)
        # Result of the last scan:
        self._seen: Mapping[str, ModelSource] = {}
        self._identifiers: Mapping[str, tuple[str, ...]] = {}

    def start(self) -> list[LoadFailure]:
        """Loads the startup models, several at a time; returns those that failed.

        Raises:
            InvalidArgumentError: A repository is not a directory.
        """
        self.repositories.check()
        remove_abandoned()
        scan = self._remember(self.repositories.scan())
        names = self._startup_names(scan)
        if not names:
            return []
        errors = self._dependencies.load(names, scan)
        return [self._failure(name, errors[name]) for name in names if name in errors]

    def index(self, ready_only: bool) -> list[IndexEntry]:
        """All models of the repositories with the state of each version, by name.

        A repository that does not answer contributes the models of its last listing.
        """
        scan = self._remember(self.repositories.list_available())
        failures = self._states.failures
        published = self._registry.entries
        shown = self._registry.name_of
        lines: list[IndexEntry] = []
        names = {*scan.models, *scan.duplicates, *scan.remembered}
        for name in sorted(names, key=lambda each: (shown(each), each)):
            if name in scan.duplicates:
                lines.append(IndexEntry(name, state="UNAVAILABLE", reason=DUPLICATE))
            else:
                lines.extend(_lines(shown(name), published.get(name, Entry()), failures.get(name)))
        return [line for line in lines if line.state == "READY"] if ready_only else lines

    def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        """Loads or reloads a model and returns when it is ready.

        Args:
            name: Model name (all models of that name with namespaces), or an identifier.
            parameters: ``config`` replaces the config file, in JSON; ``file:<path>``, together with it, all
                files.

        Raises:
            ConchError: The model can't be loaded; the text is Triton's.
        """
        _check_name(self._registry.name_of(name))
        overrides = read_overrides(parameters, self._options.max_config_bytes)
        scan = self._remember(self.repositories.list_available())
        if overrides.files and self._registry.namespaces:
            raise UnsupportedError("files can't be given with a load where models have namespaces")
        try:
            scan = apply_overrides(name, overrides, scan)
            names = scan.identified(name)
            if scan.late and any(
                self._dependencies.needs_late_answers(each, scan, overrides.config) for each in names
            ):
                scan = apply_overrides(name, overrides, self._remember(self.repositories.scan()))
                names = scan.identified(name)
        except InvalidArgumentError as wrong:
            log.error("Poll failed for model directory '%s': %s", name, wrong.message)
            raise PollError(name, wrong.message) from wrong
        errors = self._dependencies.load(names, scan, overrides.config)
        for each in names:
            error = errors.get(each)
            if isinstance(error, EnsembleError):
                log.error("failed to load '%s': %s", each, error.reason)
                if overrides.config is None:
                    self._states.failed(each, error.reason)
            if error is not None:
                raise error

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Starts unloading a model; an unknown one is ignored.

        Args:
            name: Model name (all models of that name with namespaces), or an identifier.
            unload_dependents: Also unload the composing models that were loaded only for this ensemble.
        """
        known = dict.fromkeys((*self._registry.identifiers(name), *self._identifiers.get(name, ())))
        for identifier in known or (name,):
            self._dependencies.unload(identifier, unload_dependents)

    def models(self) -> Index:
        """All models with their states, by name."""
        scan = self._remember(self.repositories.list_available())
        known = self._states.snapshot()
        sources = {**scan.remembered, **scan.models}
        found = []
        for name in sorted({*sources, *scan.duplicates, *known.versions, *known.failures}):
            source = None if name in scan.duplicates else sources.get(name)
            reason = DUPLICATE if name in scan.duplicates else known.failures.get(name, "")
            versions = tuple(status for _, status in sorted(known.versions.get(name, {}).items()))
            found.append(ModelStatus(name, "" if source is None else source.location, versions, reason))
        return Index(self.events.epoch, known.revision, tuple(found), self.draining)

    def unfinished(self) -> list[ModelStatus]:
        """Models with versions that are being loaded, by name; does not access storage."""
        known = self._states.snapshot().versions
        return self.progress(
            [
                name
                for name, versions in known.items()
                if any(status.phase in UNFINISHED for status in versions.values())
            ]
        )

    def progress(self, names: Collection[str]) -> list[ModelStatus]:
        """Staging progress of some models, by name; does not access storage."""
        known, seen = self._states.snapshot(), self._seen
        return [
            ModelStatus(
                name,
                seen[name].location if name in seen else "",
                tuple(status for _, status in sorted(known.versions[name].items())),
                known.failures.get(name, ""),
            )
            for name in sorted(names)
            if name in known.versions
        ]

    def describe(self, name: str) -> ModelDescription:
        """Status, effective config and instances of one model.

        Raises:
            NotFoundError: There is no such model.
            InvalidArgumentError: Several repositories have a model of this name.
        """
        found = [
            each for each in self.models().models if name in (each.name, self._registry.name_of(each.name))
        ]
        if not found:
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        if len(found) > 1:
            names = ", ".join(each.name for each in found)
            raise InvalidArgumentError(f"several repositories have a model '{name}': name one of {names}")
        (status,) = found
        newest = self._registry.entries.get(status.name, Entry()).latest
        if newest is None:
            return ModelDescription(status, "", {}, ())
        spec = newest.spec
        return ModelDescription(status, json.dumps(spec.config), self._origins(spec), _instances(spec))

    def drain(self) -> None:
        """Makes the server not ready; it still answers requests."""
        self._on_drain()

    def draining_began(self) -> None:
        """Shows in the index, and to its watchers, that the server drains: by `drain` or by a signal."""
        self.draining = True
        self.events.wake()

    def ready(self) -> bool:
        """True if every model counts as ready; see `counts_as_ready`.

        As in Triton, a model whose definition could not be read does not count; one without versions does.
        """
        return all(map(counts_as_ready, self._registry.entries.values()))

    def stop_loads(self) -> None:
        """Stops all loads and refuses new ones."""
        self.lifecycle.stop_loads()

    def close(self, timeout_s: float) -> bool:
        """Unloads everything; returns True if all requests finished in time."""
        try:
            return self.lifecycle.close(timeout_s)
        finally:
            self.events.close()
            self.repositories.close()

    def _remember(self, scan: Scan) -> Scan:
        self._seen, self._identifiers = {**scan.remembered, **scan.models}, scan.identifiers
        return scan

    def _origins(self, spec: ModelSpec) -> Mapping[str, str]:
        origin = self.lifecycle.origin(spec.identifier)
        if origin is None:
            return {}
        effective = ModelConfig.FromString(spec.config_message)
        completed = ModelConfig.FromString(spec.config_message)
        del completed.instance_group[:]  # the server chooses what is not written
        source = OVERRIDE if origin.override else CONFIG_FILE
        return config_origins(origin.definition.written, completed, effective, source)

    def _startup_names(self, scan: Scan) -> list[str]:
        startup = self._options.startup_models
        if self._options.mode != "explicit" or WILDCARD in startup:
            names = sorted({*scan.models, *scan.duplicates})
            # The planner loads incomplete ones when they are complete.
            return names if self._options.mode in ("none", "explicit") else without_incomplete(names, scan)
        return list(dict.fromkeys(each for name in startup for each in scan.identified(name)))

    def _failure(self, name: str, error: Exception) -> LoadFailure:
        shown = as_conch_error(error)
        if shown is not error:
            log.error("failed to load '%s'", name, exc_info=error)
        failure = LoadFailure(name, shown)
        if isinstance(shown, EnsembleError):  # other errors are already logged
            log.error("%s", failure)
        # A named model appears in the index even if no repository has it.
        if not self._registry.entries.get(name, Entry()).states:
            self._states.failed(name, failure.reason)
        return failure


class _ModelFacingAgent:
    """The agent as models see it.

    A load that a model requests in its `initialize` runs inside that model's own load, so it needs an extra
    slot.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def index(self, ready_only: bool) -> list[IndexEntry]:
        return self._agent.index(ready_only)

    def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        with self._agent.lifecycle.queue.extra_slot():
            self._agent.load(name, parameters)

    def unload(self, name: str, unload_dependents: bool) -> None:
        self._agent.unload(name, unload_dependents)


def _lines(name: str, entry: Entry, failure: str | None) -> list[IndexEntry]:
    if entry.states:
        # For a ready model the failure is that of a newer load.
        stale = "" if failure is None else STALE + failure
        return [
            IndexEntry(name, str(version), state.state, state.reason or _remarks(entry, version, stale))
            for version, state in sorted(entry.states.items())
        ]
    return [IndexEntry(name) if failure is None else IndexEntry(name, "", "UNAVAILABLE", failure)]


def _remarks(entry: Entry, version: int, stale: str) -> str:
    """Remarks of the index about a version that serves."""
    model = entry.ready.get(version)
    return "" if model is None else "; ".join([*filter(None, (stale,)), *model.notes])


def _check_options(options: ControlOptions) -> None:
    if options.startup_models and options.mode != "explicit":
        raise InvalidArgumentError(
            "Use of '--load-model' requires setting '--model-control-mode=explicit' as well."
        )
    if WILDCARD in options.startup_models and len(options.startup_models) > 1:
        raise InvalidArgumentError(
            f"Wildcard model name '{WILDCARD}' must be the ONLY startup model if specified at all."
        )


def _instances(spec: ModelSpec) -> tuple[InstanceStatus, ...]:
    return tuple(
        InstanceStatus(
            group.name, f"KIND_{group.kind}", device if group.kind == "GPU" else _NO_DEVICE, group.count
        )
        for group in spec.instance_groups
        for device in devices_of(group)
    )


def _check_name(name: str) -> None:
    trimmed = name.strip()
    if not trimmed:
        raise InvalidArgumentError("Model name cannot be empty. Please enter a valid name to deploy.")
    if trimmed == ".." or "/" in trimmed:
        raise InvalidArgumentError(
            f"invalid model name '{name}', model name must not contain path traversal characters"
        )


def counts_as_ready(entry: Entry) -> bool:
    """True if a model does not keep the server from being ready.

    Triton requires every version to be ready. Here one serving version is enough, and unloading models
    count as ready: otherwise a broken update would make all replicas of a storage not ready at once.
    """
    if entry.lacking:
        return False
    return bool(entry.ready) or all(_gone(state.state, state.reason) for state in entry.states.values())


def _gone(state: str, reason: str) -> bool:
    return state == "UNLOADING" or (state == "UNAVAILABLE" and reason == "unloaded")
