"""Session and run options of ONNX Runtime from a model's config."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conch.core.engine_text import engine_text
from conch.core.errors import InvalidArgumentError
from conch.core.spec import ModelSpec
from conch_engines.model_config import boolean, child, integer, threads_per_instance
from conch_engines.model_paths import resolves

SHRINKAGE = "memory.enable_memory_arena_shrinkage"
"""Model parameter, a run option of the same name: arenas to shrink after each run, as ``cpu:0;gpu:0``."""

GLOBAL_POOL = "enable-global-threadpool"
"""Backend option: whether all sessions share one pool of threads; the models' own counts are ignored then."""

POOL_SIZES = ("intra_op_thread_count", "inter_op_thread_count")
"""Backend options: sizes of that pool, 0 for one thread per core."""

PARAMETERS = (
    *("execution_mode", "intra_op_thread_count", "inter_op_thread_count"),
    *("enable_mem_arena", "enable_mem_pattern"),
    "session.",
    SHRINKAGE,
)
"""Model parameters that are read here; names that begin with ``session.`` are ONNX Runtime's own."""


def session_options(ort: Any, spec: ModelSpec) -> Any:
    """Creates the `onnxruntime.SessionOptions` of one instance."""
    parameters = spec.parameters
    options = ort.SessionOptions()
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = {
        -1: levels.ORT_ENABLE_BASIC,
        1: levels.ORT_ENABLE_EXTENDED,
        2: levels.ORT_DISABLE_ALL,
    }.get(_graph_level(spec), levels.ORT_ENABLE_ALL)
    mode = integer(parameters, "execution_mode", 0)
    if mode not in (0, 1):
        raise InvalidArgumentError(
            f"Invalid configuration value provided. Expected values for execution_mode are 0 or 1 but got "
            f"{mode}."
        )
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL if mode else ort.ExecutionMode.ORT_SEQUENTIAL
    # ONNX Runtime defaults to one spinning thread per core in each session, which suits a single model. Here
    # instances divide the cores among them, and idle threads sleep.
    options.intra_op_num_threads = integer(parameters, "intra_op_thread_count", 0) or threads_per_instance(
        spec
    )
    inter_threads = integer(parameters, "inter_op_thread_count", 0)
    if inter_threads > 0:
        options.inter_op_num_threads = inter_threads
    options.enable_cpu_mem_arena = boolean(parameters, "enable_mem_arena", True)
    options.enable_mem_pattern = boolean(parameters, "enable_mem_pattern", True)
    entries = {"session.intra_op.allow_spinning": "0", "session.inter_op.allow_spinning": "0"}
    entries.update((key, value) for key, value in parameters.items() if key.startswith("session."))
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    for library in custom_operators(spec):
        try:
            options.register_custom_ops_library(str(library))
        except Exception as error:  # of the engine, or of the library that it runs
            raise InvalidArgumentError(
                f"model_operations.op_library_filename '{library.name}' of model '{spec.name}' can't be "
                f"loaded: {engine_text(error)}"
            ) from error
    return options


@contextmanager
def finding_weights(options: Any, model: Path) -> Iterator[None]:
    """Has sessions that are made within it find the external weights of a model that they get as bytes."""
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(model.parent)
    )
    files: dict[str, mmap.mmap | bytes] = {}
    if not resolves(model):
        # ONNX Runtime refuses its weights from 1.26 on, and takes their content since then.
        add_files = getattr(options, "add_external_initializers_from_files_in_memory", None)
        if add_files is not None:
            files = _mapped_files(model.parent)
            add_files(list(files), list(files.values()), list(map(len, files.values())))
    yield


def _mapped_files(directory: Path) -> dict[str, mmap.mmap | bytes]:
    """The content of all files of a directory, by relative path; links could lead out of it."""
    found: dict[str, mmap.mmap | bytes] = {}
    for folder, _, names in os.walk(directory):
        for path in (Path(folder, name) for name in names):
            if stat.S_ISREG(path.lstat().st_mode):
                with path.open("rb") as file:
                    empty = not os.fstat(file.fileno()).st_size  # which can't be mapped
                    content = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                found[str(path.relative_to(directory))] = content
    return found


def run_options(ort: Any, spec: ModelSpec) -> Any:
    """Creates the `onnxruntime.RunOptions` of one instance."""
    options = ort.RunOptions()
    shrinkage = spec.parameters.get(SHRINKAGE)
    if shrinkage is not None:
        options.add_run_config_entry(SHRINKAGE, shrinkage)
    return options


def custom_operators(spec: ModelSpec) -> list[Path]:
    """Libraries of custom operators, in the version's or the model's directory, or anywhere."""
    names = child(spec.config, "model_operations").get("op_library_filename")
    found = []
    for name in names if isinstance(names, list) else []:
        candidates = [folder / str(name) for folder in (spec.version_directory, spec.directory)]
        path = next((path for path in candidates if path.is_file()), None)
        if path is None:
            raise InvalidArgumentError(
                f"unable to find '{name}' of model_operations.op_library_filename for model '{spec.name}'"
            )
        found.append(path)
    return found


def _graph_level(spec: ModelSpec) -> int:
    level = child(child(spec.config, "optimization"), "graph").get("level", 0)
    return int(str(level))
