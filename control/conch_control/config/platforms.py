"""Backend, platform and model file of a config, by Triton's names.

`filling_backend` derives them from each other, `checked_model_file` locates the file in a version directory,
`complete` asks the backend for what the config leaves out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from conch.core.backend import Backend
from conch.core.errors import InternalError, InvalidArgumentError, UnavailableError
from conch.core.file_formats import LIGHTGBM, TREE_FORMATS, describe, identify
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.json_format import from_json, to_json
from conch_control.config.named_files import stays_within
from conch_control.config.problems import Checked, Problem, Problems, nearest

ENSEMBLE = "ensemble"
_MOST_FILES = 20


@dataclass(frozen=True, slots=True)
class Format:
    """A model format: backend, platform names, default name of the model's file or folder, runtime."""

    backend: str
    platform: str
    model_file: str
    aliases: tuple[str, ...] = ()
    runtime: str = ""


_TORCH_SCRIPT = "model.pt"

# In search order.
FORMATS = (
    Format("tensorflow", "tensorflow_savedmodel", "model.savedmodel"),
    Format("tensorflow", "tensorflow_graphdef", "model.graphdef"),
    Format("tensorrt", "tensorrt_plan", "model.plan"),
    Format("onnxruntime", "onnxruntime_onnx", "model.onnx"),
    Format("openvino", "", "model.xml"),
    Format("pytorch", "pytorch_libtorch", "model.py", runtime="model.py"),
    Format("pytorch", "pytorch_libtorch", _TORCH_SCRIPT, ("libtorch",)),
    Format("pytorch", "torch_aoti", "model.pt2"),
    Format("python", "", "model.py"),
    Format("tflite", "", "model.tflite"),
)

_BOOSTER = "model.bst"
"""Name that KServe and MLServer give files of XGBoost and of LightGBM."""

_LLAMA = "llama_cpp"

# Behind Triton's formats, for configs without a backend: these find their files themselves.
OWN_FORMATS = tuple(
    Format(backend, "", name)
    for backend, names in {
        "fil": ("xgboost.json", "xgboost.ubj", "xgboost.model", "checkpoint.tl"),
        "xgboost": ("model.json", "model.ubj", "model.xgb", _BOOSTER),
        "lightgbm": ("model.txt", "lightgbm.txt", _BOOSTER),
        "sklearn": ("model.skops",),
        _LLAMA: ("model.gguf",),
        "catboost": ("model.cbm",),
    }.items()
    for name in names
)

_BACKEND_OF_PLATFORM = {
    name: entry.backend for entry in FORMATS for name in (entry.platform, *entry.aliases) if name
}
# Triton has no platform for its Python backend: such a pair counts as unknown.
_BACKENDS_WITH_PLATFORM = frozenset(_BACKEND_OF_PLATFORM.values())


def is_ensemble(config: ModelConfig) -> bool:
    """True for an ensemble's config."""
    return config.platform == ENSEMBLE or config.HasField("ensemble_scheduling")


def filling_backend(
    config: ModelConfig, has_file: Callable[[str], bool], version_directory: Path | None = None
) -> Problems:
    """Fills in ``backend``, ``platform`` and ``default_model_filename``, or yields why it can't."""
    if is_ensemble(config):
        return
    found = _format_of(config, has_file, version_directory)
    if found is not None:
        # Triton names TorchScript's file only for a backend without a platform.
        if found.model_file != _TORCH_SCRIPT or (config.backend and not config.platform):
            config.default_model_filename = config.default_model_filename or found.model_file
        config.backend = config.backend or found.backend
        config.platform = config.platform or found.platform
    if config.backend or config.platform:
        return
    _, dot, backend = config.name.rpartition(".")
    if dot and backend:
        config.backend = backend
        usual = next((entry.model_file for entry in FORMATS if entry.backend == backend), f"model.{backend}")
        config.default_model_filename = config.default_model_filename or usual
        return
    files = "" if version_directory is None else _files_of(version_directory)
    yield Problem(
        "backend",
        f"Invalid model name: Could not determine backend for model '{config.name}' with no backend in model "
        f"configuration. Expected model name of the form 'model.<backend_name>'."
        + (
            f" Version directory {version_directory.name} has {files}." if version_directory and files else ""
        ),
        expected="the name of a backend, or a model file of a usual name, such as model.py or model.onnx, in "
        "the version directories",
        found=files or "nothing",
    )


def pair_problems(config: ModelConfig) -> Problems:
    """Problems of platform and backend together."""
    platform, backend, name = config.platform, config.backend, config.name
    if is_ensemble(config):
        yield from _ensemble_problems(config)
        return
    if not backend:
        if platform:
            near = nearest(platform, [*_BACKEND_OF_PLATFORM, ENSEMBLE])
            yield Problem("platform", f"unexpected platform type '{platform}' for {name}", nearest=near)
        else:
            yield Problem("backend", f"must specify 'platform' or 'backend' for '{name}'", found="nothing")
        return
    known = backend if backend in _BACKENDS_WITH_PLATFORM else None
    if platform and _BACKEND_OF_PLATFORM.get(platform) != known:
        usual = next((entry.platform for entry in FORMATS if entry.backend == backend), "")
        yield Problem(
            "platform",
            f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend}",
            expected=f"'{usual}' for backend '{backend}'" if usual else f"none for backend '{backend}'",
        )


def _ensemble_problems(config: ModelConfig) -> Problems:
    name = config.name
    if config.platform != ENSEMBLE:
        yield Problem(
            "platform",
            f"ensemble scheduling cannot be set for model '{name}' whose platform is not ensemble",
            expected=f"'{ENSEMBLE}'",
            found=f"'{config.platform}'" if config.platform else "nothing",
        )
    if config.backend:
        yield Problem(
            "backend",
            f"Ensemble model '{name}' must have platform type 'ensemble' and empty backend type",
            expected="nothing",
        )
    if not config.HasField("ensemble_scheduling"):
        yield Problem(
            "ensemble_scheduling",
            f"ensemble scheduling must be set for ensemble {name} whose platform is ensemble",
            found="nothing",
        )


def _format_of(
    config: ModelConfig, has_file: Callable[[str], bool], version_directory: Path | None
) -> Format | None:
    platform, backend, file = config.platform, config.backend, config.default_model_filename
    formats = [entry for entry in FORMATS if entry.runtime in ("", config.runtime)]
    if platform:
        told = (entry for entry in formats if platform in (entry.platform, *entry.aliases))
        by_file = (entry for entry in formats if entry.model_file == file and not backend)
        return next(told, None) or next(by_file, None)
    candidates = [entry for entry in formats if entry.backend == backend]
    if not backend:
        candidates = [*formats, *OWN_FORMATS]
    if file:
        named = next((entry for entry in candidates if entry.model_file == file), None)
        # Other file names tell nothing; a given backend still implies its platform.
        return named or (candidates[0] if backend and candidates else None)
    found = next(
        (
            entry
            for entry in candidates
            if has_file(entry.model_file)
            and (entry not in OWN_FORMATS or _is_of_trees(entry, version_directory))
        ),
        None,
    )
    return found or (candidates[0] if backend and candidates else None)


_NATIVE = frozenset(entry.backend for entry in (*FORMATS, *OWN_FORMATS) if entry.model_file != "model.py")
"""Backends that are not Python code."""


def runtime_problems(config: ModelConfig) -> Problems:
    """Problems of a config's ``runtime``."""
    path = PurePosixPath(config.runtime)
    escapes = path.is_absolute() or ".." in path.parts
    if path.suffix == ".so" and not escapes:
        return  # the search for the library tells whether it is there
    own = {""}
    own.update(entry.runtime for entry in FORMATS if entry.backend == config.backend)
    if config.backend not in _NATIVE:
        own.add("model.py")
    if config.runtime not in own:
        yield Problem(
            "runtime",
            f"backend library name '{config.runtime}' escapes backend directory, for model '{config.name}', "
            f"check model config runtime field"
            if escapes
            else f"unable to find backend library '{config.runtime}' for model '{config.name}'",
            expected="nothing, or the name of a library, such as 'libtriton_NAME.so'",
        )


def checked_model_file(
    config: ModelConfig, backend: Backend, directory: Path, version_directory: Path
) -> Checked[str]:
    """Name of the model's file or folder in a version directory, and its problems."""
    name = config.default_model_filename or backend.default_model_file
    path = version_directory / name
    # Joined as it is opened: an absolute name replaces the directory.
    if not stays_within(directory, os.path.join(version_directory.name, name)):
        yield Problem(
            "default_model_filename",
            f"default_model_filename '{name}' must stay within the directory of model '{config.name}'",
            expected="the name of a file in the version directories, relative to them",
        )
    elif backend.needs_model_file and not path.exists():
        yield Problem(
            "default_model_filename",
            f"unable to find '{path}' for model '{config.name}'",
            expected=f"a file or folder '{name}' in version directory {version_directory.name}",
            found=_files_of(version_directory) or "nothing of that name",
            kind=UnavailableError,
        )
    return name


def _is_of_trees(entry: Format, version_directory: Path | None) -> bool:
    """False for a file of another content: names such as model.json are used by models of all kinds."""
    if version_directory is None or entry.backend == _LLAMA:
        return True
    try:
        found = identify(version_directory / entry.model_file)
    except OSError:
        return True  # its load says why it can't be read
    if entry.model_file == _BOOSTER and (found is LIGHTGBM) != (entry.backend == "lightgbm"):
        return False
    return found in TREE_FORMATS


def _files_of(version_directory: Path) -> str:
    """The files of a version that are recognised or have a usual name, with what they are."""
    try:
        paths = sorted(version_directory.iterdir())
    except OSError:
        return ""
    unlike = dict.fromkeys((each.model_file for each in OWN_FORMATS), "has not the content of such a file")
    found = [
        f"'{path.name}', which {what}"
        for path in paths[:_MOST_FILES]
        if (what := describe(path) or unlike.get(path.name))
    ]
    return "; ".join(found)


def complete(
    config: ModelConfig, backend: Backend, version_directory: Path, options: Mapping[str, str]
) -> ModelConfig:
    """The config as the backend completes it; the model's name stays.

    Raises:
        ConchError: Completion failed, or returned no valid config.
    """
    data = backend.complete_config(to_json(config), version_directory, options)
    try:
        completed = from_json(data)
    except InvalidArgumentError as error:
        raise InternalError(
            f"backend '{config.backend}' completed the config of model '{config.name}' to something that "
            f"is no config: {error.message}"
        ) from error
    completed.name = config.name
    return completed
