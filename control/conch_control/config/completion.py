"""Completes a config through its backend, and locates the model file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from conch.core.backend import Backend
from conch.core.errors import InternalError, InvalidArgumentError, UnavailableError
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.json_format import from_json, to_json
from conch_control.config.platforms import FORMATS
from conch_control.config.problems import Checked, Problem, Problems
from conch_control.repository.layout import stays_within

_NATIVE = frozenset(entry.backend for entry in FORMATS if entry.model_file != "model.py")
"""Backends that are not Python code."""


def runtime_problems(config: ModelConfig) -> Problems:
    """Problems of a config's ``runtime``."""
    # No libraries can be chosen: the only runtime is the backend's own, under any of its names.
    own = {"", f"libtriton_{config.backend}.so"}
    if config.backend not in _NATIVE:
        own.add("model.py")
    if config.runtime not in own:
        path = PurePosixPath(config.runtime)
        escapes = path.is_absolute() or ".." in path.parts
        yield Problem(
            "runtime",
            f"backend library name '{config.runtime}' escapes backend directory, for model '{config.name}', "
            f"check model config runtime field"
            if escapes
            else f"unable to find backend library '{config.runtime}' for model '{config.name}'",
            expected="nothing: a backend has one runtime, its own",
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
            found="nothing of that name",
            kind=UnavailableError,
        )
    return name


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
