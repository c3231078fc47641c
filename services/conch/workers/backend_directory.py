"""Backends in a directory or beside a model: Python-based ones, and libraries compiled for Triton."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from conch.core.add_ons import load_add_ons
from conch.core.backend import Backend, FindBackend
from conch.core.errors import InvalidArgumentError
from conch.workers.python_based import PythonBasedBackend, has_model_file

DEFAULT_DIRECTORY = Path("/opt/tritonserver/backends")
"""Triton's directory of backends."""

FindLibrary = Callable[[str, str, Path | None], Backend | None]
"""Finds the backend that runs a library compiled for Triton.

Arguments are the backend's name, the config's ``runtime``, and the model's directory, if any; None if there
is no such library. An add-on has one by the entry-point group ``conch.libraries``: a function of the
directory of backends, facts of the server for libraries, use of GPUs, and host policies.
"""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def backends_within(
    directory: Path | None,
    find: Callable[[str], Backend],
    told: Mapping[str, str] | None = None,
    has_gpus: bool = False,
    policies: Mapping[str, Mapping[str, str]] | None = None,
) -> FindBackend:
    """Extends `find` by the backends in a directory, and libraries beside models.

    A name that `find` knows is a library's only if the config's ``runtime`` names the library.

    Args:
        directory: The directory of backends; None for Triton's.
        find: Finds installed backends.
        told: Facts of the server for libraries, besides their options.
        has_gpus: True if the server uses GPUs.
        policies: Host policies for instances of libraries.
    """
    root = (directory or DEFAULT_DIRECTORY).absolute()
    finders: list[FindLibrary] = [
        make(root, told or {}, has_gpus, policies or {}) for make in load_add_ons("conch.libraries").values()
    ]
    based: dict[str, PythonBasedBackend] = {}

    def library(name: str, runtime: str, model_directory: Path | None) -> Backend | None:
        return next(filter(None, (each(name, runtime, model_directory) for each in finders)), None)

    def get(name: str, runtime: str = "", model_directory: Path | None = None, /) -> Backend:
        known = _NAME.fullmatch(name) is not None
        if known and runtime.endswith(".so"):
            found = library(name, runtime, model_directory)
            if found is not None:
                return found
        try:
            return find(name)
        except InvalidArgumentError:
            found = library(name, runtime, model_directory) if known else None
            if found is not None:
                return found
            if not (known and has_model_file(root / name)):
                raise
        return based.setdefault(name, PythonBasedBackend(root / name))

    return get
