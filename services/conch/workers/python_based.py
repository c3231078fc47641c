"""Python-based backends: one ``model.py`` shared by all models of a backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conch.core.backend import BackendModel
from conch.core.spec import ModelSpec
from conch.workers.environment_spec import EnvironmentSpec
from conch.workers.python_backend import PythonBackend

if TYPE_CHECKING:
    from conch.core.bls import ServerCalls

_FILE = "model.py"


class PythonBasedBackend(PythonBackend):
    """A backend whose code is in its own directory.

    A ``model.py`` in the model's version directory, or in its directory, takes precedence.
    """

    needs_model_file = False

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    def complete_config(
        self, config: dict[str, Any], version_directory: Path, options: Mapping[str, str]
    ) -> dict[str, Any]:
        """Calls `auto_complete_config` of the code that would run the model."""
        written = config.get("default_model_filename", "")
        file = self._file(version_directory, written or _FILE)
        completed = super().complete_config(
            {**config, "default_model_filename": file}, version_directory, options
        )
        return {**completed, "default_model_filename": written}

    def has_environment(self, spec: ModelSpec) -> bool:
        """True if a model version has an environment of its own."""
        return EnvironmentSpec.of(self._with_file(spec)).own is not None

    def check(self, spec: ModelSpec) -> None:
        """Validates the model with the file that `load` would use."""
        super().check(self._with_file(spec))

    def load(self, spec: ModelSpec) -> BackendModel:
        """Loads a model without access to the server."""
        return super().load(self._with_file(spec))

    def load_within(self, spec: ModelSpec, calls: ServerCalls) -> BackendModel:
        """Loads a model that may call the server."""
        return super().load_within(self._with_file(spec), calls)

    def _with_file(self, spec: ModelSpec) -> ModelSpec:
        return replace(spec, model_file=self._file(spec.version_directory, spec.model_file))

    def _file(self, version_directory: Path, name: str) -> str:
        """Path of the code from the version directory; a model file that is not Python is data."""
        name = name if name.endswith(".py") else _FILE
        if (version_directory / name).is_file():
            return name
        own = version_directory.parent / _FILE
        return str(own if own.is_file() else self._directory / _FILE)


def has_model_file(directory: Path) -> bool:
    """True if the directory of a backend has a `model.py`."""
    return (directory / _FILE).is_file()


def based_names(directory: Path | None) -> list[str]:
    """Names of the backends in a backend directory."""
    if directory is None or not directory.is_dir():
        return []
    return sorted(each.name for each in directory.iterdir() if has_model_file(each))
