"""The agent: composes the control plane of one server and implements its API.

Loads and unloads go to `ensemble_dependencies`, views to `model_index`. Both begin with a scan of the
repositories; the agent keeps the last one for what may not access storage.

Owns: repositories, event log, version states, load statistics. Threads: none of its own; any thread may
call it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from conch.core.backend import FindBackend
from conch.core.bls import Calls, FactFinder
from conch.core.clock import wall_seconds
from conch.core.custom_metrics import FAMILIES, CustomFamilies
from conch.core.errors import InvalidArgumentError, UnsupportedError, without_details
from conch.core.load_statistics import LoadStatistics
from conch.core.model_control import NOT_RESIDENT, IndexEntry, LoadParameter
from conch.core.registry import Entry, Registry
from conch.core.response_cache.cache_service import CacheService
from conch.core.rollouts import RolloutReport
from conch_control.agent_api import Index, ModelDescription, ModelStatus
from conch_control.control_options import ControlOptions
from conch_control.events import EventLog
from conch_control.lifecycle.access_policy import GuardedAgent
from conch_control.lifecycle.ensemble_dependencies import NOT_LOADED, EnsembleDependencies
from conch_control.lifecycle.ensemble_loader import EnsembleError
from conch_control.lifecycle.load_overrides import PIN, Overrides, apply_overrides, read_overrides
from conch_control.lifecycle.load_queue import LoadQueue
from conch_control.lifecycle.model_archives import ModelArchives
from conch_control.lifecycle.model_definition import PollError
from conch_control.lifecycle.model_index import ModelIndex
from conch_control.lifecycle.model_lifecycle import ModelLifecycle
from conch_control.lifecycle.model_loader import ModelLoader, Wrapper
from conch_control.lifecycle.residency import AllResident, Residency, ResidencyKind
from conch_control.lifecycle.resident_loads import ResidentLoads
from conch_control.lifecycle.rollouts import Saturation, open_rollouts
from conch_control.lifecycle.startup_models import LoadFailure, check_startup_options, startup_names
from conch_control.lifecycle.version_diff import Origin
from conch_control.lifecycle.version_states import VersionStates
from conch_control.managed_rollouts import ManagedBy, ManagedReport
from conch_control.repository.repositories import open_repositories
from conch_control.repository.source import ModelSource, Repository, Scan
from conch_control.repository.uploads import remove_abandoned_uploads

log = logging.getLogger(__name__)


class Agent:
    """Implements `AgentApi` and `ModelControl`.

    Attributes:
        calls: The server as its models see it.
        loads: Load times and failure counts.
        archives: Directories that are registered while the server runs.
        rollout_control: Labels and rollouts.
        residency: Chooses the models that are in memory.
        draining: The server drains or stops.

    Raises:
        InvalidArgumentError: The options contradict each other, or the location of a repository is malformed
            or needs a package that is not installed.
    """

    def __init__(
        self,
        options: ControlOptions,
        registry: Registry,
        get_backend: FindBackend,
        cache: CacheService | None = None,
        on_drain: Callable[[], None] = lambda: None,
        *,
        repositories: Iterable[Repository] = (),
        families: CustomFamilies = FAMILIES,
        saturation: Saturation = dict,
        residency: ResidencyKind | None = None,
        passes_blocks: bool = False,
        facts: FactFinder | None = None,
    ) -> None:
        check_startup_options(options)
        self._on_demand = options.mode == "on-demand"
        if self._on_demand != (residency is not None):
            raise InvalidArgumentError("the mode on-demand, and no other one, needs settings of a residency")
        self._registry = registry
        self._options = options
        self.loads = LoadStatistics()
        self.repositories = open_repositories(options, repositories, self.loads)
        if options.namespacing:
            registry.add_namespaces(*(repository.location for repository in self.repositories))
        self._on_drain = on_drain
        self.draining = False
        self.events = EventLog(wall_seconds)
        self._states = VersionStates(registry, self.events)
        # Models may load others in explicit mode even if --allow-model-control is off for clients.
        models = GuardedAgent(
            _ModelFacingAgent(self), options.mode, most_config_bytes=options.max_config_bytes
        )
        self.calls = Calls(registry, models, passes_blocks, facts)
        self._loader = loader = ModelLoader(options, get_backend, registry, cache, self.calls, families)
        queue = LoadQueue(max(options.load_threads, 1))
        self.rollout_control = open_rollouts(
            registry,
            queue,
            self._states,
            self.events,
            self._load_selected,
            self._source,
            self._origin,
            self._pin,
            saturation,
            options,
        )
        self.lifecycle = ModelLifecycle(
            options, registry, loader, self._states, queue, self.loads, self.rollout_control
        )
        self._dependencies = EnsembleDependencies(options, registry, self.lifecycle, self._states, self.loads)
        self.archives = ModelArchives(self, self.repositories, registry, self._states, self.events, options)
        self.residency: Residency = AllResident()
        if residency is not None:
            loads = ResidentLoads(options, self._dependencies, self._states, loader)
            self.residency = residency.open(options, registry, self.repositories, loads)
        self._index = ModelIndex(
            registry,
            self._states,
            self.events,
            self.lifecycle,
            NOT_RESIDENT if self._on_demand else "",
            self.rollout_control.summary,
        )
        self._last_scan = Scan({})

    def wrap_versions(self, wrapper: Wrapper) -> None:
        """Has all versions wrapped that are loaded from now on."""
        self._loader.wrappers.append(wrapper)

    def start(self) -> list[LoadFailure]:
        """Loads the startup models, several at a time; returns those that failed.

        Raises:
            InvalidArgumentError: A repository is not a directory.
        """
        self.repositories.check()
        remove_abandoned_uploads()
        self.rollout_control.restore()
        scan = self._remember(self.repositories.scan())
        self.residency.start(scan)
        names = startup_names(self._options, scan)
        if not names:
            return []
        if self._on_demand:
            with ThreadPoolExecutor(max(self._options.load_threads, 1), "conch-load") as pool:
                found = pool.map(lambda name: self._load([name], scan, Overrides()), names)
            errors = {name: error for each in found for name, error in each.items()}
        else:
            errors = self._dependencies.load(names, scan)
        return [self._failure(name, errors[name]) for name in names if name in errors]

    def restore(self) -> None:
        """Begins to load what the last run had in memory; the ports are open."""
        self.residency.restore()

    def index(self, ready_only: bool) -> list[IndexEntry]:
        """All models of the repositories with the state of each version, by name.

        A repository that does not answer contributes the models of its last listing.
        """
        return self._index.entries(self._remember(self.repositories.list_available()), ready_only)

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
        if PIN in parameters and not self._on_demand:
            raise InvalidArgumentError(
                f"Load parameter '{PIN}' has an effect only with --model-control-mode=on-demand"
            )
        listed = scan = self._remember(self.repositories.list_available())
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
            if listed.source(name) is not None:
                self._states.failed(name, wrong.message)
            raise PollError(name, wrong.message, True) from wrong
        errors = self._load(names, scan, overrides)
        for each in names:
            error = errors.get(each)
            if isinstance(error, EnsembleError):
                log.error("failed to load '%s': %s", each, error.reason)
                self._states.failed(each, error.reason)
            if (
                overrides.files
                and listed.source(each) is None
                and isinstance(error, PollError | EnsembleError)
            ):
                self._states.forget(each)  # clients choose the name: the index never shows it
            if error is not None:
                raise error
            if overrides.config is not None or overrides.files:
                self.rollout_control.end(each, "the model was loaded with another config")

    def _load_selected(self, name: str) -> None:
        """Loads and unloads versions of a model as its rollout selects them now."""
        self._dependencies.load_selected(name, self._last_scan)
        self.residency.measure(name)

    def _origin(self, name: str) -> Origin | None:
        return self.lifecycle.origin(name)

    def _pin(self, name: str, pinned: bool) -> None:
        self.residency.pin_for_rollout(name, pinned)

    def _source(self, name: str) -> ModelSource | None:
        """A model in the repositories as they are now."""
        return self._remember(self.repositories.list_available()).source(name)

    def _load(self, names: Collection[str], scan: Scan, overrides: Overrides) -> Mapping[str, Exception]:
        """Loads models; if it is one, with room made for it."""
        run = partial(self._dependencies.load, names, scan, overrides.config)
        (name, *others) = names
        if others or scan.source(name) is None:
            return run()
        return self.residency.load(name, run, overrides.pin)

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Starts unloading a model; an unknown one is ignored.

        Args:
            name: Model name (all models of that name with namespaces), or an identifier.
            unload_dependents: Also unload the composing models that were loaded only for this ensemble.
        """
        known = dict.fromkeys((*self._registry.identifiers(name), *self._last_scan.identifiers.get(name, ())))
        if not self.residency.unload(name, unload_dependents):
            for identifier in known or (name,):
                self._dependencies.unload(identifier, unload_dependents)
        for identifier in known or (name,):
            self.rollout_control.end(identifier, "the model was unloaded")

    def set_label(self, name: str, label: str, version: int | None) -> None:
        """Has a label of a model name a ready version, or removes it with None; see `Rollouts.set_label`."""
        identifier = self.rollout_control.set_label(name, label, version)
        if version is None:
            log.info("label '%s' of '%s' removed", label, identifier)
        else:
            log.info("label '%s' of '%s' names version %d", label, identifier, version)

    def rollout(self, name: str) -> RolloutReport:
        """A model's labels and rollout. Raises NotFoundError: it has neither."""
        return self.rollout_control.rollout(name)

    def rollouts(self) -> list[RolloutReport]:
        """Labels and rollouts of all models that have some, by name."""
        return self.rollout_control.rollouts()

    def start_rollout(self, name: str, declaration: Mapping[str, Any], again: bool) -> RolloutReport:
        """Declares and starts a rollout; see `RolloutControl.start_rollout`."""
        return self.rollout_control.start_rollout(name, declaration, again)

    def manage_rollout(
        self, name: str, declaration: Mapping[str, Any], managed_by: ManagedBy
    ) -> ManagedReport:
        """Takes over what the manager of a fleet says of a rollout; see `Rollouts.manage_rollout`."""
        return self.rollout_control.manage_rollout(name, declaration, managed_by)

    def update_rollout(self, name: str, action: str, weight: float | None = None) -> RolloutReport:
        """Changes a rollout; see `RolloutControl.update_rollout`."""
        return self.rollout_control.update_rollout(name, action, weight)

    def models(self) -> Index:
        """All models with their states, by name."""
        return self._index.statuses(self._remember(self.repositories.list_available()), self.draining)

    def unfinished(self) -> list[ModelStatus]:
        """Models with versions that are being loaded, by name; does not access storage."""
        return self._index.unfinished(self._last_scan)

    def progress(self, names: Collection[str]) -> list[ModelStatus]:
        """Staging progress of some models, by name; does not access storage."""
        return self._index.progress(self._last_scan, names)

    def describe(self, name: str) -> ModelDescription:
        """Status, effective config and instances of one model.

        Raises:
            NotFoundError: There is no such model.
            InvalidArgumentError: Several repositories have a model of this name.
        """
        return self._index.describe(self.models(), name)

    def drain(self) -> None:
        """Makes the server not ready; it still answers requests."""
        self._on_drain()

    def draining_began(self) -> None:
        """Shows in the index, and to its watchers, that the server drains: by `drain` or by a signal."""
        self.draining = True
        self.events.wake()

    def ready(self) -> bool:
        """True if no model keeps the server from being ready; see `Entry.counts_as_ready`.

        As in Triton, a definition that could not be read does not: the registry has no version of it. In
        on-demand mode only pinned models do.
        """
        return self.residency.ready(self._registry.unready)

    def stop_loads(self) -> None:
        """Stops all loads and refuses new ones."""
        self.residency.stop()
        self.rollout_control.stop()
        self.lifecycle.stop_loads()

    def close(self, timeout_s: float) -> bool:
        """Unloads everything; returns True if all requests finished in time."""
        self.rollout_control.close()
        try:
            return self.lifecycle.close(timeout_s)
        finally:
            self.residency.close()
            self.events.close()
            self.repositories.close()

    def _remember(self, scan: Scan) -> Scan:
        self._last_scan = scan
        self.residency.catalogue(scan)
        return scan

    def _failure(self, name: str, error: Exception) -> LoadFailure:
        shown = without_details(error, NOT_LOADED)
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

    def set_label(self, name: str, label: str, version: int | None) -> None:
        self._agent.set_label(name, label, version)


def _check_name(name: str) -> None:
    trimmed = name.strip()
    if not trimmed:
        raise InvalidArgumentError("Model name cannot be empty. Please enter a valid name to deploy.")
    if trimmed == ".." or "/" in trimmed:
        raise InvalidArgumentError(
            f"invalid model name '{name}', model name must not contain path traversal characters"
        )
