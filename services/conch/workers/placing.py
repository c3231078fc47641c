"""Models whose instances run in workers, as the Python backend hands them out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conch.backends.python.settings import Settings
from conch.core.backend import BackendInstance, BackendModel
from conch.core.calls import Calls, ServerCalls
from conch.core.instances.placement import Placement
from conch.core.registry import Registry
from conch.core.spec import ModelSpec
from conch.workers.completion import complete_in_worker
from conch.workers.environments import Environment, EnvironmentCache, environment_for, server_environment
from conch.workers.monitor import Monitor
from conch.workers.supervisor import WorkerInstance
from conch.workers.team import Team


class Workers:
    """The workers of all models of one program; their monitor runs while there are any."""

    def __init__(self) -> None:
        self._monitor = Monitor()

    def complete(
        self,
        config: dict[str, Any],
        directory: Path,
        file_name: str,
        settings: Settings,
        options: Mapping[str, str],
    ) -> dict[str, Any]:
        """Asks a model's `auto_complete_config`; see `conch.core.backend.Backend.complete_config`."""
        environment = server_environment()
        return complete_in_worker(
            self._monitor, environment, config, directory, file_name, settings.start_timeout_s
        )

    def load(self, spec: ModelSpec, settings: Settings, calls: ServerCalls | None) -> BackendModel:
        """Makes ready what the workers of a model version run in.

        Args:
            spec: The model version.
            settings: How it runs.
            calls: What the model may ask of the server; None for a server without any other model.

        Raises:
            ConchError: It can't be made ready.
        """
        if calls is None:
            calls = Calls(Registry())
        environment = environment_for(spec, EnvironmentCache.of(spec.backend_options))
        return _WorkerModel(spec, settings, environment, calls, self._monitor)


class _WorkerModel(BackendModel):
    def __init__(
        self,
        spec: ModelSpec,
        settings: Settings,
        environment: Environment,
        calls: ServerCalls,
        monitor: Monitor,
    ) -> None:
        self._spec = spec
        self._settings = settings
        self._environment = environment
        self._calls = calls
        self._monitor = monitor
        self._team = Team()

    def create_instance(self, placement: Placement) -> BackendInstance:
        return WorkerInstance.open(
            self._spec,
            placement,
            self._settings,
            self._environment,
            self._calls,
            self._monitor,
            self._team,
        )

    def close(self) -> None:
        self._environment.release()
