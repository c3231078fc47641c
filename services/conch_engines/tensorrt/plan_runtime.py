"""Plans and TensorRT's runtime: finds a model's plan, reads its version, makes engines of it.

Owns: the runtime and its log. TensorRT writes its reasons to the log and returns None, so errors quote the
log's last errors. Threads: engines are made under a lock.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import threading
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from conch.core.errors import InternalError, InvalidArgumentError, UnavailableError
from conch.core.file_formats import TENSORRT, hint, identify

log = logging.getLogger(__name__)

_MODULES = ("tensorrt", "tensorrt_lean", "tensorrt_lean_bindings")
_VERSION_AT = 24
"""Offset of the version in a plan's header, four bytes; trtexec reads it there, too."""
_MOST_ERRORS = 4


def import_tensorrt() -> Any:
    """The module of TensorRT, or of its lean runtime, which runs version-compatible plans."""
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    raise ModuleNotFoundError("No module named 'tensorrt'", name="tensorrt")


def plan_name(config: Mapping[str, Any], model_file: str, compute_capability: str) -> str:
    """Name of the plan in the version directory: ``cc_model_filenames`` comes before the default."""
    names = config.get("cc_model_filenames") or {}
    name = str(names.get(compute_capability) or model_file)
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise InvalidArgumentError(
            f"cc_model_filenames: '{name}' must stay within the directory of model '{config.get('name', '')}'"
        )
    return name


def plan_version(path: Path) -> str:
    """The version of TensorRT that built a plan; empty if the file does not tell."""
    with path.open("rb") as file:
        header = file.read(_VERSION_AT + 4)
    # Zero is the only layout of the header that is known.
    if len(header) < _VERSION_AT + 4 or header[:8] != b"ftrt\0\0\0\0":
        return ""
    return ".".join(str(part) for part in header[_VERSION_AT:])


def check_plan(path: Path, model: str) -> None:
    """Checks that a plan exists and is one."""
    if not path.is_file():
        raise UnavailableError(f"unable to find '{path}' for model instance '{model}'")
    found = identify(path)
    if found is not None and found is not TENSORRT:
        raise InternalError(f"unable to load plan file '{path}' of model '{model}'{hint(path)}")


class PlanRuntime:
    """TensorRT's runtimes of this process: one that refuses code in plans, and one that allows it."""

    def __init__(self, trt: Any) -> None:
        self._trt = trt
        self._lock = threading.Lock()  # guards what follows, while an engine is made
        self._runtimes: dict[bool, Any] = {}
        self._plugins: set[str] = set()
        self._log = _logger(trt)

    def engine(self, path: Path, model: str, allows_code: bool, plugins: tuple[str, ...]) -> Any:
        """Makes an engine on the current device, which must exist: TensorRT crashes without one."""
        check_plan(path, model)
        with self._lock:
            self._load_plugins(plugins)
            runtime = self._runtime(allows_code)
            self._log.errors.clear()
            engine = runtime.deserialize_cuda_engine(path.read_bytes())
            errors = "; ".join(self._log.errors)
        if engine is None:
            raise InternalError(
                f"unable to load plan file '{path}' of model '{model}': {self._reason(path)}"
                f"{f' (TensorRT says: {errors})' if errors else ''}{hint(path) if not _is_plan(path) else ''}"
            )
        return engine

    def last_errors(self) -> str:
        """Last errors that TensorRT logged on this thread."""
        return "; ".join(self._log.errors)

    def forget_errors(self) -> None:
        """Forgets the errors of this thread, before a call whose errors are wanted."""
        self._log.errors.clear()

    def _runtime(self, allows_code: bool) -> Any:
        runtime = self._runtimes.get(allows_code)
        if runtime is None:
            runtime = self._trt.Runtime(self._log)
            if allows_code:
                runtime.engine_host_code_allowed = True
            self._runtimes[allows_code] = runtime
        return runtime

    def _load_plugins(self, paths: tuple[str, ...]) -> None:
        """Loads libraries of plugins, each once; one that fails is only logged, as in Triton."""
        if not self._plugins and hasattr(self._trt, "init_libnvinfer_plugins"):
            self._trt.init_libnvinfer_plugins(self._log, "")
            self._plugins.add("")
        for path in paths:
            if path in self._plugins:
                continue
            self._plugins.add(path)
            try:
                ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
            except OSError as error:
                log.error("TensorRT plugin '%s' can't be loaded: %s", path, error)

    def _reason(self, path: Path) -> str:
        built, here = plan_version(path), str(self._trt.__version__)
        if built and any(one != other for one, other in zip(built.split("."), here.split("."), strict=False)):
            return (
                f"it was built with TensorRT {built} and this server has TensorRT {here}; rebuild it with "
                f"{here}, as by `trtexec --onnx=model.onnx --saveEngine={path.name}`, or build it with "
                f"--versionCompatible and start the server with "
                f"--backend-config=tensorrt,version-compatible=true"
            )
        origin = f"it was built with TensorRT {built}" if built else "it does not tell its version"
        return (
            f"{origin}, this server has TensorRT {here}. A plan runs on the GPU architecture and operating "
            f"system that it was built on; rebuild it here, as by `trtexec --onnx=model.onnx "
            f"--saveEngine={path.name}`, or build it with --hardwareCompatibilityLevel=ampere+"
        )


def _is_plan(path: Path) -> bool:
    return identify(path) is TENSORRT


def _logger(trt: Any) -> Any:
    """A logger of TensorRT that writes to Python's and keeps the last errors."""
    levels = {"INTERNAL_ERROR": 40, "ERROR": 40, "WARNING": 30, "INFO": 10, "VERBOSE": 5}

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            # By name: the bindings require it.
            trt.ILogger.__init__(self)
            self._local = threading.local()

        @property
        def errors(self) -> list[str]:
            """The last errors of the calling thread; TensorRT logs on it."""
            if not hasattr(self._local, "errors"):
                self._local.errors = []
            errors: list[str] = self._local.errors
            return errors

        def log(self, severity: Any, message: str) -> None:
            level = levels.get(severity.name, 10)
            log.log(level, "TensorRT: %s", message)
            if level >= logging.ERROR:
                self.errors.append(message)
                del self.errors[:-_MOST_ERRORS]

    return Log()
