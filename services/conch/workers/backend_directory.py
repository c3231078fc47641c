"""Backends in a directory or beside a model: Python-based ones, and libraries compiled for Triton."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from conch.core.backend import Backend, FindBackend
from conch.core.errors import InvalidArgumentError
from conch.workers.native.library_search import DEFAULT_DIRECTORY, has_library
from conch.workers.native.native_backend import NativeBackend
from conch.workers.python_based import PythonBasedBackend, has_model_file

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
    native = NativeBackend(root, told or {}, has_gpus, policies or {})
    based: dict[str, PythonBasedBackend] = {}

    def get(name: str, runtime: str = "", model_directory: Path | None = None, /) -> Backend:
        known = _NAME.fullmatch(name) is not None
        if known and runtime.endswith(".so") and has_library(name, runtime, model_directory, root):
            return native
        try:
            return find(name)
        except InvalidArgumentError:
            if known and has_library(name, runtime, model_directory, root):
                return native
            if not (known and has_model_file(root / name)):
                raise
        return based.setdefault(name, PythonBasedBackend(root / name))

    return get
