"""Checks models whose backend is a library compiled for Triton, for `conch check`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from conch.backends import backend_names
from conch.core.errors import ConchError
from conch.core.file_checks import FileFinding
from conch.workers.backend_directory import DEFAULT_DIRECTORY
from conch_engines.native.inspection import Inspection, inspect_library
from conch_engines.native.library_search import find_library, has_library
from conch_engines.native.loader_search import worker_settings

_ATTRIBUTES = "TRITONBACKEND_GetBackendAttribute"


def check_libraries(
    config: Mapping[str, Any], version_directory: Path, backend_directory: Path | None
) -> Iterator[FileFinding]:
    """Checks a version if a library runs it."""
    found = _library(config, version_directory, backend_directory)
    if found is None:
        return
    status = found.stat()
    inspection = _inspect(found, version_directory, (status.st_ino, status.st_size, status.st_mtime_ns))
    yield from inspection.findings
    if _ATTRIBUTES in inspection.exports and not config["instance_group"]:
        yield FileFinding(
            "note",
            "the library is not asked for the instance groups that it prefers: that would run it",
            found,
        )


def _library(
    config: Mapping[str, Any], version_directory: Path, backend_directory: Path | None
) -> Path | None:
    """The library that runs a model; None for conch's own backends, and where the load says what is wrong."""
    backend, runtime, directory = config["backend"], config["runtime"], version_directory.parent
    backends = backend_directory or DEFAULT_DIRECTORY
    if not runtime.endswith(".so") and backend in backend_names():
        return None
    if not has_library(backend, runtime, directory, backends):
        return None
    try:
        return find_library(config["name"], backend, runtime, directory, version_directory, backends)
    except ConchError:
        return None


@lru_cache(maxsize=64)
def _inspect(library: Path, version_directory: Path, identity: tuple[int, int, int]) -> Inspection:
    """Models may share a library; `identity` tells its contents apart."""
    return inspect_library(library, worker_settings((library.parent, version_directory)))
