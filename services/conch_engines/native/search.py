"""Finds the file of a backend that is compiled for Triton, in Triton's order and with its texts."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conch.core.errors import InvalidArgumentError

PYTHON_FILE = "model.py"
"""A backend directory may have this file instead of a library, and a config's ``runtime`` asks for it."""

BATCH_STRATEGY = "batchstrategy.so"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class BackendFile:
    """A backend's library, or its ``model.py``; `directory` is the backend's artifact directory."""

    path: Path
    directory: Path

    @property
    def is_library(self) -> bool:
        """False for a Python-based backend."""
        return self.path.name != PYTHON_FILE


def find_backend_file(
    backend: str, runtime: str, model: str, version_directory: Path, backend_directory: Path | None
) -> BackendFile:
    """Finds a backend's file for a model version.

    Args:
        backend: The config's ``backend``.
        runtime: The config's ``runtime``, possibly empty.
        model: The model's name.
        version_directory: The version's directory, inside the model's.
        backend_directory: The directory with one for each backend; None for none.

    Raises:
        InvalidArgumentError: There is none, or it is outside its directory; Triton's text.
    """
    shared = _shared_directory(backend, backend_directory)
    if runtime == PYTHON_FILE:
        directories: Sequence[Path] = () if shared is None else (shared,)
    else:
        directories = library_directories(backend, version_directory, backend_directory)
    name = runtime or f"libtriton_{backend}.so"
    if not _stays_inside(name):
        raise InvalidArgumentError(
            f"backend library name '{name}' escapes backend directory '{shared or version_directory}', for "
            f"model '{model}', check model config runtime field"
        )
    found = _first(name, directories)
    if found is None and not runtime and shared is not None:
        found = _first(PYTHON_FILE, [shared])
    if found is not None:
        return found
    if not runtime:
        raise InvalidArgumentError(
            f"unable to find backend library for backend '{backend}', try specifying runtime on the model "
            f"configuration."
        )
    searched = "".join(f"'{directory / name}' " for directory in directories)
    raise InvalidArgumentError(
        f"unable to find backend library '{runtime}' for model '{model}', searched: {searched}"
    )


def library_directories(
    backend: str, version_directory: Path, backend_directory: Path | None
) -> Sequence[Path]:
    """The directories of a backend's library, in the order of the search."""
    own = (version_directory, version_directory.parent)
    shared = _shared_directory(backend, backend_directory)
    return own if shared is None else (*own, shared)


def _shared_directory(backend: str, backend_directory: Path | None) -> Path | None:
    if backend_directory is None or not _NAME.fullmatch(backend):
        return None
    return backend_directory / backend


def _first(name: str, directories: Sequence[Path]) -> BackendFile | None:
    for directory in directories:
        if (directory / name).is_file():
            return BackendFile(directory / name, directory)
    return None


def _stays_inside(name: str) -> bool:
    path = os.path.normpath(name)
    return not os.path.isabs(path) and path.split("/")[0] != ".."
