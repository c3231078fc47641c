"""`LlamaCppBackend`: models of llama.cpp; each instance is a worker with an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from conch.backends.python.api.pb_model_config import auto_complete
from conch.backends.python.python_settings import PARAMETERS
from conch.core.errors import ConchError, InvalidArgumentError
from conch.core.spec import ModelSpec
from conch_engines.llama_cpp import (
    llama_embedding_model,
    llama_model,
    llama_rerank_model,
    llama_settings,
    llama_tasks,
)
from conch_engines.llama_cpp.llama_file import LlamaFile, find_model
from conch_engines.llama_cpp.llama_settings import LONGEST, LORA_FILES, LlamaSettings
from conch_engines.llama_cpp.llama_tasks import EMBED, GENERATE, SCORE, check_task, find_task
from conch_engines.model_config import parameter_texts
from conch_engines.worker_engine import WorkerEngineBackend
from conch_llm.contract import ADAPTERS
from conch_llm.models.adapter import adapt
from conch_llm.models.answer_parsers import Parsers

_ENGINE = "xllamacpp"
_PLACEMENT = "CONCH_PLACEMENT"
_MODULES = {GENERATE: llama_model, EMBED: llama_embedding_model, SCORE: llama_rerank_model}


class LlamaCppBackend(WorkerEngineBackend):
    """The backend ``llama_cpp``."""

    default_model_file = ""
    parameters = (
        *(*PARAMETERS, "EXECUTION_ENV_PATH", "chat_template", "tokenizer"),
        *(*llama_settings.PARAMETERS, *llama_tasks.PARAMETERS),
    )

    def __init__(self) -> None:
        super().__init__(Path(__file__).parent)

    def complete_config(
        self, config: dict[str, Any], version_directory: Path, options: Mapping[str, str]
    ) -> dict[str, Any]:
        """Adds the tensors and the declaration of a model with methods for text, its context and adapters."""
        texts = parameter_texts(config)
        named = config.get("default_model_filename", "")
        found = None
        module: ModuleType = llama_model
        with suppress(ConchError):  # `check` raises it
            found = _read(config.get("name", ""), version_directory, named, texts)
            module = _MODULES[find_task(found[1], texts)]
        adapted = adapt(module.TritonPythonModel)
        assert adapted is not None
        completed = auto_complete(adapted, config)
        if found is not None:
            settings, file = found
            added = {LONGEST: str(settings.context_length(file.context_length))}
            if settings.lora_files:
                added[ADAPTERS] = ",".join(settings.lora_files)
            parameters = completed.setdefault("parameters", {})
            for name, text in added.items():
                if name not in texts:
                    parameters[name] = {"string_value": text}
        return completed

    def check(self, spec: ModelSpec) -> None:
        """Validates settings, and finds the model's files."""
        super().check(spec)
        where = f"model '{spec.name}'"
        if spec.parameters.get(_PLACEMENT, "worker") != "worker":
            raise InvalidArgumentError(
                f"{where}: llama.cpp runs in a worker only, which it ends if it fails; remove parameter "
                f"'{_PLACEMENT}'"
            )
        if spec.max_batch_size:
            raise InvalidArgumentError(f"{where}: max_batch_size must be 0, as the engine batches by itself")
        Parsers.of(spec.parameters)
        settings, file = _read(spec.name, spec.version_directory, spec.model_file, spec.parameters)
        settings.context_length(file.context_length)
        check_task(file, spec.parameters)
        named = spec.parameters.get(ADAPTERS)
        if named is not None and named != ",".join(settings.lora_files):
            raise InvalidArgumentError(
                f"parameter '{ADAPTERS}' follows from '{LORA_FILES}', and must not differ: remove it"
            )

    def warnings(self, spec: ModelSpec) -> Iterator[str]:
        """Says so if the engine is not installed, unless the model has an environment of its own."""
        if find_spec(_ENGINE) is None and not self.has_environment(spec):
            yield "package xllamacpp is not installed: pip install 'conch[llama]'"

    def _with_file(self, spec: ModelSpec) -> ModelSpec:
        module: ModuleType = llama_model
        with suppress(ConchError):  # `check` raises it
            _, file = _read(spec.name, spec.version_directory, spec.model_file, spec.parameters)
            module = _MODULES[find_task(file, spec.parameters)]
        return replace(spec, model_file=str(module.__file__))


def _read(
    name: str, directory: Path, file: str, parameters: Mapping[str, str]
) -> tuple[LlamaSettings, LlamaFile]:
    settings = LlamaSettings.of(parameters)
    return settings, find_model(directory, name, file, settings.lora_paths(directory).values())
