"""Finds backends by name through entry points, and imports them when the first model needs one."""

from __future__ import annotations

import threading
from importlib.metadata import EntryPoint, entry_points

from conch.core.backend import Backend
from conch.core.errors import InvalidArgumentError

GROUP = "conch.backends"
"""The entry-point group; each entry names a backend and points to its `Backend` class."""

_PLATFORMS = {
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "tensorrt_plan": "tensorrt",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
}

_loaded: dict[str, Backend] = {}
_lock = threading.Lock()


def load_backend(name: str) -> Backend:
    """The backend of a name or of one of Triton's platform names; the same object every time.

    Raises:
        InvalidArgumentError: There is no such backend, or something it needs is not installed.
    """
    name = _PLATFORMS.get(name, name)
    with _lock:
        backend = _loaded.get(name)
        if backend is None:
            backend = _loaded[name] = _import(name)
        return backend


def backend_names() -> tuple[str, ...]:
    """Names of all backends there are, whether or not what they need is installed; none is imported."""
    return tuple(sorted({entry.name for entry in entry_points(group=GROUP)}))


def _import(name: str) -> Backend:
    found = entry_points(group=GROUP, name=name)
    if not found:
        raise InvalidArgumentError(
            f"unable to find backend library for backend '{name}', try specifying runtime on the model "
            f"configuration."
        )
    entry = next(iter(found))
    try:
        backend = entry.load()()
    except ModuleNotFoundError as error:
        raise InvalidArgumentError(
            f"backend '{name}' needs the Python package '{error.name}', which is not installed{_hint(entry)}"
        ) from error
    if not isinstance(backend, Backend):
        raise InvalidArgumentError(f"backend '{name}': '{entry.value}' is not a conch.core.backend.Backend")
    return backend


def _hint(entry: EntryPoint) -> str:
    """How to install what is missing, where the backend's distribution has an extra of its name."""
    distribution = entry.dist
    if distribution is None or entry.name not in (distribution.metadata.get_all("Provides-Extra") or ()):
        return ""
    return f"; install it with `pip install {distribution.name}[{entry.name}]`"
