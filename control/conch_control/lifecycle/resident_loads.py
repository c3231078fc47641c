"""Loads and evictions for residency, carried out by `ModelLifecycle`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from conch.core.errors import ConchError
from conch.core.spec import ModelSpec
from conch_control.config.parse import decode_config
from conch_control.control_options import ControlOptions
from conch_control.lifecycle.ensemble_dependencies import EnsembleDependencies
from conch_control.lifecycle.memory_usage import resident_bytes
from conch_control.lifecycle.model_definition import read_definition
from conch_control.lifecycle.model_loader import ModelLoader
from conch_control.lifecycle.version_states import VersionStates
from conch_control.repository.dependency_graph import config_content
from conch_control.repository.layout import select_versions
from conch_control.repository.local import LocalModel
from conch_control.repository.source import ModelSource, Scan
from conch_control.version_phase import Phase

log = logging.getLogger(__name__)


class ResidentLoads:
    """Loads and evictions of one agent; thread-safe."""

    def __init__(
        self,
        options: ControlOptions,
        dependencies: EnsembleDependencies,
        states: VersionStates,
        loader: ModelLoader,
    ) -> None:
        self._options = options
        self._dependencies = dependencies
        self._states = states
        self._loader = loader

    def load(self, name: str, scan: Scan) -> Mapping[str, Exception]:
        """Loads a model after the models that it is composed of; returns the errors by model."""
        return self._dependencies.load([name], scan)

    def evict(self, name: str, gone: Callable[[], None]) -> None:
        """Unloads a model, whose states are forgotten once it has left memory."""

        def left() -> None:
            self._states.forget(name, evicted=True)
            gone()

        self._dependencies.evict(name, left)

    def describe(self, source: ModelSource) -> Mapping[int, ModelSpec]:
        """Specs of the versions that a load would bring, if a local model's files tell them; else empty."""
        if not isinstance(source, LocalModel):
            return {}
        try:
            content = config_content(source, self._options.model_config_name)
            config = decode_config(content, source.location, self._options.max_config_bytes)
            if config.model_repository_agents.agents:
                return {}  # they may change the files
            definition = read_definition(source.name, source.directory, self._options)
            versions = select_versions(definition.config, definition.versions)
            specs = {version: self._loader.describe(definition, version) for version in versions}
        except (ConchError, OSError) as error:
            log.debug("model '%s' is loaded, as its files do not describe it: %s", source.name, error)
            return {}
        return {version: spec for version, spec in specs.items() if spec is not None}

    def host_bytes(self, name: str) -> int | None:
        """Growth of the process by the load of all ready versions; None if one is unknown."""
        ready = [each for each in self._states.versions(name).values() if each.phase is Phase.READY]
        known = [each.host_bytes for each in ready if each.host_bytes is not None]
        return sum(known) if known and len(known) == len(ready) else None

    def resident_bytes(self) -> int | None:
        """Resident memory of this process; None if the platform does not report it."""
        return resident_bytes()
