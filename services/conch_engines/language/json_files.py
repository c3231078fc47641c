"""Reads the JSON files of a model, and what they and a GGUF file say of its sampling."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from conch.core.errors import InvalidArgumentError

T = TypeVar("T", dict[str, Any], list[Any])

_GENERATION = "generation_config.json"
_OF_GGUF = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Parameters by their names in ``general.sampling`` of a GGUF file, with their names in requests."""


def own_sampling(directory: Path, name: str, metadata: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """A model's own sampling parameters: of ``generation_config.json``, else of its GGUF file.

    Args:
        directory: The version directory.
        name: The model's name.
        metadata: The metadata of its GGUF file, if it has one.

    Raises:
        InvalidArgumentError: The file has no JSON object.
    """
    values = {ours: (metadata or {}).get(f"general.sampling.{key}") for key, ours in _OF_GGUF.items()}
    own = {ours: value for ours, value in values.items() if isinstance(value, (int, float))}
    return {**own, **read_object(directory / _GENERATION, name)}


def read_object(path: Path, name: str) -> dict[str, Any]:
    """A file of a model with a JSON object; empty without one. Raises InvalidArgumentError."""
    try:
        return read_json(path, dict)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"model '{name}': {error.message}") from None


def read_json(path: Path, kind: type[T]) -> T:
    """A file with a JSON object or list; empty without one.

    Raises:
        InvalidArgumentError: It has something else.
    """
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return kind()
    except ValueError as error:
        raise InvalidArgumentError(f"'{path}' is no JSON: {error}") from None
    if not isinstance(found, kind):
        raise InvalidArgumentError(f"'{path}' must have a JSON {'object' if kind is dict else 'list'}")
    return found
