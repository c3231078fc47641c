"""`WorkerEngineBackend`: an engine that runs as a Python model of conch's own, mostly in a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conch.core.backend import BackendModel
from conch.core.spec import ModelSpec
from conch.workers.python_based import PythonBasedBackend

if TYPE_CHECKING:
    from conch.core.bls import ServerCalls


class WorkerEngineBackend(PythonBasedBackend):
    """A backend whose code is conch's, and whose load checks the model's files first, as the worker would."""

    completion_runs_code = False
    passes_parameters = False
    checks_names = False

    def load(self, spec: ModelSpec) -> BackendModel:
        """Loads a model version."""
        self.check(spec)
        return super().load(spec)

    def load_within(self, spec: ModelSpec, calls: ServerCalls) -> BackendModel:
        """As `load`."""
        self.check(spec)
        return super().load_within(spec, calls)
