"""Finds the library of a backend that is compiled for Triton. Pure, but for the existence of files."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from conch.core.errors import InvalidArgumentError, UnsupportedError

NO_STRATEGY = "custom batching by a library is not supported: use the settings of dynamic_batching"


def library_name(backend: str, runtime: str) -> str:
    """The file name of a backend's library; `runtime` is the config's and may be empty."""
    return runtime or f"libtriton_{backend}.so"


def candidates(
    backend: str, runtime: str, directory: Path, version_directory: Path | None, backends: Path
) -> list[Path]:
    """Lists the paths at which the library may be, in the order of search.

    Args:
        backend: The backend's name.
        runtime: The config's ``runtime``, possibly empty.
        directory: The model's directory.
        version_directory: The version's directory; None for any version.
        backends: The directory of backends.
    """
    name = library_name(backend, runtime)
    versions = _versions(directory) if version_directory is None else [version_directory]
    return [*(version / name for version in versions), directory / name, backends / backend / name]


def has_library(backend: str, runtime: str, directory: Path | None, backends: Path) -> bool:
    """True if there is a library of the backend; without `directory`, in the directory of backends."""
    if runtime and not runtime.endswith(".so"):
        return False
    if runtime not in ("", library_name(backend, "")):
        return True  # asked for by its name: `find_library` says where it is, or that it is not
    if directory is None:
        return (backends / backend / library_name(backend, runtime)).is_file()
    return any(path.is_file() for path in candidates(backend, runtime, directory, None, backends))


def find_library(
    model: str, backend: str, runtime: str, directory: Path, version_directory: Path, backends: Path
) -> Path:
    """The library of a model version.

    Raises:
        InvalidArgumentError: There is none, or the config's ``runtime`` leaves the directories.
        UnsupportedError: A library for custom batching is there.
    """
    path = PurePosixPath(runtime)
    if path.is_absolute() or ".." in path.parts:
        raise InvalidArgumentError(
            f"backend library name '{runtime}' escapes backend directory '{backends / backend}', for model "
            f"'{model}', check model config runtime field"
        )
    places = candidates(backend, runtime, directory, version_directory, backends)
    for place in places:
        if (strategy := place.with_name("batchstrategy.so")).is_file():
            raise UnsupportedError(f"{NO_STRATEGY}; '{strategy}' is one")
    for place in places:
        if place.is_file():
            return place.absolute()
    if not runtime:
        raise InvalidArgumentError(
            f"unable to find backend library for backend '{backend}', try specifying runtime on the model "
            f"configuration."
        )
    searched = "".join(f"'{place}' " for place in places)
    raise InvalidArgumentError(
        f"unable to find backend library '{runtime}' for model '{model}', searched: {searched}"
    )


def _versions(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(each for each in directory.iterdir() if each.name.isdigit())
