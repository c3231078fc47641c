"""Completion of a config by its backend, from what the model's file tells."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from conch.core.backend import Backend
from conch.core.errors import InternalError, InvalidArgumentError
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.jsonform import from_json, to_json


def complete(
    config: ModelConfig, backend: Backend, version_directory: Path, options: Mapping[str, str]
) -> ModelConfig:
    """The config as the backend completes it; the model's name is not the backend's to change.

    Raises:
        ConchError: The backend can't complete it, or made something of it that is no config.
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
