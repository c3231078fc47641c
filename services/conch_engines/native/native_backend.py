"""`NativeBackend`: models whose backend is a library that is compiled for Triton."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from conch.backends.python.python_settings import Settings
from conch.core.backend import Backend, BackendInstance, BackendModel
from conch.core.bls import Calls, ServerCalls
from conch.core.errors import InvalidArgumentError, UnavailableError, UnsupportedError
from conch.core.execution.placement import Placement, place
from conch.core.registry import Registry
from conch.core.spec import ModelSpec
from conch.ipc.spec_json import Library
from conch.workers.backend_directory import FindLibrary
from conch.workers.environment import Environment, server_environment
from conch.workers.environment_spec import read_variables
from conch.workers.supervision.config_completion import complete_in_worker
from conch.workers.supervision.process_monitor import ProcessMonitor
from conch.workers.supervision.worker_group import WorkerGroup
from conch.workers.supervision.worker_instance import WorkerInstance
from conch_engines.native.library_search import NO_STRATEGY, find_library, has_library

_HOST = "libtritonserver.so"
_SEARCH_PATH = "LD_LIBRARY_PATH"
_PYTHON_ONLY = "CONCH_PLACEMENT", "CONCH_MAX_INFLIGHT", "CONCH_STRICT_OUTPUTS", "EXECUTION_ENV_PATH"
_STRATEGY = "TRITON_BATCH_STRATEGY_PATH"


class NativeBackend(Backend):
    """Runs models with the libraries of their backends, in workers.

    Args:
        backends: The directory of backends.
        told: Facts of the server for the config that backends read.
        has_gpus: True if instance groups on GPUs that a backend prefers can be used.
        policies: Settings of host policies, by name.
    """

    default_model_file = ""
    needs_model_file = False
    completion_runs_code = True
    resizes = False
    takes_host_policies = True
    parameters: ClassVar[tuple[str, ...]] = (
        *(
            "CONCH_MAX_EXECUTION_SECONDS",
            "CONCH_MEMORY_LIMIT_MB",
            "CONCH_PROCESS_LIMIT",
            "CONCH_HANG_SECONDS",
        ),
        *(
            "CONCH_START_TIMEOUT_SECONDS",
            "CONCH_UNLOAD_GRACE_SECONDS",
            "CONCH_PASS_ENVIRONMENT",
            "CONCH_ENV_",
        ),
    )

    def __init__(
        self,
        backends: Path,
        told: Mapping[str, str],
        has_gpus: bool,
        policies: Mapping[str, Mapping[str, str]],
    ) -> None:
        self._backends = backends
        self._policies = policies
        self._told = {
            "auto-complete-config": "true",
            "backend-directory": str(backends),
            "min-compute-capability": "6.000000",
            "default-max-batch-size": "4",
            **told,
        }
        self._has_gpus = has_gpus
        self._monitor = ProcessMonitor()

    def complete_config(
        self, config: dict[str, Any], version_directory: Path, options: Mapping[str, str]
    ) -> dict[str, Any]:
        """Has the library complete the config, in a process of its own."""
        name, backend = config.get("name", ""), config.get("backend", "")
        directory = version_directory.parent
        file = find_library(
            name, backend, config.get("runtime", ""), directory, version_directory, self._backends
        )
        parameters = {
            key: str(value.get("string_value", "")) for key, value in (config.get("parameters") or {}).items()
        }
        return complete_in_worker(
            self._monitor,
            _environment(name, file, version_directory, parameters),
            config,
            version_directory,
            "",
            _settings(name, parameters),
            self._library(backend, file, options),
            self._has_gpus,
        )

    def check(self, spec: ModelSpec) -> None:
        """Finds the library, without opening it."""
        _settings(spec.name, spec.parameters)
        self._library(spec.backend, self._find(spec), spec.backend_options)

    def load(self, spec: ModelSpec) -> BackendModel:
        """Loads a model without access to the server."""
        return self.load_within(spec, Calls(Registry()))

    def load_within(self, spec: ModelSpec, calls: ServerCalls) -> BackendModel:
        """Loads a model that may call the server."""
        file = self._find(spec)
        library = self._library(spec.backend, file, spec.backend_options)
        environment = _environment(spec.name, file, spec.version_directory, spec.parameters)
        settings = _settings(spec.name, spec.parameters)
        return _NativeModel(spec, library, settings, environment, calls, self._monitor)

    def _find(self, spec: ModelSpec) -> Path:
        runtime = str(spec.config.get("runtime", ""))
        return find_library(
            spec.name, spec.backend, runtime, spec.directory, spec.version_directory, self._backends
        )

    def _library(self, backend: str, file: Path, options: Mapping[str, str]) -> Library:
        options = {**self._told, **options}
        return Library(backend, file, options, _find_host(backend), self._policies)


class _NativeModel(BackendModel):
    """A model version: one worker with all instances."""

    def __init__(
        self,
        spec: ModelSpec,
        library: Library,
        settings: Settings,
        environment: Environment,
        calls: ServerCalls,
        monitor: ProcessMonitor,
    ) -> None:
        self._spec = spec
        self._library = library
        self._settings = settings
        self._environment = environment
        self._calls = calls
        self._monitor = monitor
        self._group = WorkerGroup()
        self._unclaimed: list[tuple[Placement, WorkerInstance]] | None = None
        self.notes = self._group.notes
        self.unload_grace_s = settings.unload_grace_s

    def create_instance(self, placement: Placement) -> BackendInstance:
        """The first call opens all instances."""
        if self._unclaimed is None:
            placements = place(self._spec.instance_groups)
            opened = WorkerInstance.open_shared(
                self._spec,
                placements,
                self._settings,
                self._environment,
                self._calls,
                self._monitor,
                self._group,
                self._library,
            )
            self._unclaimed = list(zip(placements, opened, strict=True))
        for entry in self._unclaimed:
            if entry[0] == placement:
                self._unclaimed.remove(entry)
                return entry[1]
        raise UnavailableError(f"model '{self._spec.name}' has no instance '{placement.name}' left")

    def close(self) -> None:
        for _, instance in self._unclaimed or ():
            instance.close()
        self._environment.release()


def find_libraries(
    backends: Path,
    told: Mapping[str, str],
    has_gpus: bool,
    policies: Mapping[str, Mapping[str, str]],
) -> FindLibrary:
    """Finds libraries, for the entry-point group ``conch.libraries``; see `FindLibrary`."""
    native = NativeBackend(backends, told, has_gpus, policies)

    def find(name: str, runtime: str, model_directory: Path | None, /) -> Backend | None:
        return native if has_library(name, runtime, model_directory, backends) else None

    return find


def _find_host(backend: str) -> Path:
    """The library of conch-native.

    Raises:
        UnavailableError: The package is not installed.
    """
    found = importlib.util.find_spec("conch_native")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        if (path := Path(folder, _HOST)).is_file():
            return path
    raise UnavailableError(
        f"backend '{backend}' is a library compiled for Triton, which needs the package conch-native: pip "
        f"install --find-links dist 'conch[native]', in a checkout after `make wheel`"
    )


def _settings(name: str, parameters: Mapping[str, str]) -> Settings:
    for key in _PYTHON_ONLY:
        if key in parameters:
            raise InvalidArgumentError(
                f"model '{name}': parameter '{key}' has no effect on a backend that is compiled for Triton: "
                f"leave it out"
            )
    if _STRATEGY in parameters:
        raise UnsupportedError(f"model '{name}': parameter '{_STRATEGY}': {NO_STRATEGY}")
    return Settings.read(name, parameters, {})


def _environment(
    name: str, file: Path, version_directory: Path, parameters: Mapping[str, str]
) -> Environment:
    """The server's environment, where the library finds what it needs beside it and the model."""
    added = read_variables(name, version_directory, parameters, {})
    given = added.get(_SEARCH_PATH, os.environ.get(_SEARCH_PATH, ""))
    folders = dict.fromkeys([str(file.parent), str(version_directory.absolute()), *given.split(":")])
    return server_environment({**added, _SEARCH_PATH: ":".join(folder for folder in folders if folder)})
