"""Finds the model in a version directory: a folder of OpenVINO, or one GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch_engines.language.gguf_file import read_metadata
from conch_engines.language.json_files import own_sampling, read_object

GENERATE, EMBED, SCORE = "generate", "embed", "score"
TASK = "CONCH_TASK"
"""Config parameter: the task of a folder whose ``config.json`` does not tell."""

_FOLDER = ("openvino_model.xml", "openvino_model.bin", "openvino_tokenizer.xml")
_DETOKENIZER = "openvino_detokenizer.xml"
_TASKS = {
    "ForCausalLM": GENERATE,
    "ForConditionalGeneration": GENERATE,
    "LMHeadModel": GENERATE,
    "ForSequenceClassification": SCORE,
    "Model": EMBED,
}
"""Tasks by the end of an architecture's name; the first that fits."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk.

    Attributes:
        path: The folder or GGUF file, as the engine takes it.
        context_length: Most tokens of prompt and answer together; None if the model does not say.
        sampling: The model's own sampling parameters, as of `own_sampling`.
    """

    path: Path
    context_length: int | None
    sampling: Mapping[str, Any] = field(default_factory=dict)


def parameters_of(args: Mapping[str, str]) -> dict[str, str]:
    """The config's parameters in the arguments of a Python model."""
    found = json.loads(args["model_config"]).get("parameters", {})
    return {key: str(value.get("string_value", "")) for key, value in found.items()}


def find_task(directory: Path, name: str, parameters: Mapping[str, str]) -> str:
    """Finds the task of a model: ``generate``, ``embed`` or ``score``.

    Raises:
        InvalidArgumentError: The parameter or ``config.json`` has nothing that is known.
    """
    asked = parameters.get(TASK, "")
    if asked:
        if asked not in (GENERATE, EMBED, SCORE):
            raise InvalidArgumentError(f"parameter '{TASK}' must be generate, embed or score, not '{asked}'")
        return asked
    found = read_object(directory / "config.json", name).get("architectures")
    if not isinstance(found, list) or not found:
        return GENERATE
    architecture = str(found[0])
    for end, task in _TASKS.items():
        if architecture.endswith(end):
            return task
    raise InvalidArgumentError(
        f"model '{name}': the architecture {architecture!r} in '{directory / 'config.json'}' does not tell "
        f"what the model does: set parameter '{TASK}' to generate, embed or score"
    )


def find_model(directory: Path, name: str, task: str = GENERATE) -> ModelFiles:
    """The model in a version directory.

    Raises:
        UnavailableError: There is none.
        InvalidArgumentError: There are several, or a file is missing or malformed.
    """
    graph = directory / _FOLDER[0]
    weights = sorted(directory.glob("*.gguf"))
    if graph.is_file():
        needed = (*_FOLDER, _DETOKENIZER) if task == GENERATE else _FOLDER
        missing = [each for each in needed if not (directory / each).is_file()]
        if missing:
            raise InvalidArgumentError(f"model '{name}': '{directory}' lacks {', '.join(missing)}")
        config = read_object(directory / "config.json", name)
        return ModelFiles(directory, _context(config), own_sampling(directory, name))
    if not weights:
        raise UnavailableError(
            f"unable to find '{graph}' or a .gguf file for model '{name}': the version directory holds a "
            f"folder as optimum-intel exports it, or one GGUF file"
        )
    if task != GENERATE:
        raise InvalidArgumentError(f"model '{name}': the task '{task}' needs a folder of OpenVINO, not GGUF")
    if len(weights) > 1:
        names = ", ".join(each.name for each in weights)
        raise InvalidArgumentError(f"model '{name}': one GGUF file is expected, there are {names}")
    try:
        metadata = read_metadata(weights[0])
    except ValueError as error:
        raise InvalidArgumentError(f"model '{name}': '{weights[0]}' is no GGUF file: {error}") from None
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    sampling = own_sampling(directory, name, metadata)
    return ModelFiles(weights[0], length if isinstance(length, int) else None, sampling)


def _context(config: Mapping[str, Any]) -> int | None:
    for each in (config, config.get("text_config")):
        found = each.get("max_position_embeddings") if isinstance(each, Mapping) else None
        if isinstance(found, int):
            return found
    return None
