"""Checks models whose backend is a library compiled for Triton, for `conch check`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from conch.backends import backend_names
from conch.core.errors import InvalidArgumentError
from conch.core.file_checks import FileFinding
from conch_engines.native.inspection import Inspection, inspect_library
from conch_engines.native.loader_search import worker_settings
from conch_engines.native.search import BATCH_STRATEGY, BackendFile, find_backend_file, library_directories

_STRATEGY_PARAMETER = "TRITON_BATCH_STRATEGY_PATH"
_ATTRIBUTES = "TRITONBACKEND_GetBackendAttribute"


def check_libraries(
    config: Mapping[str, Any], version_directory: Path, backend_directory: Path | None
) -> Iterator[FileFinding]:
    """Checks a version if a library runs it."""
    found = _library(config, version_directory, backend_directory)
    if found is None:
        return
    status = found.path.stat()
    inspection = _inspect(found, version_directory, (status.st_ino, status.st_size, status.st_mtime_ns))
    yield from inspection.findings
    yield from _batching_strategies(config, version_directory, backend_directory)
    if _ATTRIBUTES in inspection.exports and not config["instance_group"]:
        yield FileFinding(
            "note",
            "the library is not asked for the instance groups that it prefers: that would run it",
            found.path,
        )


def _library(
    config: Mapping[str, Any], version_directory: Path, backend_directory: Path | None
) -> BackendFile | None:
    """The library that runs a model, unless conch's own backend or a Python-based one does."""
    backend, runtime = config["backend"], config["runtime"]
    try:
        found = find_backend_file(backend, runtime, config["name"], version_directory, backend_directory)
    except InvalidArgumentError:
        return None  # a problem of the config
    if not found.is_library or (not runtime.endswith(".so") and backend in backend_names()):
        return None
    return found


@lru_cache(maxsize=64)
def _inspect(found: BackendFile, version_directory: Path, identity: tuple[int, int, int]) -> Inspection:
    """Models may share a library; `identity` tells its contents apart."""
    return inspect_library(found.path, worker_settings((found.directory, version_directory)))


def _batching_strategies(
    config: Mapping[str, Any], version_directory: Path, backend_directory: Path | None
) -> Iterator[FileFinding]:
    text = "custom batching by a library is not supported: use the settings of dynamic_batching"
    for directory in library_directories(config["backend"], version_directory, backend_directory):
        if (directory / BATCH_STRATEGY).is_file():
            yield FileFinding("error", text, directory / BATCH_STRATEGY)
    if _STRATEGY_PARAMETER in config["parameters"]:
        yield FileFinding("error", text, path=f'parameters["{_STRATEGY_PARAMETER}"]')
