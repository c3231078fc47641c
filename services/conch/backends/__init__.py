"""Finds backends by name through entry points and imports each on first use."""

from __future__ import annotations

import threading
from importlib.metadata import EntryPoint
from pathlib import Path

from conch.core.add_ons import entry_points
from conch.core.backend import Backend
from conch.core.errors import InvalidArgumentError, UnavailableError

GROUP = "conch.backends"
"""Entry-point group: each entry maps a backend's name to its `Backend` class."""

_PLATFORMS = {
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "torch_aoti": "pytorch",
    "tensorrt_plan": "tensorrt",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
}

_ADVICE = {
    "torch": (
        "; on a machine without a GPU run `pip install torch --index-url "
        "https://download.pytorch.org/whl/cpu` before, as pip installs 5.8 GB with CUDA otherwise"
    )
}
"""Advice before the installation of a backend, by the missing package."""

loaded: dict[str, Backend] = {}
"""The backends that this process has imported, by name."""
_lock = threading.Lock()


def load_backend(name: str, runtime: str = "", directory: Path | None = None, /) -> Backend:
    """Returns the backend with this name, or with one of Triton's platform names; always the same object.

    See `FindBackend`; the name alone decides.

    Raises:
        InvalidArgumentError: The backend is unknown.
        UnavailableError: A package that it needs is not installed, or can't be imported.
    """
    name = _PLATFORMS.get(name, name)
    with _lock:
        backend = loaded.get(name)
        if backend is None:
            backend = loaded[name] = _import(name)
        return backend


def backend_names() -> tuple[str, ...]:
    """Names of all registered backends, installed dependencies or not; imports none."""
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
        advice = _hint(entry) + _ADVICE.get(error.name or "", "")
        raise UnavailableError(
            f"backend '{name}' needs the Python package '{error.name}', which is not installed{advice}"
        ) from error
    except (ImportError, OSError) as error:  # OSError: a shared library is missing or broken
        raise UnavailableError(f"backend '{name}' can't import its engine: {error}") from error
    if not isinstance(backend, Backend):
        raise InvalidArgumentError(f"backend '{name}': '{entry.value}' is not a conch.core.backend.Backend")
    return backend


def _hint(entry: EntryPoint) -> str:
    """Install advice: the extra that the entry point names, or one with the backend's name."""
    distribution = entry.dist
    if distribution is None:
        return ""
    provided = distribution.metadata.get_all("Provides-Extra") or ()
    extra = next((extra for extra in (*entry.extras, entry.name) if extra in provided), None)
    return "" if extra is None else f"; install it with `pip install '{distribution.name}[{extra}]'`"
