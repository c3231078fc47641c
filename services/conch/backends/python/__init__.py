"""Runs models written for Triton's Python backend, unchanged, in this process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conch.core.backend import Backend, BackendInstance, BackendModel
from conch.core.instances.placement import Placement
from conch.core.spec import ModelSpec

if TYPE_CHECKING:
    from conch.core.calls import ServerCalls

log = logging.getLogger(__name__)


class PythonBackend(Backend):
    """The backend ``python``: a file with a class `TritonPythonModel`."""

    default_model_file = "model.py"
    completion_runs_code = True

    def complete_config(
        self, config: dict[str, Any], version_directory: Path, options: Mapping[str, str]
    ) -> dict[str, Any]:
        """Asks the model's `auto_complete_config`, in a load of the file that is forgotten afterwards."""
        from conch.backends.python.config import auto_complete
        from conch.backends.python.instance import load_code

        file_name = config.get("default_model_filename") or self.default_model_file
        code = load_code(config.get("name", ""), version_directory, file_name)
        try:
            return auto_complete(code.module.TritonPythonModel, config)
        finally:
            code.close()

    def load(self, spec: ModelSpec) -> BackendModel:
        """Loads nothing yet: each instance loads the file for itself, as if it had its own process."""
        return self._load(spec, None)

    def load_within(self, spec: ModelSpec, calls: ServerCalls) -> BackendModel:
        """The same, for models that may call the server."""
        return self._load(spec, calls)

    def _load(self, spec: ModelSpec, calls: ServerCalls | None) -> BackendModel:
        if spec.batch_inputs or spec.batch_outputs:
            log.warning(
                "model '%s': 'batch_input' and 'batch_output' have no effect, as a Python model gets each "
                "request as it is and answers it by itself",
                spec.name,
            )
        return _PythonModel(spec, calls)


class _PythonModel(BackendModel):
    def __init__(self, spec: ModelSpec, calls: ServerCalls | None) -> None:
        self._spec = spec
        self._calls = calls

    def create_instance(self, placement: Placement) -> BackendInstance:
        from conch.backends.python.instance import open_instance

        return open_instance(self._spec, placement, self._calls)
