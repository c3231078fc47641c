"""Backends that configs may leave out: Triton's platform names and default file names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from conch.core.errors import InvalidArgumentError
from conch.protocol.model_config_pb2 import ModelConfig

ENSEMBLE = "ensemble"


@dataclass(frozen=True, slots=True)
class Format:
    """A model format.

    Attributes:
        backend: Backend that runs it.
        platform: Platform name that stands for it, or empty.
        model_file: Default name of the model's file or folder.
        aliases: Further platform names.
    """

    backend: str
    platform: str
    model_file: str
    aliases: tuple[str, ...] = ()


# In the order in which a version directory is searched.
FORMATS = (
    Format("tensorflow", "tensorflow_savedmodel", "model.savedmodel"),
    Format("tensorflow", "tensorflow_graphdef", "model.graphdef"),
    Format("tensorrt", "tensorrt_plan", "model.plan"),
    Format("onnxruntime", "onnxruntime_onnx", "model.onnx"),
    Format("openvino", "", "model.xml"),
    Format("pytorch", "pytorch_libtorch", "model.pt", ("libtorch",)),
    Format("pytorch", "torch_aoti", "model.pt2"),
    Format("python", "", "model.py"),
)

_BACKEND_OF_PLATFORM = {
    name: entry.backend for entry in FORMATS for name in (entry.platform, *entry.aliases) if name
}
# Triton knows no platform for its Python backend, so a pair with it is a pair of unknowns.
_BACKENDS_WITH_PLATFORM = frozenset(_BACKEND_OF_PLATFORM.values())


def is_ensemble(config: ModelConfig) -> bool:
    """Whether a config is meant as an ensemble's."""
    return config.platform == ENSEMBLE or config.HasField("ensemble_scheduling")


def fill_backend(config: ModelConfig, has_file: Callable[[str], bool]) -> None:
    """Fills in ``backend``, ``platform`` and ``default_model_filename`` where one tells the others.

    Args:
        config: The config, its name set; changed in place.
        has_file: Whether a version directory has an entry of that name.

    Raises:
        InvalidArgumentError: Nothing tells the backend.
    """
    if is_ensemble(config):
        return
    found = _format_of(config, has_file)
    if found is not None:
        config.backend = config.backend or found.backend
        config.platform = config.platform or found.platform
        config.default_model_filename = config.default_model_filename or found.model_file
    if not config.backend and not config.platform:
        config.backend = _backend_of_name(config.name)


def check_pair(config: ModelConfig) -> None:
    """Checks that platform and backend belong together.

    Raises:
        InvalidArgumentError: They do not, or both are missing.
    """
    platform, backend, name = config.platform, config.backend, config.name
    if is_ensemble(config):
        _check_ensemble(config)
        return
    if not backend:
        if platform:
            raise InvalidArgumentError(f"unexpected platform type '{platform}' for {name}")
        raise InvalidArgumentError(f"must specify 'platform' or 'backend' for '{name}'")
    known = backend if backend in _BACKENDS_WITH_PLATFORM else None
    if platform and _BACKEND_OF_PLATFORM.get(platform) != known:
        raise InvalidArgumentError(f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend}")


def _check_ensemble(config: ModelConfig) -> None:
    name = config.name
    if config.platform != ENSEMBLE:
        raise InvalidArgumentError(
            f"ensemble scheduling cannot be set for model '{name}' whose platform is not ensemble"
        )
    if config.backend:
        raise InvalidArgumentError(
            f"Ensemble model '{name}' must have platform type 'ensemble' and empty backend type"
        )
    if not config.HasField("ensemble_scheduling"):
        raise InvalidArgumentError(
            f"ensemble scheduling must be set for ensemble {name} whose platform is ensemble"
        )


def _format_of(config: ModelConfig, has_file: Callable[[str], bool]) -> Format | None:
    platform, backend, file = config.platform, config.backend, config.default_model_filename
    if platform:
        return next((entry for entry in FORMATS if platform in (entry.platform, *entry.aliases)), None)
    candidates = [entry for entry in FORMATS if backend in ("", entry.backend)]
    if file:
        named = next((entry for entry in candidates if entry.model_file == file), None)
        # A file of any other name says nothing, but a backend given with it still has its platform.
        return named or (candidates[0] if backend and candidates else None)
    found = next((entry for entry in candidates if has_file(entry.model_file)), None)
    return found or (candidates[0] if backend and candidates else None)


def _backend_of_name(name: str) -> str:
    _, dot, backend = name.rpartition(".")
    if not dot or not backend:
        raise InvalidArgumentError(
            f"Invalid model name: Could not determine backend for model '{name}' with no backend in model "
            f"configuration. Expected model name of the form 'model.<backend_name>'."
        )
    return backend
