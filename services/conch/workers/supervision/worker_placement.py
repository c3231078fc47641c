"""Models whose instances run in workers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from conch.backends.python.python_settings import Settings
from conch.core.backend import BackendInstance, BackendModel
from conch.core.bls import Calls, ServerCalls
from conch.core.execution.placement import Placement
from conch.core.registry import Registry
from conch.core.spec import ModelSpec
from conch.workers.environment import Environment
from conch.workers.environment_spec import EnvironmentSpec, placement_of, resolve_placement
from conch.workers.supervision.config_completion import complete_in_worker
from conch.workers.supervision.process_monitor import ProcessMonitor
from conch.workers.supervision.worker_group import WorkerGroup
from conch.workers.supervision.worker_instance import WorkerInstance


class Workers:
    """The workers of all models of a program; they share a monitor."""

    def __init__(self) -> None:
        self._monitor = ProcessMonitor()

    def run(self, spec: ModelSpec) -> bool:
        """True if the instances of a model version run in workers.

        Raises:
            InvalidArgumentError: The settings contradict each other.
        """
        return placement_of(spec) == "worker"

    def run_completion(
        self,
        config: Mapping[str, Any],
        directory: Path,
        file_name: str,
        parameters: Mapping[str, str],
        options: Mapping[str, str],
    ) -> bool:
        """As `run`, for the completion of a config."""
        name = config.get("name", "")
        asked = EnvironmentSpec.read(name, directory, file_name, parameters, options)
        return resolve_placement(name, asked, parameters, options) == "worker"

    def complete(
        self,
        config: dict[str, Any],
        directory: Path,
        file_name: str,
        parameters: Mapping[str, str],
        options: Mapping[str, str],
    ) -> dict[str, Any]:
        """Runs a model's `auto_complete_config`."""
        name = config.get("name", "")
        asked = EnvironmentSpec.read(name, directory, file_name, parameters, options)
        settings = Settings.read(name, parameters, options)
        environment = asked.make()
        try:
            return complete_in_worker(self._monitor, environment, config, directory, file_name, settings)
        finally:
            environment.release()

    def load(self, spec: ModelSpec, calls: ServerCalls | None) -> BackendModel:
        """Resolves the environment of a model version; `calls` is None without other models.

        Raises:
            ConchError: The environment can't be made.
        """
        settings = Settings.of(spec)
        if calls is None:
            calls = Calls(Registry())
        environment = EnvironmentSpec.of(spec).make()
        return _WorkerModel(spec, settings, environment, calls, self._monitor)


class _WorkerModel(BackendModel):
    creates_in_parallel: ClassVar[bool] = True

    def __init__(
        self,
        spec: ModelSpec,
        settings: Settings,
        environment: Environment,
        calls: ServerCalls,
        monitor: ProcessMonitor,
    ) -> None:
        self._spec = spec
        self._settings = settings
        self._environment = environment
        self._calls = calls
        self._monitor = monitor
        self._group = WorkerGroup()
        self.notes = self._group.notes
        self.unload_grace_s = settings.unload_grace_s

    def create_instance(self, placement: Placement) -> BackendInstance:
        return WorkerInstance.open(
            self._spec,
            placement,
            self._settings,
            self._environment,
            self._calls,
            self._monitor,
            self._group,
        )

    def close(self) -> None:
        self._environment.release()
