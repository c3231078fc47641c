"""The models of a SageMaker multi-model endpoint: SageMaker names them, and loads and unloads them.

Statuses are SageMaker's contract: 409 for a name that is loaded, 507 where memory runs out, so that SageMaker
unloads other models and tries again. Owns: the table of names. Threads and locks: any thread; one lock, never
held while loading.
"""

from __future__ import annotations

import os
import re
import threading
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from conch.core.errors import (
    AlreadyExistsError,
    ConchError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from conch.core.model_control import ArchiveControl

PAGE_SIZE = 100
"""Models on one page of the list."""
UNLOAD_S = 350.0
"""Time for requests in flight at an unload; SageMaker waits for 360 s."""

_MEMORY_TEXTS = (
    "cuda out of memory",
    "cuda_out_of_memory",
    "out of memory",
    "memoryerror",
    "outofmemory",
    "oom",
    "dst tensor is not initialized",
    "src tensor is not initialized",
    "cudnn_status_not_initialized",
    "cublas_status_alloc_failed",
    "cublas_status_not_initialized",
    "failed to allocate memory",
    "bad_alloc",
    "cannot allocate memory",
    "no space left on device",
    "killed by signal 9 (sigkill)",  # a worker, by the kernel
)
_BELOW_ROOT = re.compile(r"/[^/]+/model(/[^/]+)*")
_MEMORY = re.compile("|".join(rf"\b{re.escape(text)}" for text in _MEMORY_TEXTS), re.IGNORECASE)


class OutOfMemoryError(ResourceExhaustedError):
    """The memory of the host or a GPU has run out."""

    http_status = 507


class LoadedError(AlreadyExistsError):
    """A model of this name is loaded already."""

    http_status = 409


class RefusedLoadError(InvalidArgumentError):
    """The model can't be loaded."""


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A model that SageMaker has loaded.

    Attributes:
        name: SageMaker's name for it.
        url: The directory of its archive, as Triton shows it: without `model` at the end.
    """

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class ModelPage:
    """A page of the list; `next_token` continues it, or is empty."""

    models: tuple[RegisteredModel, ...]
    next_token: str


class SageMakerModels:
    """The models of one endpoint.

    Args:
        archives: Loads and unloads their directories.
        root: Directory in which SageMaker puts them.
        main: Directory of the model within an archive, where several could be meant.
        unload_s: Time for requests in flight at an unload.
    """

    def __init__(
        self, archives: ArchiveControl, root: Path, main: str = "", unload_s: float = UNLOAD_S
    ) -> None:
        self._archives = archives
        self._root = root
        self._main = main
        self._unload_s = unload_s
        self._lock = threading.Lock()
        # Identifiers by name; empty while the model is being loaded or unloaded.
        self._models: dict[str, tuple[str, RegisteredModel]] = {}

    def load(self, name: str, url: str) -> None:
        """Loads a model and returns when it is ready.

        Raises:
            LoadedError: A model of this name, or of this directory, is loaded or being loaded.
            OutOfMemoryError: Memory has run out; nothing of the model is left in memory.
            InvalidArgumentError: Name or URL are not SageMaker's, or the model can't be loaded.
        """
        if not name.strip() or not name.isprintable() or "/" in name:
            raise InvalidArgumentError(f"Invalid \"model_name\" '{name}': expected a name without slashes")
        archive, directory = self._directories(url)
        model = RegisteredModel(name, archive)
        with self._lock:
            if name in self._models:
                raise LoadedError(f"model '{name}' is loaded already, from '{self._models[name][1].url}'")
            self._models[name] = "", model
        identifier = ""
        try:
            identifier = self._archives.register(name, directory, self._main)
        except AlreadyExistsError as error:
            raise LoadedError(error.message) from None
        except ConchError as error:
            raise _refused(error, name, directory) from None
        finally:
            with self._lock:
                if identifier:
                    self._models[name] = identifier, model
                else:
                    del self._models[name]

    def unload(self, name: str) -> None:
        """Unloads a model and returns when it has left memory. Raises NotFoundError: it is not loaded."""
        with self._lock:
            identifier, model = self._models.get(name, ("", None))
            if not identifier or model is None:
                raise _not_loaded(name)
            self._models[name] = "", model
        try:
            self._archives.unregister(identifier, self._unload_s)
        finally:
            with self._lock:
                del self._models[name]

    def get(self, name: str) -> RegisteredModel:
        """A loaded model. Raises NotFoundError: it is not loaded."""
        identifier, model = self._models.get(name, ("", None))
        if not identifier or model is None:
            raise _not_loaded(name)
        return model

    def page(self, token: str) -> ModelPage:
        """The loaded models by name, from a token of the page before on."""
        with self._lock:
            loaded = {name: model for name, (identifier, model) in self._models.items() if identifier}
        names = sorted(loaded)
        names = names[bisect_right(names, token) :]
        shown = names[:PAGE_SIZE]
        return ModelPage(tuple(loaded[name] for name in shown), shown[-1] if len(names) > len(shown) else "")

    def identifier(self, name: str) -> str:
        """The identifier of a loaded model for requests. Raises NotFoundError: it is not loaded."""
        identifier, _ = self._models.get(name, ("", None))
        if not identifier:
            raise _not_loaded(name)
        return identifier

    def _directories(self, url: str) -> tuple[str, Path]:
        """The directory of an archive, and that of its model, links followed: no link changes it later."""
        path = os.path.normpath(url)
        form = f"{self._root}/<hash>/model[/<subdir>]"
        if "\0" in url or not _is_below(os.fspath(self._root), path):
            raise InvalidArgumentError(f"Invalid \"url\" '{url}': expected a path of the form {form}")
        directory = os.path.realpath(path)
        if not _is_below(os.path.realpath(self._root), directory):
            raise InvalidArgumentError(f"Invalid \"url\" '{url}': it leads out of {form}")
        return os.fspath(self._root / path[len(os.fspath(self._root)) :].split("/")[1]), Path(directory)


def _is_below(root: str, path: str) -> bool:
    return path.startswith(root) and _BELOW_ROOT.fullmatch(path, len(root)) is not None


def is_memory_error(text: str) -> bool:
    """True if an error text says that memory has run out."""
    return _MEMORY.search(text) is not None


def _refused(error: ConchError, name: str, directory: Path) -> ConchError:
    text = f"{getattr(error, 'reason', '')} {error.message}"
    # Name and directory may be any words.
    if is_memory_error(text.replace(str(directory), "").replace(f"'{name}'", "")):
        return OutOfMemoryError(error.message)
    return RefusedLoadError(error.message)


def _not_loaded(name: str) -> NotFoundError:
    return NotFoundError(f"model '{name}' is not loaded")
